"""tools/bench: every way through it writes a whole file."""

import importlib.machinery
import importlib.util
import json
import sys
import types
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[1] / "tools" / "bench"
ABOUT = {"gpu": "none", "commit": "c0ffee", "date": "2026-01-01"}


def row(case, strict_us, peer_us=10.0):
    return {"case": case, "peer": "lib", "strict_us": strict_us, "peer_us": peer_us, "ratio": peer_us / strict_us}


@pytest.fixture
def bench(monkeypatch):
    """A function that runs the tool's main on a bench module with the given names."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    loader = importlib.machinery.SourceFileLoader("bench_tool", str(TOOL))
    tool = importlib.util.module_from_spec(importlib.util.spec_from_loader("bench_tool", loader))
    loader.exec_module(tool)
    monkeypatch.setattr(tool, "meta", lambda commit: dict(ABOUT))

    def main(module, name, *arguments):
        monkeypatch.setitem(sys.modules, f"benches.{name}", module)
        monkeypatch.setattr(sys, "argv", ["bench", name, *map(str, arguments)])
        tool.main()

    main.tool = tool
    return main


def whole(budget):
    return [row("a", 5.0), row("b", 20.0)], {"mean": 1.25}


@pytest.mark.parametrize("method", [{}, {"METHOD": "medians"}])
def test_whole_bench_writes_its_rows(bench, tmp_path, method):
    bench(types.SimpleNamespace(run=whole, **method), "logprob", "--json", tmp_path / "deep" / "x.json")
    written = json.loads((tmp_path / "deep" / "x.json").read_text())
    assert written["rows"] == whole(0)[0]
    assert written["summary"] == {"mean": 1.25}
    assert written["meta"] == ABOUT | ({"method": "medians"} if method else {})


def test_bench_that_is_cut_short_leaves_the_rows_so_far(bench, tmp_path):
    def measure(budget):
        yield [row("a", 5.0)]
        yield [row("b", 20.0), {"case": "c", "peer": "memory", "memory": 1.5}]
        raise KeyboardInterrupt

    module = types.SimpleNamespace(measure=measure, summary=lambda rows: {"cases": len(rows)})
    with pytest.raises(KeyboardInterrupt):
        bench(module, "gemm", "--json", tmp_path / "x.json")
    written = json.loads((tmp_path / "x.json").read_text())
    assert [r["case"] for r in written["rows"]] == ["a", "b", "c"]
    assert written["summary"] == {"cases": 3}
    again = types.SimpleNamespace(
        measure=measure, again=lambda budget, match: [row("a", 2.5)], summary=lambda rows: {"cases": len(rows)}
    )
    bench(again, "gemm", "--json", tmp_path / "y.json", "--again", tmp_path / "x.json")
    renewed = json.loads((tmp_path / "y.json").read_text())["rows"]
    assert renewed == [row("a", 2.5), *written["rows"][1:]]


def test_case_measured_again_replaces_its_row_alone(bench, tmp_path):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text(json.dumps({"meta": {"gpu": "older"}, "rows": whole(0)[0], "summary": {}}))
    module = types.SimpleNamespace(
        run=whole,
        again=lambda budget, match: [row("b", 8.0)],
        summary=lambda rows: {"least": min(r["ratio"] for r in rows)},
    )
    bench(module, "gemm", "--json", new, "--again", old, "--match", "b")
    written = json.loads(new.read_text())
    assert [(r["case"], r["strict_us"], r["ratio"]) for r in written["rows"]] == [("a", 5.0, 2.0), ("b", 8.0, 1.25)]
    assert written["summary"] == {"least": 1.25}
    assert written["meta"] == {"gpu": "older", "again": [{"match": "b", **ABOUT}]}


def test_bench_of_runs_reads_the_directories(bench, tmp_path):
    module = types.SimpleNamespace(from_runs=lambda paths, commit: ({"runs": len(paths)}, [row("a", 5.0)], {}))
    bench(module, "step", "--json", tmp_path / "x.json", "--runs", tmp_path, tmp_path)
    assert json.loads((tmp_path / "x.json").read_text())["meta"] == {"runs": 2}


def test_long_bench_has_options_of_its_own_and_is_written_as_it_goes(bench, tmp_path):
    out = tmp_path / "x.json"

    def run(budget, layers, keep):
        keep([row("a", 5.0)], {"so far": 1})
        assert json.loads(out.read_text())["summary"] == {"so far": 1}
        return whole(budget)[0], {"layers": layers}

    module = types.SimpleNamespace(run=run, options=lambda rest: {"layers": rest[1]})
    bench(module, "engine", "--json", out, "--layers", "7")
    assert json.loads(out.read_text())["summary"] == {"layers": "7"}


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("step", []),
        ("gemm", ["--runs", "somewhere"]),
        ("norm", ["--again", "old.json"]),
        ("norm", ["--layers", "7"]),
        ("norm", ["--budget", "nan"]),
        ("norm", ["--budget", "-1"]),
        ("norm", ["--match", "["]),
        ("norm", ["--match", "a"]),
        ("engine_arms", []),
    ],
    ids=[
        "no runs",
        "runs not wanted",
        "cannot measure again",
        "no such option",
        "no time",
        "less than no time",
        "no expression",
        "match without again",
        "no bench",
    ],
)
def test_options_that_do_not_fit_write_nothing(bench, tmp_path, name, arguments):
    module = types.SimpleNamespace(**({"from_runs": None} if name == "step" else {"run": whole}))
    with pytest.raises(SystemExit, match="2"):
        bench(module, name, "--json", tmp_path / "x.json", *arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "module",
    [
        types.SimpleNamespace(run=lambda budget: ([], {"mean": None})),
        types.SimpleNamespace(measure=lambda budget: iter([[]]), summary=lambda rows: {"mean": None}),
        types.SimpleNamespace(run=lambda budget, keep: keep([], {}) or ([], {}), options=lambda rest: {"keep": None}),
    ],
    ids=["run", "measure", "keep"],
)
def test_a_bench_that_measured_nothing_leaves_the_file_as_it_was(bench, tmp_path, module):
    landed = tmp_path / "x.json"
    landed.write_text("landed")
    with pytest.raises(SystemExit, match="nothing was measured"):
        bench(module, "gemm", "--json", landed)
    assert landed.read_text() == "landed"


@pytest.mark.parametrize(
    ("old", "problem"), [("{", "no file of JSON"), ("[]", "a list"), ("{}", "no meta"), (None, "No such")]
)
def test_bad_input_no_old_file_to_measure_again(bench, tmp_path, old, problem):
    if old is not None:
        (tmp_path / "old.json").write_text(old)
    module = types.SimpleNamespace(run=whole, again=lambda budget, match: [row("b", 8.0)])
    with pytest.raises(SystemExit, match=problem):
        bench(module, "gemm", "--json", tmp_path / "x.json", "--again", tmp_path / "old.json")
    assert not (tmp_path / "x.json").exists()


def test_no_case_that_matches_is_not_measured_again(bench, tmp_path):
    old = tmp_path / "old.json"
    old.write_text(json.dumps({"meta": {}, "rows": whole(0)[0], "summary": {}}))
    before = old.read_text()
    module = types.SimpleNamespace(run=whole, again=lambda budget, match: [], summary=lambda rows: {})
    with pytest.raises(SystemExit, match="no case that matches 'zzz'"):
        bench(module, "gemm", "--json", old, "--again", old, "--match", "zzz")
    assert old.read_text() == before


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("logprob", ["--only", "nosuchcase"], "no case matches 'nosuchcase'"),
        ("logprob", ["--only", "["], "no regular expression"),
        ("engine", ["--gpus", "0", "0"], "give each once"),
        ("engine", ["--layers", "8", "8"], "give each once"),
        ("engine", ["--engines", "strict", "strict"], "give each once"),
        ("engine", ["--layers", "0"], "less than 1"),
        ("engine", ["--logs", "USED"], "results of another run"),
    ],
)
def test_bad_options_of_a_bench_of_its_own_are_refused(monkeypatch, tmp_path, capsys, name, options, problem):
    monkeypatch.syspath_prepend(str(TOOL.parent))
    (tmp_path / "results-1.jsonl").touch()
    with pytest.raises(SystemExit, match="2"):
        importlib.import_module(f"benches.{name}").options([str(tmp_path) if x == "USED" else x for x in options])
    assert problem in capsys.readouterr().err


def test_good_options_of_a_bench_of_its_own_are_taken(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(TOOL.parent))
    assert importlib.import_module("benches.logprob").options(["--only", "M=64$"]) == {"only": "M=64$"}
    found = importlib.import_module("benches.engine").options(["--layers", "8", "--logs", str(tmp_path / "new")])
    assert (found["layers"], found["logs"]) == ([8], tmp_path / "new")


def test_runs_that_cannot_be_read_are_named_in_a_line(bench, tmp_path):
    pytest.importorskip("rl_parity")
    from benches import step

    with pytest.raises(SystemExit, match="nodir has no manifest"):
        bench(step, "step", "--json", tmp_path / "x.json", "--runs", tmp_path / "nodir")
