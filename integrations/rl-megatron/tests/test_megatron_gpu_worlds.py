"""Several ranks on one GPU: TP2, CP2 and both score and train as one rank, their bytes moved through the host."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from rl_megatron import LossConfig, OptimizerConfig, ParallelConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.one_worker,
]

WORLDS = [(2, 1), (1, 2), (2, 2)]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory, tiny: Any) -> dict[tuple[int, int], list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("worlds")
    case = tiny.load("gpu_case").Case(tiny, num_hidden_layers=2)
    path = tiny.write_folder(folder / "model", case.config, case.tensors)
    job: dict[str, Any] = {
        "trainer": {
            "hf_path": path,
            "profile": case.profile,
            "optimizer": OptimizerConfig(lr=1e-3, weight_decay=0.1, clip_grad=1.0),
            "loss": LossConfig(kl_coef=0.05),
            "device": "cuda:0",
            "share_gpu": True,
        },
        "samples": case.samples,
        "advantages": [1.0, -0.5, 2.0, 0.3, -1.25, 0.7, -0.1],
        "budgets": (1000,),
        "steps": 2,
        "step_budget": 1000,
        "export": True,
        "keep": (),
    }
    stop, failures = threading.Event(), []

    def run(cut: tuple[int, int]) -> list[dict[str, Any]] | None:
        tp, cp = cut
        mine = job | {"trainer": job["trainer"] | {"parallel": ParallelConfig(tp=tp, cp=cp)}}
        cases = {"strict": mine}
        if cut in ((1, 1), (2, 2)):
            cases["native"] = mine | {"trainer": mine["trainer"] | {"mode": "native"}}
        try:
            # with cold caches every world first compiles every kernel
            return tiny.run_world(folder / f"tp{tp}cp{cp}", tp * cp, cases, seconds=600, stop=stop)
        except BaseException as error:
            failures.append(error)
            stop.set()
            return None

    # beside one another: most of the time goes into starting and compiling
    cuts = [(1, 1), *WORLDS]
    with ThreadPoolExecutor(len(cuts)) as pool:
        done = dict(zip(cuts, pool.map(run, cuts), strict=True))
    if failures:
        # the others were given up for the first one
        raise failures[0]
    return done


def equal(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    return len(a) == len(b) and all(np.array_equal(x.view(np.int32), y.view(np.int32)) for x, y in zip(a, b))


@pytest.mark.parametrize(("tp", "cp"), WORLDS)
def test_layout_every_world_scores_as_one_rank(worlds: Any, tp: int, cp: int) -> None:
    one = worlds[1, 1][0]["strict"]
    for rank in worlds[tp, cp]:
        got = rank["strict"]
        assert got["report"]["device"] == "cuda:0"
        assert set(got["report"]["transports"].values()) == {"staged-shared_memory"}
        assert equal(got["scores"], one["scores"])
        assert equal(got["warm"], one["warm"])
        assert equal(got["budgets"][1000], one["scores"])
        assert equal(got["steps"][0]["logprobs"], one["scores"])
        assert got["steps"][0]["ratio_mean"] == 1.0


@pytest.mark.parametrize(("tp", "cp"), WORLDS)
def test_layout_every_world_trains_the_weights_of_one_rank(worlds: Any, tp: int, cp: int) -> None:
    one, world = worlds[1, 1][0]["strict"], worlds[tp, cp]
    for rank in world:
        for a, b in zip((*one["steps"], one["micro"]), (*rank["strict"]["steps"], rank["strict"]["micro"])):
            assert (a["loss"], a["grad_norm"]) == (b["loss"], b["grad_norm"])
            assert equal(a["logprobs"], b["logprobs"])
    assert all(torch.equal(t, world[0]["strict"]["weights"][n]) for n, t in one["weights"].items())


def test_native_world_is_near_one_rank(worlds: Any) -> None:
    one, four = worlds[1, 1][0]["native"], worlds[2, 2][0]["native"]
    gap = np.concatenate(one["scores"]) - np.concatenate(four["scores"])
    assert 0 < np.abs(gap).mean() < 0.02
    assert four["steps"][0]["grad_norm"] == pytest.approx(one["steps"][0]["grad_norm"], rel=0.05)
