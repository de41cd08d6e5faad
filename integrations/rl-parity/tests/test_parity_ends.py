"""However a run ends, no process, no shared memory and no scratch folder is left, and the directory is readable."""

import contextlib
import multiprocessing.util
import os
import signal
import subprocess
import sys
import time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import psutil
import pytest

from rl_parity.launch import signals, traces
from rl_parity.launch.processes import MARK
from rl_parity.rundir import RunDirectory

TESTS = str(Path(__file__).parent)

# a run on fake workers whose "engine" is a process that holds a semaphore, a shared block and a socket's place, and
# that, killed together with its resource tracker, removes none of them
ENGINE = """
import multiprocessing, os, signal, sys, time
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
lock = multiprocessing.get_context("spawn").Semaphore()
block = SharedMemory(create=True, size=4096)
os.kill(resource_tracker._resource_tracker._pid, signal.SIGKILL)
open(os.path.join(os.environ["TMPDIR"], str(os.getpid())), "w").close()
print(lock._semlock.name.strip("/"), block._name.strip("/"), os.getpid(), flush=True)
time.sleep(600)
"""
RUN = f"""
import os, subprocess, sys, time
import signal
# a test runner started with nohup, or in the background, hands its ignored signals down
for number in (signal.SIGHUP, signal.SIGTERM):
    signal.signal(number, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
import parity_workers
from rl_parity import cli, fleet
fleet.make_launcher = parity_workers.InlineLauncher
start = parity_workers.InlineLauncher.start
environment = {{}}
def with_environment(self, name, factory, *, env, kwargs):
    environment.update(os.environ, **env)
    return start(self, name, factory, env=env, kwargs=kwargs)
parity_workers.InlineLauncher.start = with_environment
def generate(self, *args, **kwargs):
    child = subprocess.Popen(
        [sys.executable, "-c", {ENGINE!r}], start_new_session=True, stdout=subprocess.PIPE, env=environment
    )
    print("held", child.stdout.readline().decode().strip(), flush=True)
    time.sleep(600)
parity_workers.FakeRollout.generate = generate
sys.exit(cli.main())
"""


