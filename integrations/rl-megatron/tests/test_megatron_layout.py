"""Worlds of real Megatron processes over gloo: every TP and CP size gives the bits of one rank.

Each world runs once; it scores packed, micro-batched, warm and with entropy, then trains. One rank is the standard.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rl_attn
from rl_megatron import LossConfig, OptimizerConfig, ParallelConfig

pytestmark = pytest.mark.engine

LENGTHS = ((3, 5), (17, 40), (1, 1), (9, 0), (60, 90))
CASES = {"qwen3": ("Qwen3ForCausalLM", False), "llama": ("LlamaForCausalLM", True)}
ADVANTAGES = [1.0, -0.5, 2.0, 0.3, -1.25]
STEPS = 3
WORLDS = [(2, 1), (4, 1), (1, 2), (2, 2), (4, 2)]
NATIVE_WORLDS = [(1, 1), (2, 2)]


class Worlds:
    """Runs each world at most once a session."""

    def __init__(self, folder: Path, tiny: Any) -> None:
        self.folder, self.tiny = folder, tiny
        self.done: dict[tuple[int, int], list[dict[str, Any]]] = {}
        self.cases = {}
        for name, (arch, tied) in CASES.items():
            config = tiny.tiny_config(arch, tie_word_embeddings=tied)
            path = tiny.write_folder(folder / name, config, tiny.tiny_tensors(config))
            self.cases[name] = (path, tiny.tiny_profile(config))
        self.samples = tiny.tiny_samples(97, LENGTHS)

    def __call__(self, tp: int, cp: int) -> list[dict[str, Any]]:
        if (tp, cp) not in self.done:
            job = {
                name: {
                    "trainer": {
                        "hf_path": path,
                        "profile": profile,
                        "parallel": ParallelConfig(tp=tp, cp=cp),
                        "optimizer": OptimizerConfig(lr=1e-3, weight_decay=0.1, clip_grad=1.0),
                        "loss": LossConfig(kl_coef=0.05),
                    },
                    "samples": self.samples,
                    "advantages": ADVANTAGES,
                    "budgets": (1, 100),
                    "steps": STEPS,
                    "export": True,
                }
                for name, (path, profile) in self.cases.items()
            }
            if (tp, cp) in NATIVE_WORLDS:
                native = job["qwen3"]["trainer"] | {"mode": "native"}
                job["native"] = job["qwen3"] | {"trainer": native, "budgets": ()}
            self.done[tp, cp] = self.tiny.run_world(self.folder / f"tp{tp}cp{cp}", tp * cp, job)
        return self.done[tp, cp]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory, tiny: Any) -> Worlds:
    return Worlds(tmp_path_factory.mktemp("worlds"), tiny)


def same(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    return len(a) == len(b) and all(np.array_equal(x.view(np.int32), y.view(np.int32)) for x, y in zip(a, b))


@pytest.mark.field_report("R14", "R40")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("tp", "cp"), WORLDS)
def test_layout_forward_equals_one_rank(worlds: Worlds, tp: int, cp: int, case: str) -> None:
    one = worlds(1, 1)[0][case]
    for rank in worlds(tp, cp):
        got = rank[case]
        assert got["report"]["tp"] == tp
        assert got["report"]["cp"] == cp
        kernels = {(row["boundary"], row["layout"]) for row in got["report"]["launches"]}
        assert any(boundary == "collective" for boundary, _ in kernels), (
            "a world of several ranks must have communicated"
        )
        for key in ("scores", "warm", "entropies"):
            assert same(one[key], got[key]), key
        assert all(np.isfinite(x).all() for x in got["scores"])


@pytest.mark.field_report("R09", "R14")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (2, 1), (2, 2)])
def test_batch_micro_batches_equal_one_pack(worlds: Worlds, tp: int, cp: int, case: str) -> None:
    for rank in worlds(tp, cp):
        for scores in rank[case]["budgets"].values():
            assert same(rank[case]["scores"], scores)


@pytest.mark.field_report("R09", "R10", "R16")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("tp", "cp"), [(1, 1), *WORLDS])
def test_training_forward_equals_scoring(worlds: Worlds, tp: int, cp: int, case: str) -> None:
    got = worlds(tp, cp)[0][case]
    for step in (*got["steps"], got["micro"]):
        assert same(step["old"], step["logprobs"])
        assert step["ratio_mean"] == 1.0
        assert step["clip_fraction"] == 0.0


@pytest.mark.field_report("R10", "R40")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("tp", "cp"), [(2, 1), (4, 1), (1, 2), (2, 2)])
def test_layout_training_trajectory_equals_one_rank(worlds: Worlds, tp: int, cp: int, case: str) -> None:
    one, got = worlds(1, 1)[0][case], worlds(tp, cp)[0][case]
    assert one["steps"][0]["kl"] == 0.0
    assert one["steps"][-1]["kl"] > 0.0, "three steps at this rate must move the policy"
    for a, b in zip((*one["steps"], one["micro"]), (*got["steps"], got["micro"])):
        for key in ("loss", "policy_loss", "kl", "grad_norm", "clip_coef"):
            assert a[key] == b[key], key
        assert same(a["logprobs"], b["logprobs"])
        assert same(a["old"], b["old"])
    for name, weight in one["weights"].items():
        assert torch.equal(weight.view(torch.int16), got["weights"][name].view(torch.int16)), name


@pytest.mark.parametrize("case", CASES)
def test_layout_context_parallel_gradients_equal_one_rank(worlds: Worlds, case: str) -> None:
    one, got = worlds(1, 1)[0][case]["grads"], worlds(1, 2)[0][case]["grads"]
    for name, grad in one.items():
        assert torch.equal(got[name].view(torch.int32), grad.view(torch.int32)), name


@pytest.mark.parametrize(("tp", "cp"), WORLDS)
def test_replicated_weights_agree_on_all_ranks(worlds: Worlds, tp: int, cp: int) -> None:
    ranks = [rank["qwen3"]["state"] for rank in worlds(tp, cp)]
    for name, value in ranks[0].items():
        if "layernorm" in name:
            assert all(torch.equal(value, other[name]) for other in ranks[1:]), name


@pytest.mark.parametrize("case", CASES)
def test_saved_folder_loads_at_another_tp(worlds: Worlds, case: str) -> None:
    from safetensors.torch import load_file

    saved = load_file(worlds.folder / "tp2cp1" / f"saved-{case}" / "model.safetensors") if worlds(2, 1) else {}
    weights = worlds(4, 1)[0][case]["weights"]
    assert saved.keys() == weights.keys()
    assert all(torch.equal(saved[n], weights[n]) for n in saved)


@pytest.mark.parametrize(("tp", "cp"), NATIVE_WORLDS)
def test_native_world_scores_near_strict_with_other_bits(worlds: Worlds, tp: int, cp: int) -> None:
    for rank in worlds(tp, cp):
        native = rank["native"]
        assert native["report"]["substitutions"]
        got, strict = np.concatenate(native["scores"]), np.concatenate(rank["qwen3"]["scores"])
        assert np.mean(got != strict) > 0.5
        assert np.abs(got - strict).mean() < 0.1


def test_native_gradients_are_those_of_one_rank(worlds: Worlds) -> None:
    one, ranks = worlds(1, 1)[0]["native"], [rank["native"] for rank in worlds(2, 2)]
    assert ranks[0]["steps"][0]["grad_norm"] == pytest.approx(one["steps"][0]["grad_norm"], rel=0.05)
    for name, grad in one["grads"].items():
        if "layernorm" in name:
            assert all(torch.equal(ranks[0]["grads"][name], r["grads"][name]) for r in ranks), name
            assert (ranks[0]["grads"][name] - grad).norm() < 0.1 * grad.norm(), name


def test_layout_largest_cuts_and_long_rows_equal_one_rank(tmp_path: Path, tiny: Any) -> None:
    # rows of several attention segments, on 8 tensor parallel or 4 context parallel ranks
    config = tiny.tiny_config(num_key_value_heads=8, max_position_embeddings=2048)
    path = tiny.write_folder(tmp_path / "model", config, tiny.tiny_tensors(config))
    samples = tiny.tiny_samples(97, ((500, 12), (505, 8), (1020, 30), (1, 3)))
    assert rl_attn.segments_of(1050) > 1
    scores = {}
    for tp, cp in ((1, 1), (8, 1), (1, 4)):
        trainer = {
            "hf_path": path,
            "profile": tiny.tiny_profile(config, leaves=8),
            "parallel": ParallelConfig(tp=tp, cp=cp),
        }
        ranks = tiny.run_world(tmp_path / f"tp{tp}cp{cp}", tp * cp, {"long": {"trainer": trainer, "samples": samples}})
        scores[tp, cp] = [rank["long"]["scores"] for rank in ranks]
    one = scores[1, 1][0]
    assert all(same(one, rank) for ranks in scores.values() for rank in ranks)
