"""What a process with TransformerEngine on its path computes; ``tests/fake_te`` stands in for it on a CPU.

python te_worker.py OUT.pt
"""

import importlib.util
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from rl_megatron import ParallelConfig, build_model, export_hf, group_advantages, grpo_loss, native, te, topology
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
        "report": te.report(model.rl.native_operators) if mode == "native" else None,
        "substitutions": native.native_substitutions(model.rl.native_operators) if mode == "native" else None,
        "built": model.rl.native_operators,
    }


def main(out: str) -> None:
    from megatron.core.extensions.transformer_engine import HAVE_TE

    spec = importlib.util.spec_from_file_location("tiny", Path(__file__).with_name("conftest.py"))
    assert spec is not None
    assert spec.loader is not None
    tiny = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tiny)
    torch.set_num_threads(1)
    topology.start(0, ParallelConfig(), f"file://{tempfile.mkdtemp()}/init")
    found: dict[str, Any] = {"HAVE_TE": HAVE_TE, "strict": step(tiny, "strict")}
    found["auto on a CPU"] = step(tiny, "native")
    # the stand-in needs no GPU
    te.resolve = lambda operators, **_: "local" if operators == "local" else "te"  # type: ignore[assignment]
    found["te"], found["te tied"] = step(tiny, "native", "te"), step(tiny, "native", "te", tied=True)
    found["local tied"] = step(tiny, "native", "local", tied=True)
    topology.stop()
    torch.save(found, out)


if __name__ == "__main__":
    main(sys.argv[1])