def marked_with(run_id):
    """Processes of any sitting of this run."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            found += [process] if process.environ().get(MARK, "").startswith(run_id) else []
    return found


@pytest.mark.parametrize(
    "sent",
    [[signal.SIGTERM], [signal.SIGHUP] * 2, [signal.SIGINT] * 12],
    ids=["terminate", "terminal closed", "many ctrl-c"],
)
def test_a_run_ended_by_signals_leaves_nothing_behind(sent, tmp_path):
    scratch = set(Path("/tmp").glob("rlp-*"))
    out = tmp_path / "out"
    command = ["--arm", "strict", "--steps", "1", "--batch", "1", "--group", "2", "--out", str(out)]
    run = subprocess.Popen(
        [sys.executable, "-c", RUN, "run", *command],
        env={**os.environ, "PYTHONPATH": TESTS, "TMPDIR": "/tmp"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    line = next(line for line in run.stdout if line.startswith("held"))
    semaphore, block, pid = line.split()[1:]
    names = {f"sem.{semaphore}", block}
    assert names <= traces.shared_names()
    assert any((p / f"e0/{pid}").exists() for p in Path("/tmp").glob("rlp-*"))
    for number in sent:
        if run.poll() is None:
            run.send_signal(number)
            time.sleep(0.15)
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 130, errors
    manifest = RunDirectory(out).manifest()
    assert manifest["status"] == "interrupted"
    assert "The run was interrupted" in (out / "report.html").read_text()
    assert not names & traces.shared_names()
    assert not [n for n in traces.shared_names() if manifest["run_id"] in n]
    assert not marked_with(manifest["run_id"])
    assert not Path(f"/proc/{pid}").exists()
    # folders of other runs have no engine of this one's process in them
    assert not [p for p in set(Path("/tmp").glob("rlp-*")) - scratch if (p / f"e0/{pid}").exists()]
    assert errors.count("please wait") <= 1


def test_a_semaphore_is_known_by_inode_where_its_maker_shows_another_name():
    lock = multiprocessing.get_context("spawn").Semaphore()
    lock_name = lock._semlock.name
    name = f"sem.{lock_name.strip('/')}"
    maps = Path("/proc/self/maps").read_text()
    assert f"/dev/shm/{name}" not in maps
    inode = (traces.SHM / name).stat().st_ino
    assert inode in traces.mapped([os.getpid()])
    traces.remove_shared({inode})
    assert name not in traces.shared_names()
    # its own finalizer would not find it
    lock._semlock = None
    for finalizer in [f for f in multiprocessing.util._finalizer_registry.values() if f._args[:1] == (lock_name,)]:
        finalizer.cancel()
    multiprocessing.resource_tracker.unregister(lock_name, "semaphore")


_MAKE_AND_WAIT = """
import sys
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
made = SharedMemory(create=True, size=64)
resource_tracker.unregister(made._name, "shared_memory")
print(made.name, flush=True)
sys.stdin.read()
"""


def test_shared_memory_of_a_killed_process_goes_and_that_of_another_run_stays():
    ours = subprocess.Popen([sys.executable, "-c", _MAKE_AND_WAIT], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    # another run has made this segment and maps it no more, or not yet
    other = SharedMemory(create=True, size=64)
    other.close()
    name = ours.stdout.readline().decode().strip()
    try:
        with traces.Watch(lambda: [ours.pid], every=0.05) as watch:
            deadline = time.monotonic() + 20
            while not watch.inodes and time.monotonic() < deadline:
                time.sleep(0.05)
            ours.kill()
            ours.wait()
        traces.remove_shared(watch.inodes)
        assert name not in traces.shared_names()
        assert other.name in traces.shared_names()
    finally:
        ours.kill()
        ours.wait()
        other.unlink()
        traces.remove_shared({(traces.SHM / name).stat().st_ino} if name in traces.shared_names() else ())


@pytest.fixture
def handlers():
    before = {number: signal.getsignal(number) for number in signals.ENDING}
    signals.install()
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def send_in_shield(number, done):
    with signals.shield():
        with signals.shield():
            for _ in range(3):
                signal.raise_signal(number)
        done.append("cleanup")


def fail_and_send(done):
    try:
        raise ValueError("first reason")
    finally:
        send_in_shield(signal.SIGTERM, done)


def send_while_unwinding(done):
    try:
        signal.raise_signal(signal.SIGINT)
    finally:
        signal.raise_signal(signal.SIGTERM)
        done.append("cleanup")


@pytest.mark.parametrize(
    ("work", "reason"),
    [
        (lambda done: send_in_shield(signal.SIGINT, done), KeyboardInterrupt),
        (fail_and_send, ValueError),
        (send_while_unwinding, KeyboardInterrupt),
    ],
    ids=["interrupts after the cleanup", "keeps an earlier reason", "does not cut the unwinding short"],
)
def test_a_signal_during_cleanup(work, reason, handlers, capfd):
    done = []
    with pytest.raises(reason):
        work(done)
    assert done == ["cleanup"]
    assert capfd.readouterr().err.count("please wait") == 1


def test_nohup_keeps_its_meaning():
    code = "import signal; from rl_parity.launch import signals; signals.install(); print(repr(signal.getsignal(1)))"
    ignored = subprocess.run(["nohup", sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "SIG_IGN" in ignored.stdout


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_ray_interrupted_while_it_starts_leaves_no_folder(error, tmp_path, monkeypatch):
    ray_actors = pytest.importorskip("rl_parity.launch.ray_actors")
    folders = []

    def init(**kwargs):
        folders.append(Path(kwargs["_temp_dir"]))
        (folders[0] / "session").mkdir()
        raise error

    monkeypatch.setattr(ray_actors.ray, "init", init)
    with pytest.raises(KeyboardInterrupt):
        ray_actors.RayLauncher(tmp_path)
    assert len(folders) == 1
    assert not folders[0].exists()
