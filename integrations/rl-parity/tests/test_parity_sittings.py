"""One sitting does not touch another: not on a copy of its directory, not on the same, not in shared memory."""

import json
import os
import shutil
import signal
import subprocess
import sys
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import parity_workers
import pytest
from test_parity_ends import RUN, TESTS

from rl_contract import ContractError
from rl_parity import cli, lock, preflight
from rl_parity.launch import leftovers, traces
from rl_parity.launch.processes import MARK, current_mark, marked, new_mark, survivors, sweep_dead

pytest.importorskip("vllm")
pytest.importorskip("megatron.core")

SMALL = ["--batch", "2", "--group", "2", "--max-new-tokens", "4", "--device", "cpu"]


@pytest.fixture(autouse=True)
def workers(monkeypatch, tmp_path):
    monkeypatch.setattr("rl_parity.fleet.make_launcher", lambda kind, logs: parity_workers.InlineLauncher())
    monkeypatch.setattr(leftovers, "BASE", tmp_path / "records")
    (tmp_path / "records").mkdir()
    memory = preflight.psutil.virtual_memory()
    monkeypatch.setattr(preflight.psutil, "virtual_memory", lambda: memory._replace(available=64 * preflight.GIB))
    parity_workers.FAULTS.clear()


def sleeper(mark):
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env={**os.environ, MARK: mark})


def contents(root):
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_a_sitting_on_a_copy_leaves_the_other_sitting_of_the_same_run_alone(tmp_path):
    out, copy = tmp_path / "out", tmp_path / "copy"
    assert cli.main(["run", "--out", str(out), "--steps", "1", "--save-every", "1", *SMALL]) == 0
    shutil.copytree(out, copy)
    run_id = json.loads((out / "manifest.json").read_text())["run_id"]
    other = new_mark(run_id)
    worker, weights = sleeper(other), traces.SHM / f"{traces.weights_prefix(other)}x"
    old_style = sleeper(run_id)
    weights.mkdir()
    try:
        assert cli.main(["run", "--resume", str(copy), "--steps", "2"]) == 0
        assert worker.poll() is None
        assert old_style.poll() is None
        assert weights.is_dir()
        assert [p.pid for p in survivors(other)] == [worker.pid]
    finally:
        for process in (worker, old_style):
            process.kill()
            process.wait()
        weights.rmdir()


def test_two_sittings_of_one_run_have_two_marks():
    assert new_mark("run-1") != new_mark("run-1")
    with marked("run-1-a"):
        assert current_mark() == "run-1-a"


HOLD = "import sys, time; from pathlib import Path; from rl_parity import lock\n" + (
    "with lock.held(Path(sys.argv[1])): print('held', flush=True); time.sleep(600)"
)


@pytest.mark.parametrize("again", [True, False], ids=["resume", "run"])
def test_a_directory_in_use_is_refused_with_its_pid_and_not_changed(tmp_path, capsys, again):
    out = tmp_path / "out"
    if again:
        assert cli.main(["run", "--out", str(out), "--steps", "1", "--save-every", "1", *SMALL]) == 0
    else:
        out.mkdir()
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(out)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline() == b"held\n"
        before = contents(out)
        command = ["--resume", str(out), "--steps", "2"] if again else ["--out", str(out), "--steps", "1", *SMALL]
        assert cli.main(["run", *command]) == 2
        assert f"{out} is in use by a sitting with pid {holder.pid}" in capsys.readouterr().err
        assert contents(out) == before
        holder.kill()
        holder.wait()
        # what is killed holds nothing
        assert cli.main(["run", *command]) == 0
        assert not (out / lock.LOCK).exists()
    finally:
        holder.kill()
        holder.wait()


