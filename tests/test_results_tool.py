"""The tools that read or write files of measurements: both files or none, and one line on bad input or no GPU."""

import argparse
import importlib.machinery
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[1] / "tools"
META = {"gpu": "none", "driver": "1", "torch": "2", "triton": "3", "commit": "c0ffee", "date": "2026-01-01"}
CASE = {"case": "qkv M=64", "op": "forward", "group": "qwen", "shape": [64, 128, 128], "peer": "lib"}
BENCH = {"meta": META, "rows": [CASE | {"strict_us": 5.0, "peer_us": 10.0, "ratio": 2.0}], "summary": {"mean": 2.0}}


def run(tool, *arguments, **environment):
    command = [sys.executable, str(TOOLS / tool), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=os.environ | environment)


def test_results_writes_table_and_picture(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "x.json").write_text(json.dumps(BENCH))
    done = run("results", tmp_path / "x.json")
    assert done.returncode == 0, done.stderr
    assert {p.name for p in tmp_path.iterdir()} == {"x.json", "x.md", "x.png"}
    assert "| qkv | 2.00 (5) |" in (tmp_path / "x.md").read_text()
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"


def test_results_without_matplotlib_writes_nothing(tmp_path):
    (tmp_path / "matplotlib.py").write_text("raise ImportError('not here')")
    (tmp_path / "x.json").write_text(json.dumps(BENCH))
    done = run("results", tmp_path / "x.json", PYTHONPATH=str(tmp_path), PYTHONDONTWRITEBYTECODE="1")
    assert (done.returncode, done.stderr) == (1, "results draws with matplotlib: not here; nothing is written\n")
    assert {p.name for p in tmp_path.iterdir()} == {"x.json", "matplotlib.py"}


BAD = ["{", "[]", "{}", json.dumps({"meta": {}, "rows": []}), json.dumps(BENCH | {"rows": [{"ratio": 1.0}]}), None]


@pytest.mark.parametrize("text", BAD)
def test_bad_input_results_names_the_file_and_writes_nothing(tmp_path, text, run_tool):
    pytest.importorskip("matplotlib")
    (tmp_path / "good.json").write_text(json.dumps(BENCH))
    bad = tmp_path / "bad.json"
    if text is not None:
        bad.write_text(text)
    done = run_tool("results", bad, tmp_path / "good.json")
    assert done.returncode == 1
    assert done.stderr.startswith(str(bad))
    assert done.stderr.count("\n") == 1
    assert not [p for p in tmp_path.iterdir() if p.suffix != ".json"]


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "{}", json.dumps({"environment": {}, "differing": {}, "rows": [{"us": 1.0}]}), None],
)
def test_bad_input_a_plan_is_selected_from_no_other_file(tmp_path, text, tune):
    times = tmp_path / "times.json"
    if text is not None:
        times.write_text(text)
    with pytest.raises(SystemExit) as end:
        tune(times, out=tmp_path / "plan.json")
    assert str(end.value.code).startswith(str(times))
    assert not (tmp_path / "plan.json").exists()


def test_a_plan_is_selected_by_time_as_a_multiple_of_the_librarys(tmp_path):
    shape = {"operation": "forward", "n": 1536, "k": 4096, "leaves": 1, "m": 16}
    slow, fast = "leaf-16x64x128-4w5-swap", "tma-16x64x256-4w4-swap"
    # a faster clock in the second run must not decide
    for name, base, use, us in (("a", 10.0, slow, 12.0), ("b", 5.0, fast, 5.5)):
        rows = [shape | {"use": "default", "us": base}, shape | {"use": use, "us": us}]
        payload = {"environment": {"device": "card"}, "differing": {}, "rows": rows}
        (tmp_path / f"{name}.json").write_text(json.dumps(payload))
    done = run("tune", "select", tmp_path / "a.json", tmp_path / "b.json", "--out", tmp_path / "plan.json")
    assert done.returncode == 0, done.stderr
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert [r["use"] for r in plan["rows"] if r["n"] == 1536] == [fast]


ROW = {"operation": "forward", "n": 1536, "k": 4096, "leaves": 1, "m": 16, "use": "leaf-16x64x128-4w5-swap", "us": 2.0}
DEFAULT = ROW | {"use": "default", "us": 4.0}
NO_TIMINGS = {
    "none": ([], "holds no timing"),
    "the library alone": ([DEFAULT], "has timings of no kernel whose bits were right"),
    "no pair": ([r | {"operation": "gate_up_swiglu"} for r in (ROW, DEFAULT)], "no timing of the two calls in turn"),
    "us 0": ([DEFAULT | {"us": 0}, ROW], "row 0: us=0 is of no timing"),
    "us nan": ([DEFAULT, ROW | {"us": float("nan")}], "row 1: us=nan"),
    "us as text": ([DEFAULT, ROW | {"us": "2.0"}], "row 1: us='2.0'"),
    "an odd kernel": ([DEFAULT, ROW | {"use": "leaf-16x64x128-zz9"}], "row 1: use='leaf-16x64x128-zz9'"),
    "a kernel that is none": ([DEFAULT, ROW | {"use": "leaf-15x64x128-4w5"}], "row 1: use="),
    "a kernel of a number": ([DEFAULT, ROW | {"use": 3}], "row 1: use=3"),
    "m 0": ([DEFAULT | {"m": 0}, ROW], "row 0: m=0"),
    "an unknown operation": ([DEFAULT | {"operation": "x"}, ROW], "row 0: operation='x'"),
}


@pytest.fixture
def tune(load_tool):
    """``tools/tune select``, without a process that imports torch again."""
    found = load_tool("tune")

    def select(*files, out, arch="sm90", keep=False):
        found.select(argparse.Namespace(files=files, out=out, arch=arch, keep=keep))

    return select


