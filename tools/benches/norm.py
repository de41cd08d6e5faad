"""RMSNorm and SwiGLU beside a copy of the same bytes, and beside vLLM's CUDA kernels where its library is there."""

import importlib
import os
import re
import time
from collections.abc import Callable
from typing import Any

import torch
from benches import data, timing

HIDDEN, FFN, HEADS, HEAD_DIM = 4096, 12288, 40, 128
ROWS = (1, 16, 64, 256, 1024, 4096, 8192, 16384, 32768)


def _vllm() -> Any | None:
    """vLLM's compiled operators: from an installed vLLM, or from the library that VLLM_OPS names."""
    library = os.environ.get("VLLM_OPS")
    try:
        if library:
            torch.ops.load_library(library)
        else:
            importlib.import_module("vllm._custom_ops")
        return torch.ops._C
    except (ImportError, OSError, RuntimeError) as error:
        print(f"norm: no vLLM peer ({error})", flush=True)
        return None


def _cases(m: int, vllm: Any | None) -> dict[str, tuple[int, dict[str, Callable[[int], object]], int]]:
    """name -> (bytes moved, calls, rotation)."""
    from rl_gemm import ops as gemm_ops
    from rl_norm import ops

    each = m * HIDDEN * 2
    count = max(2, timing.copies(each))
    x = [data.matrix(m, HIDDEN, "normal", i) for i in range(count)]
    y = [torch.empty_like(x[0]) for _ in range(2)]
    weight = data.matrix(1, HIDDEN, "normal", 7)[0]
    wide = timing.copies(6 * m * FFN)
    gate_up = [data.matrix(m, 2 * FFN, "normal", i) for i in range(wide)]
    act = torch.empty(m, FFN, dtype=torch.bfloat16, device="cuda")
    slim = max(2, timing.copies(m * HEADS * HEAD_DIM * 2))
    qk = [data.matrix(m * HEADS, HEAD_DIM, "normal", i) for i in range(slim)]
    qk_weight = data.matrix(1, HEAD_DIM, "normal", 8)[0]
    qk_out = torch.empty_like(qk[0])
    _, stream, rstd = ops.add_rms_norm(x[0], x[1], weight, 1e-6)
    cases: dict[str, tuple[int, dict[str, Callable[[int], object]], int]] = {
        "rms_norm": (2 * each, {"strict": lambda i: ops.rms_norm(x[i], weight, 1e-6)}, count),
        "add_rms_norm": (
            4 * each,
            {"strict": lambda i: ops.add_rms_norm(x[i], x[(i + 1) % count], weight, 1e-6)},
            count,
        ),
        "rms_norm backward": (
            3 * each,
            {"strict": lambda i: ops.grad_input(x[i], stream, weight, rstd)},
            count,
        ),
        "q/k norm": (4 * m * HEADS * HEAD_DIM, {"strict": lambda i: ops.rms_norm(qk[i], qk_weight, 1e-6)}, slim),
        "swiglu": (6 * m * FFN, {"strict": lambda i: gemm_ops.swiglu(gate_up[i])}, wide),
        "swiglu backward": (
            10 * m * FFN,
            {"strict": lambda i: gemm_ops.swiglu_backward(gate_up[(i + 1) % wide][:, :FFN], gate_up[i])},
            wide,
        ),
    }
    if vllm is not None:
        cases["rms_norm"][1]["vllm"] = lambda i: vllm.rms_norm(y[i % 2], x[i], weight, 1e-6)
        # vLLM's fused kernel overwrites both operands, so it gets buffers of its own; values do not change its time
        own = [t.clone() for t in x]
        fused = vllm.fused_add_rms_norm
        cases["add_rms_norm"][1]["vllm"] = lambda i: fused(own[i], own[(i + 1) % count], weight, 1e-6)
        cases["q/k norm"][1]["vllm"] = lambda i: vllm.rms_norm(qk_out, qk[i], qk_weight, 1e-6)
        cases["swiglu"][1]["vllm"] = lambda i: vllm.silu_and_mul(act, gate_up[i])
    return cases


def _copy(total: int) -> tuple[Callable[[int], object], int]:
    """A copy that moves ``total`` bytes, reading and writing half each."""
    size = max(64, total // 8)
    count = max(2, timing.copies(4 * size))
    pool = [torch.randint(0, 255, (size,), dtype=torch.int32, device="cuda") for _ in range(count)]
    out = [torch.empty_like(pool[0]) for _ in range(2)]
    return (lambda i: out[i % 2].copy_(pool[i % count])), count


def run(budget: float) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows and targets."""
    rows = again(budget, "")
    return rows, summary(rows)


def again(budget: float, match: str) -> list[dict[str, Any]]:
    """Rows of the matching cases."""
    started, vllm, rows = time.time(), _vllm(), []
    for m in ROWS:
        if time.time() - started > budget:
            print(f"norm: budget reached before M={m}", flush=True)
            break
        for name, (moved, calls, rotate) in _cases(m, vllm).items():
            if not re.search(match, f"{name} M={m}"):
                continue
            copy, copies = _copy(moved)
            # both sides must index within their pools, so the smaller rotation serves both
            times = timing.time_calls({**calls, "copy": copy}, rotate=min(rotate, copies), rounds=9)
            for peer in ("copy", "vllm"):
                if peer in times:
                    rows.append(
                        {
                            "case": f"{name} M={m}",
                            "op": name,
                            "shape": [m, HEAD_DIM * HEADS if name == "q/k norm" else HIDDEN if "norm" in name else FFN],
                            "bytes": moved,
                            "strict_us": round(times["strict"], 2),
                            "peer": peer,
                            "peer_us": round(times[peer], 2),
                            "ratio": round(times[peer] / times["strict"], 3),
                        }
                    )
            torch.cuda.empty_cache()
    return rows


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Worst ratio against a copy of the same bytes from 64 MB up, and against vLLM's kernel at 64 rows."""
    found: dict[str, Any] = {}
    for op in dict.fromkeys(r["op"] for r in rows):
        big = [r["ratio"] for r in rows if r["op"] == op and r["peer"] == "copy" and r["bytes"] >= 64e6]
        if big:
            found[f"{op}, of copy bandwidth from 64 MB, worst >= 0.90"] = min(big)
    for r in rows:
        if r["peer"] == "vllm" and r["shape"][0] == 64:
            found[f"{r['op']} at 64 rows against vLLM >= 1.00"] = r["ratio"]
    return found
