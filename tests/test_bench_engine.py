"""tools/bench engine: engines are measured in turn and ended, failed or not; numbers are there as they come."""

import json
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

TOOLS = Path(__file__).parents[1] / "tools"


@pytest.fixture
def arms(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    from benches import engine_arms

    config = SimpleNamespace(
        use_v2_model_runner=True, compilation_config=SimpleNamespace(cudagraph_mode=None, mode=None)
    )

    def start(engine, layers, folder):
        print("starting", engine)
        if engine == "batch-invariant":
            raise ValueError("no such mode")
        processor = SimpleNamespace(process_outputs=None)
        return SimpleNamespace(
            llm_engine=SimpleNamespace(vllm_config=config, output_processor=processor), engine=engine
        )

    def measure(llm, steps, prompt, batch, new, seeded):
        if llm.engine == "native" and batch == 1:
            time.sleep(600)
        return {"prefill": 100.0 * batch, "decode": (10.0 if seeded else 20.0) * batch}

    monkeypatch.setattr(engine_arms, "start", start)
    monkeypatch.setattr(engine_arms, "measure", measure)
    monkeypatch.setattr(engine_arms, "PRELOADED", ())
    monkeypatch.setattr(engine_arms, "GRACE", 0.0)
    return engine_arms


def test_engines_are_measured_in_turn_and_one_that_fails_or_hangs_is_named(arms, tmp_path):
    from benches import engine

    plan = {
        "gpu": "0", "jobs": [(8, ["strict", "native"]), (8, ["batch-invariant"])], "logs": str(tmp_path),
        "end": time.time() + 2, "cores": sorted(os.sched_getaffinity(0)),
    }  # fmt: skip
    arms.conduct(plan)
    found = engine.results(tmp_path)
    assert time.time() < plan["end"] + 5
    ready = [x["engine"] for x in found if "ready_s" in x]
    assert ready == ["strict", "native"]
    # case by case, each engine in turn
    assert [(x["engine"], x["batch"]) for x in found if "decode" in x][:4] == [
        ("strict", 64), ("native", 64), ("strict", 256), ("native", 256),
    ]  # fmt: skip
    errors = {x["engine"]: x["error"] for x in found if "error" in x}
    assert errors["native"] == "the time was up"
    assert "starting native" in (tmp_path / "native-8.txt").read_text()
    rows, targets = engine.tabled(found)
    assert {r["case"]: r["ratio"] for r in rows} == {
        "decode layers=8 prompt=512 M=64": 0.5, "prefill layers=8 prompt=512 M=64": 1.0,
        "decode layers=8 prompt=512 M=256": 0.5, "prefill layers=8 prompt=512 M=256": 1.0,
    }  # fmt: skip
    assert targets["decode of native at batch 64, worst >= 0.97"] == 0.5


def test_an_engine_that_does_not_start_leaves_its_log_and_the_others_go_on(arms, tmp_path):
    from benches import engine

    cores = sorted(os.sched_getaffinity(0))
    jobs = [(8, ["strict", "batch-invariant"])]
    arms.conduct({"gpu": "0", "jobs": jobs, "logs": str(tmp_path), "cores": cores, "end": time.time() + 30})
    found = engine.results(tmp_path)
    (failed,) = [x for x in found if "error" in x]
    assert (failed["engine"], failed["error"]) == ("batch-invariant", "ValueError: no such mode")
    assert "no such mode" in (tmp_path / "batch-invariant-8.txt").read_text()
    assert sum("decode" in x for x in found) == len(arms.CASES)


def test_conductor_that_is_told_to_stop_ends_its_engines(arms, tmp_path):
    def conduct():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        cores = sorted(os.sched_getaffinity(0))
        jobs = [(8, ["native", "strict"])]
        arms.conduct({"gpu": "0", "jobs": jobs, "logs": str(tmp_path), "cores": cores, "end": time.time() + 60})

    conductor = multiprocessing.get_context("fork").Process(target=conduct)
    conductor.start()
    results, limit = tmp_path / "results-0.jsonl", time.time() + 20
    # the native engine hangs in its batch of one
    while time.time() < limit and not (results.exists() and results.read_text().count('"decode"') >= 4):
        time.sleep(0.05)
    pids = [int(pid) for pid in Path(f"/proc/{conductor.pid}/task/{conductor.pid}/children").read_text().split()]
    assert len(pids) == 2
    conductor.terminate()
    conductor.join(10)
    assert conductor.exitcode == 1
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_pairs_and_peers_are_spread_over_the_gpus_each_on_cores_of_its_own(arms, tmp_path, monkeypatch):
    from benches import engine

    jobs = engine.jobs_of([8, 36], ["strict", "native", "batch-invariant"])
    assert jobs == [(n, e) for e in (["strict", "native"], ["batch-invariant"]) for n in (8, 36)]
    plans = []

    def popen(command, env, **_):
        plans.append((env["CUDA_VISIBLE_DEVICES"], json.loads(command[-1])))
        return SimpleNamespace(poll=lambda: 0, wait=lambda *_: 0, returncode=0)

    monkeypatch.setattr(engine.subprocess, "Popen", popen)
    monkeypatch.setattr(engine.os, "sched_getaffinity", lambda _: set(range(64)))
    engine.run(1, [8, 36], ["0", "1", "2", "3"], ["strict", "native", "batch-invariant"], tmp_path / "a")
    assert [gpu for gpu, _ in plans] == ["0", "1", "2", "3"]
    assert [[tuple(job) for job in plan["jobs"]] for _, plan in plans] == [[job] for job in jobs]
    assert [plan["cores"] for _, plan in plans] == [list(range(16 * i, 16 * i + 16)) for i in range(4)]
    plans.clear()
    engine.run(1, [8], ["0", "1", "2", "3"], ["strict", "native"], tmp_path / "b")
    assert [(gpu, len(plan["cores"])) for gpu, plan in plans] == [("0", 64)]
    plans.clear()
    engine.run(1, [8, 36], ["2", "5"], ["strict", "native", "batch-invariant"], tmp_path / "c")
    assert [[tuple(job) for job in plan["jobs"]] for _, plan in plans] == [jobs[::2], jobs[1::2]]


def test_every_engine_has_a_cache_for_its_largest_case(arms):
    for layers in (8, 36):
        for name in arms.ARMS:
            cases = arms.cases_of(name, layers)
            assert (512, 64, 96) in cases
            assert arms.arguments(name, layers, "x")["kv_cache_memory_bytes"] <= arms.CACHE_LIMIT
    assert (4096, 256, 64) in arms.cases_of("strict", 8)
    assert (4096, 256, 64) not in arms.cases_of("strict", 36)


class Engine:
    """Hands out tokens at known times: prompts that it has not seen take a second each, a step 5 ms a request.

    A request starts a step after the one before it.
    """

    def __init__(self, monkeypatch, lag=2.0):
        from benches import engine_arms

        self.now, self.seen, self.calls, self.lag = 0.0, set(), [], lag
        monkeypatch.setattr(engine_arms, "time", SimpleNamespace(perf_counter=lambda: self.now))
        self.llm_engine = self.output_processor = self
        self.output_processor.process_outputs = lambda outputs, timestamp: len(outputs)

    def generate(self, prompts, params, use_tqdm):
        names = [tuple(p["prompt_token_ids"]) for p in prompts]
        fresh = sum(name not in self.seen for name in names)
        self.seen |= set(names)
        self.now += fresh
        tokens = params[0].max_tokens
        self.calls.append((fresh, tokens))
        for step in range(tokens + len(names) - 1):
            active = sum(i <= step < i + tokens for i in range(len(names)))
            self.now += 0.005 * active
            outputs = [SimpleNamespace(new_token_ids=[1])] * active
            assert self.output_processor.process_outputs(outputs, self.lag * self.now) == active


def test_decode_is_timed_where_all_requests_decode_and_prefill_of_unseen_prompts(arms, monkeypatch):
    pytest.importorskip("vllm")
    monkeypatch.undo()
    monkeypatch.syspath_prepend(str(TOOLS))
    from benches import engine_arms

    llm = Engine(monkeypatch)
    found = engine_arms.measure(llm, engine_arms.Steps(llm), 32, 4, 40, True)
    # the core is slower: what is read here faster was only queued
    assert found["step_ms"] == found["core_step_ms"] == 40.0
    assert found["decode"] == pytest.approx(100.0)
    assert found["prefill"] == pytest.approx(4 * 32 / 4.02)
    assert llm.calls == [(4, 1), (0, 4), *[(4, 1)] * 3, *[(0, 44)] * 4]
    slow = Engine(monkeypatch, lag=0.5)
    found = engine_arms.measure(slow, engine_arms.Steps(slow), 32, 4, 40, True)
    assert (found["step_ms"], found["core_step_ms"]) == (20.0, 10.0)
    assert found["decode"] == pytest.approx(200.0)
    with pytest.raises(engine_arms.TooFewSteps, match="only 2 of 14 steps gave all 13 requests a token"):
        engine_arms.measure(llm, engine_arms.Steps(llm), 32, 13, 10, True)
