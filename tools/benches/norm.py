"""RMSNorm, SwiGLU and what stands before attention, beside a copy of the same bytes and vLLM's CUDA kernels."""

import importlib
import os
import re
import time
from collections.abc import Callable
from typing import Any

import torch
from benches import data, timing

HIDDEN, FFN, HEADS, HEAD_DIM = 4096, 12288, 40, 128
QUERIES, KEYS, PAGE = 32, 8, 16
BEFORE = "norm, rotary, write"
ROWS = (1, 16, 64, 256, 1024, 4096, 8192, 16384, 32768)

_WIDTHS = {
    "q/k norm": HEADS * HEAD_DIM,
    "q/k norm weight gradient": HEADS * HEAD_DIM,
    BEFORE: (QUERIES + 2 * KEYS) * HEAD_DIM,
}


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
    _, qk_rstd = ops.rms_norm(qk[0], qk_weight, 1e-6)
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
        "rms_norm weight gradient": (
            2 * each,
            {"strict": lambda i: ops.grad_weight(x[i], stream, rstd, 1, 1)},
            count,
        ),
        "q/k norm weight gradient": (
            4 * m * HEADS * HEAD_DIM,
            {"strict": lambda i: ops.grad_weight(qk[i], qk[(i + 1) % slim], qk_rstd, HEADS, 1)},
            slim,
        ),
        "q/k norm": (4 * m * HEADS * HEAD_DIM, {"strict": lambda i: ops.rms_norm(qk[i], qk_weight, 1e-6)}, slim),
        "swiglu": (6 * m * FFN, {"strict": lambda i: gemm_ops.swiglu(gate_up[i])}, wide),
        "swiglu backward": (
            10 * m * FFN,
            {"strict": lambda i: gemm_ops.swiglu_backward(gate_up[(i + 1) % wide][:, :FFN], gate_up[i])},
            wide,
        ),
    }
    cases[BEFORE] = _before_attention(m, vllm)
    if vllm is not None:
        cases["rms_norm"][1]["vllm"] = lambda i: vllm.rms_norm(y[i % 2], x[i], weight, 1e-6)
        # vLLM's fused kernel overwrites both operands, so it gets buffers of its own; values do not change its time
        own = [t.clone() for t in x]
        fused = vllm.fused_add_rms_norm
        cases["add_rms_norm"][1]["vllm"] = lambda i: fused(own[i], own[(i + 1) % count], weight, 1e-6)
        cases["q/k norm"][1]["vllm"] = lambda i: vllm.rms_norm(qk_out, qk[i], qk_weight, 1e-6)
        cases["swiglu"][1]["vllm"] = lambda i: vllm.silu_and_mul(act, gate_up[i])
    return cases


def _before_attention(m: int, vllm: Any | None) -> tuple[int, dict[str, Callable[[int], object]], int]:
    """q/k norm, rotation and cache write of a layer's m tokens: one kernel, beside vLLM's four."""
    import rl_attn

    width = (QUERIES + 2 * KEYS) * HEAD_DIM
    moved = 2 * 2 * m * width
    count = timing.copies(moved // 2)
    qkv = [data.matrix(m, width, "normal", i).view(m, -1, HEAD_DIM) for i in range(count)]
    table = rl_attn.rope_table(40960, HEAD_DIM, 1e6)
    weight = data.matrix(1, HEAD_DIM, "normal", 8)[0]
    places = torch.arange(m, device="cuda")
    pages = torch.zeros(2, -(-m // PAGE), PAGE, KEYS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    cache = rl_attn.PagedKV.from_vllm_split(pages, num_kv_heads=KEYS, head_dim=HEAD_DIM)
    positions = places % 4096

    def strict(i: int) -> object:
        q, k, v = qkv[i].split([QUERIES, KEYS, KEYS], dim=1)
        return rl_attn.norm_rotary_write(
            q, k, v, positions, table, cache, places, q_weight=weight, k_weight=weight, eps=1e-6
        )

    calls: dict[str, Callable[[int], object]] = {"strict": strict}
    caches = getattr(torch.ops, "_C_cache_ops", None)
    if vllm is not None and hasattr(caches, "reshape_and_cache_flash"):
        angles = torch.randn(40960, HEAD_DIM, device="cuda").bfloat16()
        one = torch.ones(1, device="cuda")
        parts = [[x.contiguous() for x in t.split([QUERIES, KEYS, KEYS], dim=1)] for t in qkv]

        def four(i: int) -> object:
            q, k, v = parts[i]
            vllm.rms_norm(q, q, weight, 1e-6)
            vllm.rms_norm(k, k, weight, 1e-6)
            vllm.rotary_embedding(positions, q.view(m, -1), k.view(m, -1), HEAD_DIM, angles, True)
            return caches.reshape_and_cache_flash(k, v, pages[0], pages[1], places, "auto", one, one)

        calls["vllm"] = four
    return moved, calls, count


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
                            "shape": [m, _WIDTHS.get(name, HIDDEN if "norm" in name else FFN)],
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
        # a chain of additions waits for itself; before attention tables are read too, which a copy does not
        if big and "weight gradient" not in op and op != BEFORE:
            found[f"{op}, of copy bandwidth from 64 MB, worst >= 0.90"] = min(big)
    for r in rows:
        if r["peer"] == "vllm" and r["shape"][0] == 64:
            found[f"{r['op']} at 64 rows against vLLM >= 1.00"] = r["ratio"]
    return found
