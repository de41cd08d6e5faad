"""Launchers: calls are answered in order, failures are named, nothing is left behind."""

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from rl_contract import ContractError
from rl_parity.launch import WorkerFailure, WorkerGone, make_launcher, traces, wait_all
from rl_parity.launch.processes import marked, survivors

TESTS = str(Path(__file__).parent)
ENV = {"PYTHONPATH": TESTS}


@pytest.fixture(params=["local", "ray"])
def launcher(request, tmp_path, monkeypatch):
    if request.param == "ray":
        pytest.importorskip("ray")
    monkeypatch.setenv("PYTHONPATH", TESTS)
    with marked(f"test-{os.getpid()}-{request.param}"):
        launcher = make_launcher(request.param, tmp_path)
        yield launcher
        launcher.close()


def echo(launcher, name="w", **kwargs):
    return launcher.start(
        name,
        "parity_fakes:Echo",
        env={"RL_TEST_NAME": name, "CUDA_VISIBLE_DEVICES": f"{kwargs.get('value', 0)},0"},
        kwargs=kwargs,
    )


def test_workers_answer_in_order_and_see_only_their_own_environment(launcher):
    a, b = echo(launcher, "a", value=1), echo(launcher, "b", value=2)
    assert wait_all(launcher, [w.call("add", 10) for w in (a, b, a)], 60) == [11, 12, 11]
    assert wait_all(launcher, [a.call("env", "RL_TEST_NAME"), b.call("env", "RL_TEST_NAME")], 60) == ["a", "b"]
    # a GPU worker sees its own GPUs: Ray leaves what it did not hand out alone
    assert wait_all(launcher, [w.call("env", "CUDA_VISIBLE_DEVICES") for w in (a, b)], 60) == ["1,0", "2,0"]
    with pytest.raises(WorkerFailure, match="asked to fail"):
        a.call("boom").result(60)
    assert a.call("add", 1).result(60) == 2
    # the first failure ends the wait, though another worker is busy
    started = time.monotonic()
    with pytest.raises(WorkerFailure, match=r"b: .*"):
        wait_all(launcher, [a.call("sleep", 20), b.call("die")], 60)
    assert time.monotonic() - started < 15


def test_a_killed_worker_is_gone_and_says_by_what(launcher):
    worker = echo(launcher, "k")
    pid = worker.call("pid").result(60)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerGone, match="k: the process ended") as first:
        worker.call("add", 1).result(60)
    with pytest.raises(WorkerGone, match="k: the process ended"):
        wait_all(launcher, [worker.call("add", 1)], 60)
    if type(launcher).__name__ == "LocalLauncher":
        assert "status -9 (SIGKILL)" in str(first.value)


def test_a_worker_that_cannot_be_built_fails_its_first_call(launcher):
    with pytest.raises(WorkerFailure, match="built to fail"):
        wait_all(launcher, [echo(launcher, "c", fail=True).call("add", 1)], 60)


def test_a_late_answer_is_a_failure(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", TESTS)
    launcher = make_launcher("local", tmp_path)
    try:
        worker = echo(launcher)
        with pytest.raises(WorkerFailure, match="no answer within"):
            wait_all(launcher, [worker.call("sleep", 30)], 1.0)
    finally:
        launcher.close()


def test_leaving_the_mark_ends_grandchildren_that_left_their_group(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", TESTS)
    run_id = f"sweep-{os.getpid()}"
    with marked(run_id):
        launcher = make_launcher("local", tmp_path)
        worker = echo(launcher)
        pids = wait_all(launcher, [worker.call("pid"), worker.call("grandchild")], 60)
        launcher.close()
        assert psutil.pid_exists(pids[1])
        assert [p.pid for p in survivors(run_id)] == [pids[1]]
    assert not survivors(run_id)


def test_an_unknown_launcher_is_refused(tmp_path):
    with pytest.raises(ContractError, match=r"slurm.*local, ray"):
        make_launcher("slurm", tmp_path)


@pytest.mark.parametrize("where", ["inside the virtual environment", "long"])
def test_scratch_folder_is_short_and_outside_the_virtual_environment(where, tmp_path, monkeypatch):
    # Ray refuses a folder inside the environment in a child's log only, and then waits for ever
    monkeypatch.setattr("tempfile.tempdir", sys.prefix if where.startswith("inside") else str(tmp_path))
    folder = traces.scratch_folder()
    traces.remove_folder(folder)
    assert not folder.is_relative_to(Path(sys.prefix).resolve())
    assert len(str(folder)) < 36
