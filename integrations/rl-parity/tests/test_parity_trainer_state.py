"""A real trainer rank that is saved, ended and restored goes on with the bits of one that never stopped."""

import numpy as np
import pytest
import torch

from rl_contract import ContractError
from rl_parity import preflight
from rl_parity.config import RunConfig
from rl_parity.models import write_model
from vime_sync import read_weights

pytest.importorskip("megatron.core")
pytest.importorskip("rl_vllm")

SAMPLES = [([5, 6, 7], [8, 9, 10, 11]), ([5, 6, 7], [20, 21]), ([30, 31], [40, 41, 42]), ([30, 31], [50, 51, 52])]
REWARDS = [1.0, 0.0, 0.25, 0.5]


@pytest.fixture
def worker(tmp_path):
    from rl_parity.trainer_worker import TrainerWorker

    model = write_model("tiny-qwen3", tmp_path / "model")
    profile = preflight.profile(RunConfig(), preflight.model_config(RunConfig()))
    made = []

    def make():
        for one in made:
            one.close()
        made.append(
            TrainerWorker(
                rank=0,
                tp=1,
                cp=1,
                init_method=f"file://{tmp_path}/world-{len(made)}",
                arm="strict",
                model=str(model),
                profile=profile.to_dict(),
                hyper={"lr": 4e-4, "kl": 0.001, "clip": 0.2, "max_grad_norm": 1.0, "weight_decay": 0.01},
                token_budget=None,
            )
        )
        made[-1].start()
        return made[-1]

    yield make
    made[-1].close()


def step(worker):
    scored = worker.score(SAMPLES, 1.0)
    out = worker.train(SAMPLES, REWARDS, 2, scored["logprobs"], scored["reference"], 1.0)
    figures = [out[k] for k in ("loss", "kl", "grad_norm")]
    return figures, np.concatenate(out["logprobs"]).view(np.uint32).tolist(), worker.digest()


def test_a_restored_trainer_goes_on_bit_for_bit(worker, tmp_path):
    whole = worker()
    wanted = [step(whole) for _ in range(4)]
    assert len({digest for _, _, digest in wanted}) == 4
    first = worker()
    found = [step(first) for _ in range(2)]
    folder = tmp_path / "state"
    folder.mkdir()
    saved = first.save_state(str(folder))
    second = worker()
    with pytest.raises(ContractError, match=r"state\.json says 0000"):
        second.load_state(str(folder), "0" * 64)
    second.load_state(str(folder), saved["digest"])
    assert second.digest() == found[-1][2]
    # the reference is that of the model the run began with: the KL term says so
    found += [step(second) for _ in range(2)]
    assert found == wanted


def test_a_lent_push_of_a_real_trainer_holds_the_bytes_of_a_written_one(worker, tmp_path):
    one = worker()
    written = one.export(str(tmp_path / "written"), "run", 0, "file", [1])
    lent = one.export(str(tmp_path / "lent"), "run", 0, "host", [1, 2])
    assert lent["digest"] == written["digest"] == one.digest()
    plain = one.export(str(tmp_path / "plain"), "run", 0, "host", [1], "sha256")
    assert plain["digest"] == one.digest("sha256") != lent["digest"]
    with read_weights(tmp_path / "written") as a, read_weights(tmp_path / "lent") as b:
        assert sorted(a) == sorted(b)
        assert all(bool((a[name] == b[name]).all()) for name in a)


@pytest.mark.parametrize(("free", "room", "emptied"), [(10, 0, 1), (10, 8, 0), (10, 10, 0), (10, 11, 1)])
def test_a_trainer_gives_memory_back_where_engines_need_it(monkeypatch, free, room, emptied):
    from rl_parity.trainer_worker import TrainerWorker

    worker, calls = TrainerWorker.__new__(TrainerWorker), []
    worker._device = "cuda"
    monkeypatch.setattr(TrainerWorker, "memory", lambda self: {})
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 100))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(1))
    worker.rest(room)
    assert len(calls) == emptied
    worker._device = "cpu"
    worker.rest(0)
    assert len(calls) == emptied