def test_a_run_that_comes_second_to_a_new_directory_is_refused(tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    check = preflight.check

    def and_another_begins(config, **how):
        found = check(config, **how)
        out.mkdir()
        (out / "manifest.json").write_text("{}")
        return found

    monkeypatch.setattr(preflight, "check", and_another_begins)
    assert cli.main(["run", "--out", str(out), "--steps", "1", *SMALL]) == 2
    assert "holds another run" in capsys.readouterr().err
    assert contents(out) == {out / "manifest.json": b"{}"}


def test_a_directory_that_cannot_be_written_is_named(tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    assert cli.main(["run", "--out", str(out), "--steps", "1", "--save-every", "1", *SMALL]) == 0
    os_open = os.open

    def no(path, *how, **more):
        if str(path).endswith(lock.LOCK) and how[0] & os.O_CREAT:
            raise PermissionError(13, "Permission denied", str(path))
        return os_open(path, *how, **more)

    monkeypatch.setattr(os, "open", no)
    assert cli.main(["run", "--resume", str(out), "--steps", "2"]) == 2
    assert f"{out} cannot be written" in capsys.readouterr().err
    with pytest.raises(ContractError, match="cannot be written"), lock.held(out):
        pass


def block():
    made = SharedMemory(create=True, size=64)
    resource_tracker.unregister(made._name, "shared_memory")
    made.close()
    return made.name


RECORD = """
import os, signal, sys
from pathlib import Path
from rl_parity.launch import leftovers, traces
leftovers.BASE = Path(sys.argv[1])
record = leftovers.Record(sys.argv[2])
leftovers.note_inodes({traces.inode_of(sys.argv[3])})
leftovers.note_folder(Path(sys.argv[4]))
print("noted", flush=True)
sys.stdin.read()
"""


def test_only_what_a_dead_sitting_noted_is_removed_by_the_next_start(tmp_path, capsys):
    names, folders, processes = [block() for _ in range(3)], [tmp_path / "rlp-0", tmp_path / "rlp-1"], []
    weights = traces.SHM / f"{traces.weights_prefix('run-x-0')}w"
    weights.mkdir()
    try:
        for index in range(2):
            folders[index].mkdir()
            arguments = [str(leftovers.BASE), f"run-x-{index}", names[index], str(folders[index])]
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-c", RECORD, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
                )
            )
            assert processes[-1].stdout.readline() == b"noted\n"
        assert sweep_dead() == 0
        assert set(names) <= traces.shared_names()
        processes[0].kill()
        processes[0].wait()
        assert sweep_dead() == 1
        assert "removed what 1 killed sitting(s) had left" in capsys.readouterr().err
        assert set(names) & traces.shared_names() == set(names[1:])
        assert [folder.exists() for folder in folders] == [False, True]
        assert not weights.exists()
        assert sweep_dead() == 0
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for name in names:
            (traces.SHM / name).unlink(missing_ok=True)
        shutil.rmtree(weights, ignore_errors=True)


def test_a_name_given_anew_is_not_taken_for_the_dead_sittings(tmp_path):
    name = block()
    try:
        record = leftovers.Record("run-y-0")
        record.note(shared={name: traces.inode_of(name) + 1})
        # as if killed
        leftovers._open.remove(record)
        os.close(record._descriptor)
        assert sweep_dead() == 1
        assert name in traces.shared_names()
    finally:
        (traces.SHM / name).unlink()


def test_what_a_killed_run_leaves_goes_with_the_next_start(tmp_path):
    records = str(leftovers.BASE)
    code = RUN.replace(
        "import parity_workers\n",
        f"import parity_workers\nfrom pathlib import Path\nfrom rl_parity.launch import leftovers\n"
        f"leftovers.BASE = Path({records!r})\n",
        1,
    )
    out = tmp_path / "out"
    run = subprocess.Popen(
        [sys.executable, "-c", code, "run", "--steps", "1", "--out", str(out), *SMALL],
        env={**os.environ, "PYTHONPATH": TESTS, "TMPDIR": "/tmp"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    line = next(line for line in run.stdout if line.startswith("held"))
    semaphore, segment, pid = line.split()[1:]
    run.send_signal(signal.SIGKILL)
    run.wait()
    run.stdout.close()
    run.stderr.close()
    run_id = json.loads((out / "manifest.json").read_text())["run_id"]
    (scratch,) = [p for p in Path("/tmp").glob("rlp-*") if (p / f"e0/{pid}").exists()]
    assert {f"sem.{semaphore}", segment} <= traces.shared_names()
    assert [n for n in traces.shared_names() if run_id in n]
    assert cli.main(["run", "--out", str(tmp_path / "next"), "--steps", "1", *SMALL]) == 0
    assert not {f"sem.{semaphore}", segment} & traces.shared_names()
    assert not [n for n in traces.shared_names() if run_id in n]
    assert not scratch.exists()
    assert not list(leftovers.BASE.iterdir())
    assert (out / "manifest.json").exists()
