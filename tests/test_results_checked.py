"""tools/results holds ratios and targets against the times, and draws sizes, peers and targets under their names."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from test_results_tool import BENCH, TOOLS, run

H200 = TOOLS.parent / "docs" / "results" / "h200"


@pytest.fixture
def pictures(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(TOOLS), *sys.path])
    yield
    for name in [n for n in sys.modules if n.split(".")[0] == "pictures"]:
        del sys.modules[name]


def refused(run_tool, folder, name, payload):
    file = folder / name
    file.write_text(json.dumps(payload))
    done = run_tool("results", file)
    assert done.returncode == 1
    assert done.stderr.startswith(str(file)), done.stderr
    assert [p.name for p in folder.iterdir()] == [name]
    return done.stderr


def test_bad_input_a_ratio_that_is_not_that_of_its_times(tmp_path, run_tool):
    pytest.importorskip("matplotlib")
    row = BENCH["rows"][0]
    assert "10.0 us / 5.0 us are 2.000" in refused(
        run_tool, tmp_path, "x.json", BENCH | {"rows": [row | {"ratio": 9.9}]}
    )
    assert "are no two times" in refused(run_tool, tmp_path, "x.json", BENCH | {"rows": [row | {"strict_us": 0.0}]})
    assert "rows is empty" in refused(run_tool, tmp_path, "x.json", BENCH | {"rows": []})


def test_bad_input_what_a_file_lacks_is_named(tmp_path, run_tool):
    pytest.importorskip("matplotlib")
    without = {key: value for key, value in BENCH.items() if key != "summary"}
    assert "it holds no summary (dict)" in refused(run_tool, tmp_path, "x.json", without)
    assert "it holds no rows (list)" in refused(run_tool, tmp_path, "x.json", BENCH | {"rows": {}})
    deep = tmp_path / "x.json"
    deep.write_text("[" * 100_000 + "]" * 100_000)
    done = run_tool("results", deep)
    assert (done.returncode, "is no file of JSON: " in done.stderr) == (1, True)


ROWS = {
    "a text for a row": (lambda row: "x", r"row 1: it is a str, supported is an object"),
    "a time of text": (lambda row: row | {"strict_us": "5"}, r"row 1 (qkv M=64): strict_us is '5', supported is a"),
    "a time of many digits": (lambda row: row | {"strict_us": 10**400}, "strict_us is a number of 1329 bits"),
    "no ratio": (lambda row: {k: v for k, v in row.items() if k != "ratio"}, "row 1 (qkv M=64): ratio is None"),
    "no time": (lambda row: {k: v for k, v in row.items() if k != "peer_us"}, "row 1 (qkv M=64): peer_us is None"),
    "a shape of nothing": (lambda row: row | {"shape": []}, "row 1 (qkv M=64): shape is []"),
    "a shape of text": (lambda row: row | {"shape": ["64"]}, "row 1 (qkv M=64): shape is ['64']"),
    "no peer": (lambda row: row | {"peer": None}, "row 1 (qkv M=64): peer is None"),
    "no case": (lambda row: row | {"case": 3}, "row 1 (3): case is 3, supported is a text"),
}


@pytest.mark.parametrize("case", ROWS)
def test_bad_input_a_row_of_another_shape_is_named(case, tmp_path, run_tool):
    pytest.importorskip("matplotlib")
    change, words = ROWS[case]
    row = BENCH["rows"][0]
    assert words in refused(run_tool, tmp_path, "x.json", BENCH | {"rows": [row, change(row)]})


def test_a_file_of_no_bench_is_drawn_and_says_that_its_targets_are_unchecked(tmp_path, run_tool):
    pytest.importorskip("matplotlib")
    (tmp_path / "foo.json").write_text(json.dumps(BENCH))
    done = run_tool("results", tmp_path / "foo.json")
    assert done.returncode == 0
    words = f"{tmp_path / 'foo.json'}: tools/bench has no bench foo, so its targets are not computed again"
    assert done.stderr.splitlines() == [words]


def test_a_ratio_of_times_before_their_rounding_is_taken(tmp_path, run_tool):
    pytest.importorskip("matplotlib")
    # 1.084 / 1.566 of the times as measured; 1.08 / 1.57 as stored
    row = BENCH["rows"][0] | {"strict_us": 1.57, "peer_us": 1.08, "ratio": 0.692}
    (tmp_path / "x.json").write_text(json.dumps(BENCH | {"rows": [row]}))
    assert run_tool("results", tmp_path / "x.json").returncode == 0
    assert "are 0.688" in refused(
        run_tool, fresh(tmp_path / "other"), "x.json", BENCH | {"rows": [row | {"ratio": 0.70}]}
    )


def fresh(folder):
    folder.mkdir()
    return folder


def test_bad_input_a_target_that_its_rows_do_not_give(tmp_path, run_tool):
    pytest.importorskip("matplotlib")
    payload = json.loads((H200 / "norm.json").read_text())
    name = next(iter(payload["summary"]))
    payload["summary"][name] = 9.9
    assert f"the target '{name}' is 9.9 in the summary" in refused(run_tool, tmp_path, "norm.json", payload)
    del payload["summary"][name]
    assert "is nothing in the summary" in refused(run_tool, tmp_path, "norm.json", payload)
    done = run_tool("results", tmp_path / "norm.json", "--renew-summary")
    assert done.returncode == 0, done.stderr
    renewed = json.loads((tmp_path / "norm.json").read_text())
    assert renewed == json.loads((H200 / "norm.json").read_text())


def test_landed_pages_are_what_their_files_give(tmp_path):
    pytest.importorskip("matplotlib")
    # a bench that makes its own page may need what its kernels are written in
    missing = {"gemm_profile"} if importlib.util.find_spec("triton") is None else set()
    files = sorted(path for path in H200.glob("*.json") if path.stem not in missing)
    for file in files:
        (tmp_path / file.name).write_bytes(file.read_bytes())
    done = run("results", *(tmp_path / file.name for file in files))
    assert done.returncode == 0, done.stderr
    for file in files:
        assert (tmp_path / f"{file.stem}.md").read_text() == file.with_suffix(".md").read_text()


def test_engine_is_drawn_over_requests_with_the_targets_of_the_file(pictures):
    from pictures import engine

    rows = [
        {"op": op, "shape": [batch, 512, layers], "peer": peer, "strict_us": 1.0, "peer_us": 1.1, "ratio": 1.1}
        for op in ("prefill", "decode") for batch in (1, 64) for layers in (8, 36)
        for peer in ("native", "batch-invariant")
    ]  # fmt: skip
    summary = {
        "decode of native at batch 1, worst >= 0.92": 1.1, "decode of native at batch 64, worst >= 0.97": 1.1,
        "prefill of native, worst >= 0.95": 1.1, "decode of batch-invariant vLLM at batch 64, worst >= 1.50": 1.1,
    }  # fmt: skip
    found = {panel.title: panel for panel in engine.panels_of({"rows": rows, "summary": summary})}
    assert len(found) == 4
    assert {panel.xlabel for panel in found.values()} == {"requests at once"}
    decode = found["decode: strict vLLM against vLLM at its best"]
    assert decode.targets == [(1, 1, 0.92), (64, 64, 0.97)]
    assert decode.curves["36 layers, 512 prompt tokens"] == [(1, 1.1), (64, 1.1)]
    assert found["decode: strict vLLM against batch-invariant vLLM"].targets == [(64, 64, 1.5)]
    assert found["prefill: strict vLLM against batch-invariant vLLM"].targets == []


def test_attention_is_not_drawn_against_its_own_call(pictures):
    from pictures import attn

    payload = json.loads((H200 / "attn.json").read_text())
    assert any(attn.same_call(row) for row in payload["rows"])
    titles = [panel.title for panel in attn.panels_of(payload) if panel.curves]
    assert "decode: segments against\nFlashAttention 3, one split" in titles
    assert not [t for t in titles if "nosplit against\nFlashAttention 3, one split" in t]
    assert "same library call" in attn.NOTES["fa3 nosplit"]
    assert Path(H200 / "attn.md").read_text().count(attn.NOTES["fa3 nosplit"]) == 1
