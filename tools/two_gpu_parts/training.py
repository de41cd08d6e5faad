"""Two GPUs train as one: log-probabilities, losses, gradient norms and weights of TP2 and CP2 are those of one rank.

Ranks 0 and 1 train both worlds; a third process meanwhile trains the one rank's, on the first GPU.
"""

import json
import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

STEPS, ALONE = 3, 2
LENGTHS = ((3, 5), (170, 440), (1, 1), (600, 911), (40, 25), (1, 300))
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 5000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def write_checkpoint(folder: Path) -> None:
    from safetensors.torch import save_file

    g = torch.Generator().manual_seed(0)
    h, f, d, v = (CONFIG[k] for k in ("hidden_size", "intermediate_size", "head_dim", "vocab_size"))
    q, kv = CONFIG["num_attention_heads"] * d, CONFIG["num_key_value_heads"] * d

    def matrix(n: int, k: int, scale: float | None = None) -> torch.Tensor:
        return (torch.randn(n, k, generator=g) * (scale or k**-0.5)).bfloat16()

    def norm(n: int) -> torch.Tensor:
        return (1 + 0.1 * torch.randn(n, generator=g)).bfloat16()

    out = {"model.embed_tokens.weight": matrix(v, h, 1.0), "lm_head.weight": matrix(v, h), "model.norm.weight": norm(h)}
    for i in range(CONFIG["num_hidden_layers"]):
        p = f"model.layers.{i}."
        rows = {"q": q, "k": kv, "v": kv}
        out |= {f"{p}self_attn.{n}_proj.weight": matrix(r, h) for n, r in rows.items()}
        out |= {f"{p}self_attn.{n}_norm.weight": norm(d) for n in "qk"}
        out[f"{p}self_attn.o_proj.weight"] = matrix(h, q)
        out |= {f"{p}mlp.{n}_proj.weight": matrix(f, h) for n in ("gate", "up")}
        out[f"{p}mlp.down_proj.weight"] = matrix(h, f)
        out |= {f"{p}{n}_layernorm.weight": norm(h) for n in ("input", "post_attention")}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(out, folder / "model.safetensors", metadata={"format": "pt"})


def train(
    rank: int, folder: str, name: str, tp: int, cp: int, device: str, stage: Callable[[str], None]
) -> dict[str, Any]:
    from rl_contract import Settings, build_profile
    from rl_gemm.gpu import arch
    from rl_megatron import LossConfig, OptimizerConfig, ParallelConfig, TrainerRank

    settings = Settings(
        hidden_size=CONFIG["hidden_size"], vocab_size=CONFIG["vocab_size"], norm_eps=1e-6, leaves=2,
        rope={"theta": 1e6, "rotary_dim": CONFIG["head_dim"]}, arch=arch(0) if device == "cuda" else "cpu",
        dtype="bfloat16",
    )  # fmt: skip
    trainer = TrainerRank(
        rank=rank, init_method=f"file://{folder}/{name}", hf_path=f"{folder}/model",
        profile=build_profile("two", settings), parallel=ParallelConfig(tp=tp, cp=cp), device=device,
        optimizer=OptimizerConfig(lr=1e-3, weight_decay=0.1), loss=LossConfig(kl_coef=0.05),
    )  # fmt: skip
    trainer.init()
    stage(f"{name}: model built and loaded")
    g = torch.Generator().manual_seed(1)
    samples = [tuple(torch.randint(0, CONFIG["vocab_size"], (n,), generator=g).tolist() for n in p) for p in LENGTHS]
    trainer.keep_reference()
    out: dict[str, Any] = {"steps": []}
    for number in range(STEPS):
        old, ref = trainer.logprobs(samples), trainer.reference_logprobs(samples)
        stage(f"{name}: step {number} scored")
        step = trainer.train_step(samples, [1.0, -0.5, 2.0, 0.3, -1.25, 0.7], old, ref_logprobs=ref)
        assert all(np.array_equal(a, b) for a, b in zip(step["logprobs"], old)), f"{name}: training is not scoring"
        stage(f"{name}: step {number} trained")
        out["steps"].append({**step, "logprobs": np.concatenate(old)})
    out["gradients"] = {n: p.main_grad.cpu().clone() for n, p in trainer.model.named_parameters()}
    out["weights"] = {n: t.cpu() for n, t in (trainer.export_weights() or {}).items()}
    out["transports"] = trainer.report()["transports"]
    trainer.close()
    stage(f"{name}: closed")
    return out


def compared(one: dict[str, Any], other: dict[str, Any]) -> dict[str, int]:
    """How much was compared, and how much of it has other bits; gradients of the last step where ranks hold all."""
    found = {"log-probabilities": 0, "losses and norms": 0, "weights": 0, "gradients": 0}
    differing = dict.fromkeys(found, 0)
    for a, b in zip(one["steps"], other["steps"], strict=True):
        found["log-probabilities"] += a["logprobs"].size
        differing["log-probabilities"] += int((a["logprobs"].view(np.int32) != b["logprobs"].view(np.int32)).sum())
        found["losses and norms"] += 2
        differing["losses and norms"] += (a["loss"] != b["loss"]) + (a["grad_norm"] != b["grad_norm"])
    for kind, integer in (("weights", torch.int16), ("gradients", torch.int32)):
        for n, t in one[kind].items():
            theirs = other[kind][n]
            # a tensor parallel rank has a part
            if t.shape == theirs.shape:
                found[kind] += t.numel()
                differing[kind] += int((t.view(integer) != theirs.view(integer)).sum())
    return found | {f"differing {kind}": count for kind, count in differing.items()}


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.05)


def run(rank: int, folder: str, settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    stage, device = settings.get("stage", print), settings.get("device", "cuda")
    import rl_megatron.trainer  # noqa: F401 - so that its time is told apart

    stage("imported")
    ready, alone = Path(folder) / "model" / "ready", Path(folder) / "alone.pkl"
    if rank == 0:
        write_checkpoint(Path(folder) / "model")
        ready.touch()
    wait_for(ready)
    stage("checkpoint there")
    if rank == ALONE:
        partial = alone.with_suffix(".partial")
        partial.write_bytes(pickle.dumps(train(0, folder, "one-rank", 1, 1, device, stage)))
        partial.rename(alone)
        stage("written")
        return
    done: dict[str, Any] = {}
    errors: list[str] = []
    for name, tp, cp in (("TP2", 2, 1), ("CP2", 1, 2)):
        begin = time.monotonic()
        done[name] = train(rank, folder, name, tp, cp, device, stage)
        yield {f"{name}, seconds": round(time.monotonic() - begin, 1), f"{name}, moved by": done[name]["transports"]}
    if rank:
        return
    wait_for(alone)
    one = pickle.loads(alone.read_bytes())
    stage("one rank read")
    for name in ("TP2", "CP2"):
        found = compared(one, done[name])
        wrong = {kind: n for kind, n in found.items() if (n > 0) == kind.startswith("differing")}
        if wrong:
            errors.append(f"{name}: {wrong}")
        yield {f"{name} = one rank": found, "errors": errors}
