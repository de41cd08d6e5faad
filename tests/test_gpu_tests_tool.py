"""tools/gpu_tests says what passed, failed, was skipped and never ended, also of a run that is cut off."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[1] / "tools" / "gpu_tests"
MIXED = """
import os, pathlib, pytest, time
pytestmark = pytest.mark.gpu
def test_good(): pass
def test_bad():
    os.system("echo what a program said >&2")
    assert 1 == 2, "the reason"
@pytest.mark.skip(reason="no such card")
def test_left_out(): pass
def test_hangs():
    folder = pathlib.Path(os.environ["GPU_TESTS_LOGS"])
    folder.mkdir()
    (folder / "world.log").write_text("began\\nstood here\\n")
    time.sleep(600)
def test_behind_it(): pass
"""
GOOD = "import pytest\n@pytest.mark.gpu\ndef test_good(): pass\ndef test_not_for_a_gpu(): assert False\n"

SHARING = """
import os, pathlib, pytest
pytestmark = [pytest.mark.gpu, pytest.mark.one_worker]
@pytest.fixture(scope="module")
def made():
    with (pathlib.Path(__file__).parent / "made").open("a") as f: f.write("x")
@pytest.mark.parametrize("i", range(6))
def test_shares(made, i): pass
"""


@pytest.fixture(autouse=True)
def machine_with_a_gpu(tmp_path_factory, monkeypatch):
    """Where one is listed; none is used here."""
    tool = tmp_path_factory.mktemp("bin") / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: no card (UUID: GPU-0)'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")


def run(folder, *options):
    command = [sys.executable, str(TOOL), str(folder), "--out", str(folder / "out"), *options]
    command += [] if "--workers" in options else ["--workers", "0"]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def test_a_run_that_is_cut_off_names_failures_and_what_did_not_end(tmp_path):
    (tmp_path / "test_mixed.py").write_text(MIXED)
    done = run(tmp_path, "--limit", "15")
    assert done.returncode == 1
    assert "1 passed    1 failed    1 skipped    2 not ended" in done.stdout
    assert "the reason" in done.stdout
    assert "what a program said" in done.stdout.split("printed last")[1]
    assert "no such card" in done.stdout
    assert "not ended" in done.stdout.split("test_hangs")[0].splitlines()[-1]
    assert "stood here" in done.stdout.split("world.log ends")[1]


def test_a_module_for_one_worker_makes_its_fixture_once(tmp_path):
    pytest.importorskip("xdist")
    (tmp_path / "test_sharing.py").write_text(SHARING)
    (tmp_path / "test_spread.py").write_text(
        SHARING.replace("pytest.mark.one_worker", "").replace('"made"', '"spread"')
    )
    done = run(tmp_path, "--workers", "3")
    assert "12 passed" in done.stdout
    assert done.returncode == 0
    assert (tmp_path / "made").read_text() == "x"
    assert len((tmp_path / "spread").read_text()) > 1, "the other workers ran something"


def test_projects_of_one_name_each_keep_their_results(tmp_path):
    body = "import pytest\n@pytest.mark.gpu\ndef test_{}(): assert {}\n"
    for project, good in (("p1", False), ("p2", True)):
        (tmp_path / project / "tests").mkdir(parents=True)
        (tmp_path / project / "tests" / f"test_of_{project}.py").write_text(body.format(project, good))
    # the same path twice is one project
    paths = [str(tmp_path / project / "tests") for project in ("p1", "p2", "p1")]
    command = [sys.executable, str(TOOL), *paths, "--out", str(tmp_path / "out"), "--workers", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    lines = {line.split()[0]: line.split()[1:5] for line in done.stdout.splitlines() if " not ended" in line}
    assert lines == {"tests": ["0", "passed", "1", "failed"], "p2-tests": ["1", "passed", "0", "failed"]}
    written = {p.name for p in (tmp_path / "out").iterdir()}
    assert written == {"tests.jsonl", "tests.log", "p2-tests.jsonl", "p2-tests.log"}


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--limit", "nan"], "seconds over 0"),
        (["--limit", "0"], "seconds over 0"),
        (["--workers", "-1"], "less than 0"),
        (["-k", "("], "no expression on test names"),
    ],
)
def test_bad_input_starts_no_test(tmp_path, options, names):
    (tmp_path / "test_good.py").write_text(GOOD)
    done = run(tmp_path, *options)
    assert done.returncode == 2
    assert names in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_project_that_is_cut_off_before_its_tests_are_known_is_no_success_and_says_so(tmp_path):
    (tmp_path / "test_good.py").write_text(f"import time\ntime.sleep(600)\n{GOOD}")
    done = run(tmp_path, "--limit", "3")
    assert done.returncode == 1
    assert "not ended before its tests were known, status -9" in done.stdout


def test_bad_input_a_folder_that_cannot_be_made_starts_no_test(tmp_path):
    (tmp_path / "test_good.py").write_text(GOOD)
    (tmp_path / "file").write_text("kept")
    command = [sys.executable, str(TOOL), str(tmp_path), "--out", str(tmp_path / "file" / "x")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert "can be no folder" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_a_gpu_nothing_starts_and_one_line_says_so(tmp_path, monkeypatch):
    (tmp_path / "test_good.py").write_text(GOOD)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = run(tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1] == "gpu_tests needs 1 GPU, torch sees 0"
    assert not (tmp_path / "out").exists()


HANGING = """
import os, pathlib, pytest, time
@pytest.mark.gpu
@pytest.mark.parametrize("i", range(2))
def test_hangs(i):
    (pathlib.Path(__file__).parent / f"pid-{os.getpid()}-{os.getppid()}").touch()
    time.sleep(600)
"""


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_ended_from_outside_it_leaves_no_process(tmp_path, how):
    """Neither a pytest nor its workers, which note their ids."""
    for project in ("one", "two"):
        (tmp_path / project).mkdir()
        (tmp_path / project / "test_hangs.py").write_text(HANGING)
    workers = 2 if how == signal.SIGTERM and importlib.util.find_spec("xdist") else 0
    command = [sys.executable, str(TOOL), *(str(tmp_path / p) for p in ("one", "two"))]
    tool = subprocess.Popen([*command, "--out", str(tmp_path / "out"), "--workers", str(workers)])
    try:
        wanted, late = 2 * max(1, workers), time.monotonic() + 90
        while len(found := sorted(tmp_path.glob("*/pid-*"))) < wanted:
            assert time.monotonic() < late
            assert tool.poll() is None
            time.sleep(0.1)
        tool.send_signal(how)
        assert tool.wait(20) != 0
        pids = {int(pid) for path in found for pid in path.name.split("-")[1:]} - {tool.pid}
        late = time.monotonic() + 10
        while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
            assert time.monotonic() < late, left
            time.sleep(0.1)
    finally:
        tool.kill()


def test_only_marked_tests_run_and_nothing_passed_is_no_success(tmp_path):
    (tmp_path / "test_good.py").write_text(GOOD)
    assert run(tmp_path).returncode == 0
    assert run(tmp_path, "-k", "no_such_test").returncode == 1
    (tmp_path / "test_good.py").write_text("import no_such_module\n")
    broken = run(tmp_path)
    assert broken.returncode == 1
    assert "no_such_module" in broken.stdout
