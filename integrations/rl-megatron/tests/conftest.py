"""Tiny random checkpoints, profiles, and worlds of trainer processes."""

import importlib.util
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rl_contract import Profile, Settings, build_profile

WORKER = Path(__file__).with_name("world_worker.py")


def tiny_config(arch: str = "Qwen3ForCausalLM", **overrides: Any) -> dict[str, Any]:
    config = {
        "architectures": [arch],
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "hidden_act": "silu",
        "vocab_size": 97,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "torch_dtype": "bfloat16",
    }
    return config | overrides


def tiny_tensors(
    config: dict[str, Any], *, seed: int = 0, dtype: torch.dtype = torch.bfloat16
) -> dict[str, torch.Tensor]:
    """Weights of realistic scale, three outlier channels a norm."""
    generator = torch.Generator().manual_seed(seed)
    h, f, d = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    v, hq, hk = config["vocab_size"], config["num_attention_heads"], config["num_key_value_heads"]

    def normal(*shape: int, std: float) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * std

    def norm(width: int) -> torch.Tensor:
        weight = 1 + 0.1 * torch.randn(width, generator=generator)
        weight[torch.randperm(width, generator=generator)[:3]] *= 6
        return weight

    out = {"model.embed_tokens.weight": normal(v, h, std=0.1 if config["tie_word_embeddings"] else 1.0)}
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}."
        out[p + "input_layernorm.weight"] = norm(h)
        out[p + "self_attn.q_proj.weight"] = normal(hq * d, h, std=h**-0.5)
        out[p + "self_attn.k_proj.weight"] = normal(hk * d, h, std=h**-0.5)
        out[p + "self_attn.v_proj.weight"] = normal(hk * d, h, std=h**-0.5)
        out[p + "self_attn.o_proj.weight"] = normal(h, hq * d, std=(hq * d) ** -0.5)
        if "Qwen3" in config["architectures"][0]:
            out[p + "self_attn.q_norm.weight"] = norm(d)
            out[p + "self_attn.k_norm.weight"] = norm(d)
        out[p + "post_attention_layernorm.weight"] = norm(h)
        out[p + "mlp.gate_proj.weight"] = normal(f, h, std=h**-0.5)
        out[p + "mlp.up_proj.weight"] = normal(f, h, std=h**-0.5)
        out[p + "mlp.down_proj.weight"] = normal(h, f, std=f**-0.5)
    out["model.norm.weight"] = norm(h)
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = normal(v, h, std=0.5 * h**-0.5)
    return {name: t.to(dtype).contiguous() for name, t in out.items()}


def write_folder(path: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> str:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return str(path)


def tiny_profile(config: dict[str, Any], **overrides: Any) -> Profile:
    settings: dict[str, Any] = {
        "hidden_size": config["hidden_size"],
        "vocab_size": config["vocab_size"],
        "norm_eps": config["rms_norm_eps"],
        "rope": {"theta": config["rope_theta"], "rotary_dim": config["head_dim"]},
        "leaves": 4,
        "vocab_tile": 64,
    }
    return build_profile("test", Settings(**(settings | overrides)))


def tiny_model(
    arch: str, tied: bool, dtype: str = "bfloat16", mode: Any = "strict", **overrides: Any
) -> tuple[dict[str, Any], dict[str, torch.Tensor], Any]:
    """(config, tensors, the model of one rank that holds them)."""
    from rl_megatron import ParallelConfig, build_model
    from rl_megatron.checkpoint import load_tensors

    config = tiny_config(arch, tie_word_embeddings=tied, **overrides)
    tensors = tiny_tensors(config, dtype=getattr(torch, dtype))
    model = build_model(config, tiny_profile(config, dtype=dtype), ParallelConfig(), mode=mode)
    load_tensors(model, tensors)
    return config, tensors, model


def tiny_samples(vocab: int, lengths: tuple[tuple[int, int], ...], seed: int = 1) -> list[tuple[list[int], list[int]]]:
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(0, vocab, (n,), generator=generator).tolist() for n in pair) for pair in lengths]


def tensors_without_numbers(dtype: torch.dtype = torch.float32) -> list[tuple[torch.Tensor, str]]:
    """Two ones of every kind that is no dense tensor with values, and how a refusal calls it."""
    ones = torch.ones(2, dtype=dtype)
    kinds = [
        (ones.to_sparse(), "a tensor of layout torch.sparse_coo"),
        (ones[None].to_sparse_csr(), "a tensor of layout torch.sparse_csr"),
        (torch.nested.nested_tensor([ones]), "a nested tensor"),
        (torch.nested.nested_tensor([ones], layout=torch.jagged), "a nested tensor"),
        (ones.to("meta"), "a tensor on the meta device"),
        (torch.nn.parameter.UninitializedBuffer(), "an uninitialized parameter"),
    ]
    if dtype == torch.float32:
        kinds += [
            (ones.to_mkldnn(), "a tensor of layout torch._mkldnn"),
            (torch.quantize_per_tensor(ones, 1.0, 0, torch.qint8), "a quantized tensor of torch.qint8"),
        ]
    return kinds


def run_world(
    folder: Path, world: int, job: dict[str, Any], seconds: float = 300, stop: threading.Event | None = None
) -> list[dict[str, Any]]:
    """Run a job of ``world_worker.py`` on ``world`` processes; returns what each rank wrote.

    It is given up once ``stop`` is set. What its ranks say goes to ``GPU_TESTS_LOGS``, where ``tools/gpu_tests`` looks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.pkl").write_bytes(pickle.dumps(job))
    on_gpu = any(case["trainer"].get("device", "cpu") != "cpu" for case in job.values())
    logs = os.environ.get("GPU_TESTS_LOGS")
    log, end = Path(logs) / f"{folder.name}.log" if logs else folder / "log.txt", time.monotonic() + seconds
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(WORKER), str(folder), str(world), *(["gpu"] if on_gpu else [])],
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        while process.poll() is None and time.monotonic() < end and not (stop and stop.is_set()):
            time.sleep(0.02)
        status = process.poll()
    finally:
        # its ranks too, which nobody would end, and which hold a GPU
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    said = log.read_text(errors="replace")[-6000:]
    why = "was given up" if stop and stop.is_set() else f"did not end within {seconds:g} s"
    assert status is not None, f"world {folder.name} {why}; it said\n{said}"
    assert not status, f"world {folder.name} failed; it said\n{said}"
    return [pickle.loads((folder / f"out{rank}.pkl").read_bytes()) for rank in range(world)]


def said_by_two(program: str, folder: Path) -> list[str]:
    """What each of two ranks of ``program RANK FILE`` prints."""
    command = [sys.executable, "-W", "ignore", "-c", program]
    ranks = [
        subprocess.Popen([*command, str(rank), str(folder / "init")], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=120)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], said
    return said


def load(name: str) -> Any:
    """A helper module beside the tests, which pytest's import mode does not put on the path."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def tiny() -> Any:
    """The helpers of this file, for test modules."""
    return sys.modules[__name__]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A world of one in this process."""
    from rl_megatron import ParallelConfig, topology

    torch.set_num_threads(1)
    topology.start(0, ParallelConfig(), f"file://{tmp_path_factory.mktemp('world')}/init")
    yield
    topology.stop()
