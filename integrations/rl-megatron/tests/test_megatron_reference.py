"""A reference policy beside the actor changes nothing of the actor: scores, losses, gradients' norm, weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rl_megatron import OptimizerConfig, TrainerRank

SAMPLES = ((3, 5), (17, 33), (1, 1), (30, 70))
ADVANTAGES = [1.0, -0.5, 2.0, -1.25]


def train(tiny: Any, folder: Path, *, reference: bool) -> dict[str, Any]:
    """Two steps; with a reference, it is scored before and between all calls of the actor."""
    config = tiny.tiny_config()
    path = tiny.write_folder(folder / "model", config, tiny.tiny_tensors(config))
    trainer = TrainerRank(
        rank=0, init_method=f"file://{folder}/init", hf_path=path, profile=tiny.tiny_profile(config),
        optimizer=OptimizerConfig(lr=1e-2),
    )  # fmt: skip
    samples = tiny.tiny_samples(97, SAMPLES)
    out: dict[str, Any] = {"scores": [], "steps": [], "reference": []}

    def score_reference() -> Any:
        values = trainer.reference_logprobs(samples, temperature=0.7) if reference else None
        out["reference"].append(values)
        return values

    try:
        trainer.init()
        if reference:
            trainer.keep_reference()
        for _ in range(2):
            score_reference()
            old = trainer.logprobs(samples, temperature=0.7)
            step = trainer.train_step(samples, ADVANTAGES, old, ref_logprobs=score_reference(), temperature=0.7)
            out["scores"].append(old)
            out["steps"].append(step)
        out["weights"] = trainer.export_weights()
    finally:
        trainer.close()
    return out


def same(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    return all(np.array_equal(x.view(np.int32), y.view(np.int32)) for x, y in zip(a, b, strict=True))


@pytest.mark.field_report("R12")
def test_a_reference_leaves_every_bit_of_the_actor(tiny: Any, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    try:
        alone = train(tiny, tmp_path / "alone", reference=False)
        beside = train(tiny, tmp_path / "beside", reference=True)
    finally:
        torch.set_num_threads(threads)
    for a, b in zip(alone["scores"], beside["scores"], strict=True):
        assert same(a, b)
    for a, b in zip(alone["steps"], beside["steps"], strict=True):
        assert same(a["logprobs"], b["logprobs"])
        for key in ("loss", "policy_loss", "ratio_mean", "clip_fraction", "grad_norm", "clip_coef"):
            assert a[key] == b[key], key
        assert b["ratio_mean"] == 1.0
    for name, weight in alone["weights"].items():
        assert torch.equal(weight.view(torch.int16), beside["weights"][name].view(torch.int16)), name
    # the reference was another set of weights, and stayed the one that was kept
    first, *others = beside["reference"]
    assert all(same(first, other) for other in others)
    assert same(first, beside["scores"][0])
    assert not same(first, beside["scores"][1])
    assert beside["steps"][0]["kl"] == 0.0
    assert beside["steps"][1]["kl"] > 0.0
