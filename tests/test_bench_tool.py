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
    [("step", []), ("gemm", ["--runs", "somewhere"]), ("norm", ["--again", "old.json"]), ("norm", ["--layers", "7"])],
    ids=["no runs", "runs not wanted", "cannot measure again", "no such option"],
)
def test_options_that_do_not_fit_write_nothing(bench, tmp_path, name, arguments):
    module = types.SimpleNamespace(**({"from_runs": None} if name == "step" else {"run": whole}))
    with pytest.raises(SystemExit, match="2"):
        bench(module, name, "--json", tmp_path / "x.json", *arguments)
    assert not list(tmp_path.iterdir())
