"""What a process with TransformerEngine on its path computes; ``tests/fake_te`` stands in for it on a CPU.

python te_worker.py OUT.pt [--hidden]: with ``--hidden`` there is no TransformerEngine, whatever is installed
"""

import importlib.util
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

if "--hidden" in sys.argv:
    # what Python takes for a package that is not there
    sys.modules["transformer_engine"] = None  # type: ignore[assignment]

from rl_megatron import (
    ParallelConfig,
    TrainerRank,
    build_model,
    export_hf,
    group_advantages,
    grpo_loss,
    megatron_optimizer,
    native,
    te,
    topology,
)
from rl_megatron.batch import PackedBatch
from rl_megatron.checkpoint import load_tensors
from rl_megatron.cpu_device import cpu_device
from rl_megatron.model import module_classes
from rl_megatron.optimizer import OptimizerConfig, make_optimizer
from rl_megatron.scoring import token_logprobs


def step(tiny: Any, mode: Any, operators: Any = "auto", tied: bool = False) -> dict[str, Any]:
    """One training step of a tiny model: its log-probabilities, its gradients by name, and what it is made of."""
    config = tiny.tiny_config(tie_word_embeddings=tied)
    tensors = tiny.tiny_tensors(config)
    model = build_model(config, tiny.tiny_profile(config), ParallelConfig(), mode=mode, native_operators=operators)
    load_tensors(model, tensors)
    kept = export_hf(model)
    assert kept is not None
    optimizer: Any = make_optimizer(model, OptimizerConfig(lr=1e-3))
    samples = tiny.tiny_samples(97, ((3, 5), (17, 33), (1, 1), (9, 0)))
    batches = [PackedBatch.pack(part, vocab_size=97, max_positions=512) for part in (samples[:2], samples[2:], samples)]
    logps = [token_logprobs(model, batch) for batch in batches[:2]]
    gains = group_advantages(torch.tensor([0.0, 1.0, 3.0, 2.0]), 2)
    losses = []
    for batch, logp, gain in zip(batches, logps, gains.split(2)):
        per_token = gain.repeat_interleave(torch.tensor(batch.response_lengths))
        losses.append(grpo_loss(logp, logp.detach(), per_token, batch.loss_mask, denominator=39).value)
    # the last backward is that of the first forward
    with cpu_device():
        torch.stack(losses).sum().backward()
    left = [name for name, p in model.named_parameters() if p.grad is not None]
    optimizer.collect()
    grads = {name: p.main_grad.clone() for name, p in model.named_parameters()}
    figures = optimizer.step()
    with torch.no_grad():
        cooler, entropy = token_logprobs(model, batches[2], temperature=0.7, with_entropy=True)
    return {
        "logprobs": torch.cat(logps).detach(),
        "grads": grads,
        "left to autograd": left,
        "grad_norm": figures["grad_norm"],
        "after": {name: p.detach().clone() for name, p in model.named_parameters()},
        "cooler": cooler.detach(),
        "entropy": entropy,
        "round trip": set(kept) == set(tensors) and all(torch.equal(kept[n], tensors[n]) for n in tensors),
        "classes": module_classes(model),
        "states": list(optimizer.state_dict()["state"]),
        "config": {
            name: getattr(model.config, name)
            for name in ("apply_rope_fusion", "bias_activation_fusion", "gradient_accumulation_fusion")
        },
        "report": te.report(model.rl.native_operators, model.rl.native_fallback) if mode == "native" else None,
        "substitutions": native.native_substitutions(model.rl.native_operators) if mode == "native" else None,
        "built": model.rl.native_operators,
    }


class CpuForCuda(TorchFunctionMode):
    """Puts on the CPU what is asked for CUDA, and calls it by the name that Megatron's optimizer asks tensors for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        found = func(*args, **kwargs)
        return found.replace("torch.", "torch.cuda.", 1) if func is torch.Tensor.type and len(args) == 1 else found


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Lets Megatron's optimizer run on a CPU."""
    held, megatron_optimizer.device = megatron_optimizer.device, lambda: torch.device("cuda")  # type: ignore[assignment]
    try:
        with cpu_device(), CpuForCuda():
            yield
    finally:
        megatron_optimizer.device = held


def megatron_step(tiny: Any, mode: Any, operators: Any = "auto", distributed: bool = False) -> dict[str, Any]:
    """Two steps of Megatron's own optimizer on made-up gradients: what it is made of, and the weights after them."""
    config = tiny.tiny_config()
    model = build_model(config, tiny.tiny_profile(config), ParallelConfig(), mode=mode, native_operators=operators)
    load_tensors(model, tiny.tiny_tensors(config))
    with as_on_a_gpu():
        settings = OptimizerConfig(kind="megatron", lr=1e-2, weight_decay=0.1, clip_grad=0.5, distributed=distributed)
        optimizer: Any = make_optimizer(model, settings)
        figures = []
        for seed in range(2):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(seed)
            for _, parameter in sorted(model.named_parameters()):
                parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))
            figures.append(optimizer.step())
        optimizer.load_state_dict(optimizer.state_dict())
    return {
        "ran": optimizer.ran(),
        "figures": figures,
        "after": {name: p.detach().clone() for name, p in model.named_parameters()},
        "calls": dict(getattr(sys.modules.get("transformer_engine.pytorch.optimizers"), "CALLS", {})),
    }


def trainer_report(tiny: Any, mode: Any) -> dict[str, Any]:
    """What a trainer rank that left ``native_operators`` at ``auto`` reports."""
    config, folder = tiny.tiny_config(), Path(tempfile.mkdtemp())
    path = tiny.write_folder(folder / "model", config, tiny.tiny_tensors(config))
    rest: dict[str, Any] = {"hf_path": path, "profile": tiny.tiny_profile(config), "mode": mode}
    trainer = TrainerRank(rank=0, init_method=f"file://{folder}/init", **rest)
    try:
        return {name: part for name, part in trainer.init().items() if name in ("optimizer", "native")}
    finally:
        trainer.close()


def main(out: str) -> None:
    from megatron.core.extensions.transformer_engine import HAVE_TE

    spec = importlib.util.spec_from_file_location("tiny", Path(__file__).with_name("conftest.py"))
    assert spec is not None
    assert spec.loader is not None
    tiny = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tiny)
    torch.set_num_threads(1)
    reports = {mode: trainer_report(tiny, mode) for mode in ("strict", "native")}
    topology.start(0, ParallelConfig(), f"file://{tempfile.mkdtemp()}/init")
    found: dict[str, Any] = {"HAVE_TE": HAVE_TE, "reports": reports, "strict": step(tiny, "strict")}
    own = found["megatron's optimizer"] = {
        "strict": megatron_step(tiny, "strict"),
        "strict distributed": megatron_step(tiny, "strict", distributed=True),
        "local": megatron_step(tiny, "native", "local"),
    }
    if "--hidden" in sys.argv:
        topology.stop()
        torch.save(found, out)
        return
    found["auto on a CPU"] = step(tiny, "native")
    # the stand-in needs no GPU
    te.choose = lambda operators, **_: te.Choice("local" if operators == "local" else "te")  # type: ignore[assignment]
    found["te"], found["te tied"] = step(tiny, "native", "te"), step(tiny, "native", "te", tied=True)
    found["local tied"] = step(tiny, "native", "local", tied=True)
    own["te"] = megatron_step(tiny, "native", "te")
    topology.stop()
    torch.save(found, out)


if __name__ == "__main__":
    main(sys.argv[1])
