"""tools/bench gemm_profile: what it makes of stamps, traces and counters, and the page and picture of it."""

import importlib
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
TOOLS = Path(__file__).resolve().parents[1] / "tools"


@pytest.fixture
def profile(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(TOOLS), *sys.path])
    return importlib.import_module("benches.gemm_profile")


def stamp(sm, start, loaded, leaves, joined, end, blocked=0, cycles=0):
    """Of one program; times in nanoseconds."""
    row = [sm, start, loaded, joined, end, blocked, cycles, 0, *leaves]
    return row + [0] * (16 - len(row))


FIRST = [
    stamp(3, 1000, 2000, [5000, 9000], 9100, 9600, 3400, 14620),
    stamp(5, 1200, 2100, [5300, 9100], 9200, 10400, 3060, 15640),
    stamp(7, 1100, 2000, [5100, 9000], 9100, 9900, 3400, 14960),
    [0] * 16,
]
MERGE = [stamp(3, 9000, 10500, [], 0, 11000), stamp(9, 9000, 10600, [], 0, 11500)]


def test_phases_are_microseconds_since_the_first_program(profile):
    found = profile.phases(FIRST, MERGE, 2)
    assert found["timeline"][0] == [3, 0.0, 1.0, [4.0, 8.0], 8.1, 8.6]
    assert (found["last_start"], found["first_load"], found["steps"], found["after"]) == (0.2, 0.9, 7.1, 0.8)
    assert (found["median_end"], found["last_end"], found["processors"]) == (8.9, 9.4, 3)
    assert (found["mhz"], found["blocked"]) == (1700, 2.0)
    assert found["merge"] == [[3, 8.0, 9.5, 10.0], [9, 8.0, 9.6, 10.5]]
    assert (found["merge_goes"], found["merge_end"]) == (9.5, 10.5)
    assert profile.phases([[0] * 16], [], 2) == {}


def test_parts_add_up_to_the_call(profile):
    row = {"us": {"cublas": 11.0, "strict": 13.0}, "phases": profile.phases(FIRST, MERGE, 2)}
    parts = profile.page.parts_of(row)
    assert parts["steps wait for loads"] == 2.0
    assert parts["steps multiply"] == pytest.approx(5.1)
    assert parts["merge kernel"] == pytest.approx(1.1)
    assert sum(parts.values()) == pytest.approx(13.0, abs=0.05)


def test_kernels_of_a_trace_in_the_order_of_launches(profile):
    about = {"grid": [128, 1, 1], "block": [160, 1, 1], "registers per thread": 90, "shared memory": 200000}
    events = [{"cat": "cpu_op", "ts": 0}]
    for call in range(3):
        events.append(
            {"cat": "kernel", "ts": 10 * call + 2, "dur": 2.0, "name": "merge", "args": {"grid": [256, 1, 1]}}
        )
        events.append({"cat": "kernel", "ts": 10 * call + 1, "dur": 9.0 + call, "name": "gemm", "args": about})
    gemm, merge = profile.kernels_of_trace(events, 3)
    assert (gemm["name"], gemm["us"], gemm["programs"], gemm["threads"]) == ("gemm", 10.0, 128, 160)
    assert (merge["name"], merge["us"], merge["programs"]) == ("merge", 2.0, 256)


def test_counters_in_one_unit(profile):
    text = (
        '==PROF== 1\n"ID","Kernel Name","gpu__time_duration.sum","dram__bytes.sum.per_second",'
        '"smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio","other"\n"","","ns","byte/s","",""\n'
        '"0","gemm","12,300","2,660,223,844,282.24","1.25","7"\n"1","merge","2,000","","0.5","7"\n'
    )
    gemm, merge = profile.counters(text)
    assert gemm == {"us": 12.3, "memory GB/s": 2660.224, "stalled barrier": 1.25}
    assert merge == {"us": 2.0, "stalled barrier": 0.5}
    assert profile.counters("==ERROR== no counters here") == []


def test_what_moves(profile):
    from rl_gemm.plans import Kernel

    kernel = Kernel(kind="tma", block_m=64, block_n=64, block_k=128, warps=4, stages=5)
    assert profile.moved(64, 4096, 4096, kernel, 2) == {
        "memory_mb": round(2 * (4096 * 4096 + 2 * 64 * 4096) / 1e6, 3),
        "to_sm_mb": round(2 * 64 * 4096 * 128 / 1e6, 3),
        "partials_mb": round(2 * 2 * 64 * 4096 * 4 / 1e6, 3),
    }


def test_page_and_picture_of_whole_and_partial_cells(profile, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    drawing = importlib.import_module("pictures.gemm_profile")
    monkeypatch.setattr(drawing, "FULL", 3)
    kernel = {"name": "gemm|x", "us": 10.0, "programs": 128, "threads": 160, "registers": 90, "shared": 2, "per_sm": 1}
    counted = {"us": 12.3, "memory %": 55.4, "stalled barrier": 1.5, "stalled selected": 1.6}
    whole = {"case": "o tree(2) M=64", "plan": "p", "us": {"cublas": 11.0, "strict": 13.0}, "failed": {}}
    whole |= {"memory_mb": 1, "to_sm_mb": 2, "partials_mb": 3, "gb_per_s": 4, "tflops": 5}
    bare = whole | {"case": "router chain M=1", "us": {"cublas": 6.0, "strict": 7.0}}
    whole |= {"phases": {"stamped_us": 13.1, **profile.phases(FIRST, MERGE, 2)}}
    kernel |= {"occupancy_percent": 7, "counters": counted}
    whole |= {"kernels": {"strict": [kernel], "cublas": [kernel]}}
    whole |= {"again": {"commit": "decade", "date": "2026-01-02", "us": {"cublas": 11.4, "strict": 12.0}}}
    rows = [whole, bare, {"case": "matrix steps", "cycles": {"wgmma": 32.0}, "mhz": 1700}]
    meta = {"gpu": "none", "driver": "1", "torch": "2", "triton": "3", "commit": "c0ffee", "date": "2026-01-01"}
    payload = {"meta": meta, "rows": json.loads(json.dumps(rows))}
    text = profile.table(payload)
    assert "| o tree(2) M=64 | 13.0 | 13.1 | 0.9 | 2.0 | 5.1 |" in text
    assert "| o tree(2) M=64 | strict | gemm/x | 10.0 | 128 |" in text
    assert "| o tree(2) M=64 | strict | gemm/x | 12.3 | 55.4 |" in text
    assert "| barrier 1.5 |" in text
    assert "commit c0ffee, 2026-01-01: each kernel alone" in text
    assert "Once more at decade, 2026-01-02" in text
    assert "| o tree(2) M=64 | 11.4 | 12.0 | 0.950 |" in text
    assert "| wgmma | 32.0 | 4.82 |" in text
    for kept in (rows, [r | {"kernels": {}} for r in rows]):
        drawing.picture({"meta": meta, "rows": kept}, str(tmp_path / "x.png"))
        assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"


def test_every_cell_has_a_kernel_of_the_plan(profile):
    for _, n, k, leaves, m in profile.CELLS:
        assert profile.kernel_of(n, k, leaves, m).kind != "leaf"