def timings(path, rows):
    path.write_text(json.dumps({"environment": {"device": "card"}, "differing": {}, "rows": rows}))
    return path


@pytest.mark.parametrize("case", NO_TIMINGS)
def test_bad_input_what_is_no_timing_is_named_and_no_plan_is_written(case, tmp_path, tune):
    rows, words = NO_TIMINGS[case]
    out = tmp_path / "plan.json"
    with pytest.raises(SystemExit) as end:
        tune(timings(tmp_path / "times.json", rows), out=out)
    assert words in end.value.code
    assert not out.exists()


def test_bad_input_an_architecture_or_plan_that_is_none_is_named(tmp_path, tune):
    times, out = timings(tmp_path / "times.json", [DEFAULT, ROW]), tmp_path / "plan.json"
    with pytest.raises(SystemExit, match=r"no plan is written.*arch='foo', supported"):
        tune(times, out=out, arch="foo")
    assert not out.exists()
    out.write_text('{"rows": [{}], "certificates": []}')
    with pytest.raises(SystemExit, match="is no plan that can be changed"):
        tune(times, out=out, keep=True)
    assert out.read_text() == '{"rows": [{}], "certificates": []}'


def test_a_plan_says_how_much_of_it_was_timed(tmp_path, tune, capsys):
    out = tmp_path / "plan.json"
    tune(timings(tmp_path / "times.json", [DEFAULT, ROW]), out=out)
    tune(out=out, keep=True)
    timed, kept = capsys.readouterr().out.splitlines()
    assert timed.endswith("1 cells as timed, the others by rule, not timed")
    assert kept.endswith("0 cells as timed, the others as they were")


WITHOUT_GPU = [
    ("bench", "norm", "--json", "x.json"),
    ("tune", "time", "--json", "x.json"),
    ("certify", "--plan", "x.json"),
    ("golden", "--out", "x.npz"),
]


@pytest.mark.parametrize("command", WITHOUT_GPU, ids=[c[0] for c in WITHOUT_GPU])
def test_bad_input_no_gpu_is_one_line(command, tmp_path):
    name = " ".join(command[:2]) if command[0] == "tune" else command[0]
    done = run(*command, CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, f"{name} needs 1 GPU, torch sees 0")
    assert "Traceback" not in done.stderr


UNWRITABLE = [("golden", "--out"), ("certify", "--plan", "x.json", "--out"), ("tune", "time", "--json")]


@pytest.mark.parametrize("command", UNWRITABLE, ids=[c[0] for c in UNWRITABLE])
def test_bad_input_a_file_that_cannot_be_written_stops_the_tool_at_once(command, tmp_path):
    """Before the GPU is asked for, and long before there is something to write."""
    done = run(*command, tmp_path, CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, done.stderr.count("is a folder, name a file")) == (2, 1), done.stderr
    assert "Traceback" not in done.stderr


def test_bad_input_a_file_to_write_is_no_folder_and_below_none_that_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(TOOLS), *sys.path])
    from command_line import file_to_write

    (tmp_path / "file").write_text("kept")
    for path, why in (
        (tmp_path, "is a folder, name a file"),
        (tmp_path / "file" / "deep" / "x", "is a file, so"),
        (Path("/proc/version/x"), "is a file, so"),
    ):
        with pytest.raises(argparse.ArgumentTypeError, match=why):
            file_to_write(str(path))
    # nobody may make a file there, root included
    with pytest.raises(argparse.ArgumentTypeError, match="cannot be written to"):
        file_to_write("/proc/new/x")
    assert file_to_write(str(tmp_path / "file")) == tmp_path / "file"
    assert {p.name for p in tmp_path.iterdir()} == {"file"}


@pytest.mark.parametrize("options", [["--shape", "3"], ["--rows", "0"], ["--budget", "nan"]], ids=lambda o: o[0])
def test_bad_input_certify_starts_nothing(options):
    assert run("certify", "--plan", "x.json", *options).returncode == 2


def test_certifying_some_shapes_keeps_the_claims_of_the_others(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    loader = importlib.machinery.SourceFileLoader("certify_tool", str(TOOLS / "certify"))
    tool = importlib.util.module_from_spec(importlib.util.spec_from_loader("certify_tool", loader))
    loader.exec_module(tool)

    def claim(operation, n, m_min=33):
        return {"operation": operation, "n": n, "k": 64, "m_min": m_min, "m_max": 8192}

    here, elsewhere = {"device": "one"}, {"device": "another"}
    before = [
        {"library": "lib", "environment": elsewhere, "claims": [claim("forward", 128)]},
        {"library": "lib", "environment": here, "claims": [claim(o, n) for n in (128, 256) for o in ("forward", "dx")]},
    ]
    # of 256 one operation is tested again with another outcome, one is refused
    found = tool.joined(before, here, [claim("forward", 256, 65), claim("forward", 512)], [("dx", 256, 64, [40])])
    assert found[0] == before[0]
    assert found[1]["claims"] == [
        claim("forward", 128), claim("dx", 128), claim("forward", 256, 65), claim("forward", 512)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("target", "value", "said"),
    [
        ("decode >= 0.97", 0.97, ""),
        ("decode >= 0.97", 0.969, ", **short**"),
        ("memory <= 2", 1.02, ""),
        ("memory <= 2", 2.1, ", **short**"),
        ("chain, worst cell", 0.1, ""),
        ("decode >= 0.97", None, ""),
    ],
)
def test_a_target_that_is_missed_is_said_to_be(target, value, said):
    loader = importlib.machinery.SourceFileLoader("results_tool", str(TOOLS / "results"))
    tool = importlib.util.module_from_spec(importlib.util.spec_from_loader("results_tool", loader))
    loader.exec_module(tool)
    assert tool.missed(target, value) == said
