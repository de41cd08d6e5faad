"""Linear layers: the strict GEMM beside cuBLAS at its default and beside vLLM's batch-invariant mode.

Peers run in the same process and the same minutes, in turn with the strict call. vLLM's batch-invariant mode on
Hopper is cuBLASLt with split-K forbidden and a workspace of one unit, which is set through the environment: a child
process times it.
"""

import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from benches import data, shapes, timing

GATE_UP = "gate_up+swiglu"
LAYERS = ("qkv", "o", "gate_up", "down", "lm_head")
GRADIENT_M = (1024, 4096, 8192)
_BATCH_INVARIANT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "CUBLASLT_WORKSPACE_SIZE": "1"}


def cases() -> Iterator[dict[str, Any]]:
    """What is measured, most wanted first."""
    for tp in (1, 4):
        for name, (n, k, _) in shapes.layers("qwen3-8b", tp).items():
            for m in shapes.M_LIST:
                yield {"group": f"qwen3-8b tp{tp}", "layer": name, "op": "chain", "n": n, "k": k, "m": m, "leaves": 1}
    for leaves in (2, 8):
        for name in ("o", "down"):
            n, k, _ = shapes.layers("qwen3-8b")[name]
            for m in shapes.M_LIST:
                case = {"group": "qwen3-8b tp1", "layer": name, "op": f"tree({leaves})", "n": n, "k": k, "m": m}
                yield case | {"leaves": leaves}
    for name, (n, k, _) in shapes.layers("qwen3-8b").items():
        for op in ("dX", "dW"):
            for m in GRADIENT_M:
                yield {"group": "qwen3-8b tp1", "layer": name, "op": op, "n": n, "k": k, "m": m, "leaves": 1}
    for model in ("qwen3-0.6b", "qwen3-32b"):
        for name, (n, k, _) in shapes.layers(model).items():
            for m in shapes.M_LIST[::2]:
                yield {"group": f"{model} tp1", "layer": name, "op": "chain", "n": n, "k": k, "m": m, "leaves": 1}
    for model, tp in (("qwen3-8b", 1), ("qwen3-8b", 4), ("qwen3-0.6b", 1), ("qwen3-32b", 1)):
        n, k, _ = shapes.layers(model, tp)["gate_up"]
        for m in shapes.M_LIST[:10]:
            case = {"group": f"{model} tp{tp}", "layer": "gate_up", "op": GATE_UP, "n": n, "k": k, "m": m}
            yield case | {"leaves": 1}
    for name, (n, k, _) in shapes.ODD.items():
        for m in (1, 16, 100, 1000, 4096):
            yield {"group": "odd", "layer": name, "op": "chain", "n": n, "k": k, "m": m, "leaves": 1}


def _calls(case: dict[str, Any]) -> tuple[dict[str, Callable[[int], object]], int]:
    n, k, m, leaves, op = (case[x] for x in ("n", "k", "m", "leaves", "op"))
    rotate = timing.copies(2 * n * k)
    weights = [data.matrix(n, k, "normal", i, scale=0.02) for i in range(rotate)]
    x = data.matrix(m, k, "normal", 99)
    calls: dict[str, Callable[[int], object]]
    if op == "dX":
        dy = data.matrix(m, n, "normal", 98)
        calls = {
            "cublas": lambda i: torch.mm(dy, weights[i]),
            "strict": lambda i: _ops().grad_input(dy, weights[i], 1, 1, "gemm.column", torch.bfloat16),
        }
    elif op == "dW":
        dy = data.matrix(m, n, "normal", 98)
        calls = {
            "cublas": lambda i: torch.mm(dy.t(), x, out_dtype=torch.float32),
            "strict": lambda i: _ops().grad_weight(dy, x),
        }
    elif op == GATE_UP:
        from benches import peers

        calls = {
            "cublas, silu_and_mul": lambda i: peers.silu_and_mul(torch.mm(x, weights[i].t())),
            "strict unfused": lambda i: _ops().swiglu(_ops().matmul(x, weights[i], None, 1, torch.bfloat16)),
            "strict": lambda i: _ops().gate_up_swiglu(x, weights[i]),
        }
    else:
        calls = {
            "cublas": lambda i: torch.mm(x, weights[i].t()),
            "strict": lambda i: _ops().matmul(x, weights[i], None, leaves, torch.bfloat16),
        }
    return calls, rotate


def _ops() -> Any:
    from rl_gemm import ops

    return ops


def _plan(case: dict[str, Any], call: Callable[[int], object]) -> str:
    from rl_contract import launches, reset_launches

    reset_launches()
    call(0)
    return "; ".join(f"{r['kernel'].removeprefix('rl_gemm.')} {r['plan']}" for r in launches())


def _measure(budget: float, only: str | None = None, match: str = "") -> list[dict[str, Any]]:
    started, found = time.time(), []
    for case in cases():
        if not re.search(match, _name(case)):
            continue
        if time.time() - started > budget:
            print(f"gemm: budget reached after {len(found)} cases", flush=True)
            break
        calls, rotate = _calls(case)
        if only:
            calls = {name: call for name, call in calls.items() if name == only}
            if not calls:
                continue
        else:
            case = case | {"plan": _plan(case, calls["strict"])}
        large = case["m"] * case["n"] * case["k"] > 2e12
        times = timing.time_calls(calls, rotate=rotate, span_ms=1.0, rounds=5 if large else 9)
        found.append(case | {"times": times})
    return found


def run(budget: float) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows and targets."""
    measured = _measure(0.62 * budget)
    here = Path(__file__).resolve().parent.parent
    child = subprocess.run(
        [sys.executable, "-m", "benches.gemm", str(0.3 * budget)],
        cwd=here, env=os.environ | _BATCH_INVARIANT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    invariant = {}
    if child.returncode == 0:
        for case in json.loads(child.stdout.splitlines()[-1]):
            invariant[_key(case)] = case["times"]["cublas"]
    else:
        print("gemm: the batch-invariant peer failed:", child.stderr[-500:], flush=True)
    rows = _rows(measured, invariant)
    return rows, summary(rows)


def again(budget: float, match: str) -> list[dict[str, Any]]:
    """Rows of the matching cases, beside cuBLAS."""
    return _rows(_measure(budget, match=match), {})


def _rows(measured: list[dict[str, Any]], invariant: dict[str, float]) -> list[dict[str, Any]]:
    rows = []
    for case in measured:
        strict = case["times"]["strict"]
        head = {
            "case": _name(case),
            "shape": [case["m"], case["n"], case["k"]],
            "op": case["op"],
            "layer": case["layer"],
            "group": case["group"],
            "plan": case["plan"],
            "strict_us": round(strict, 2),
        }
        against = {peer: us for peer, us in case["times"].items() if peer != "strict"}
        for peer, us in (against | {"vllm batch-invariant": invariant.get(_key(case))}).items():
            if us is not None:
                rows.append(head | {"peer": peer, "peer_us": round(us, 2), "ratio": round(us / strict, 3)})
    return rows


def _name(case: dict[str, Any]) -> str:
    return f"{case['group']} {case['layer']} {case['op']} M={case['m']}"


def _key(case: dict[str, Any]) -> str:
    return f"{case['group']} {case['layer']} {case['op']} {case['m']}"


def _mean(values: list[float]) -> float | None:
    return round(math.exp(sum(map(math.log, values)) / len(values)), 3) if values else None


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Geometric means of the ratios over the five layers of Qwen3-8B on one rank, and the worst cells behind them."""
    library = [r for r in rows if r["peer"] == "cublas"]
    ours = [r for r in library if r["group"] == "qwen3-8b tp1"]

    def worst(op: str, keep: Callable[[dict[str, Any]], bool]) -> float | None:
        return min((r["ratio"] for r in library if r["op"] == op and keep(r)), default=None)

    def qwen8b(row: dict[str, Any]) -> bool:
        return bool(row["group"].startswith("qwen3-8b"))

    def mean(op: str, keep: Callable[[int], bool]) -> float | None:
        return _mean([r["ratio"] for r in ours if r["op"] == op and keep(r["shape"][0])])

    invariant = [
        r["ratio"]
        for r in rows
        if r["peer"] == "vllm batch-invariant"
        and (r["group"], r["op"]) == ("qwen3-8b tp1", "chain")
        and r["shape"][0] <= 32
    ]

    def fused(peer: str) -> float | None:
        return _mean([r["ratio"] for r in rows if r["op"] == GATE_UP and r["peer"] == peer and r["shape"][0] <= 64])

    return {
        "chain M>=64, geo-mean >= 0.99": mean("chain", lambda m: m >= 64),
        "chain M<=32, geo-mean >= 1.00": mean("chain", lambda m: m <= 32),
        "chain, five layers at TP1 and TP4, worst cell >= 0.90": worst("chain", qwen8b),
        "chain, the other sets, worst cell": worst("chain", lambda r: not qwen8b(r)),
        "tree(2), geo-mean >= 0.92": mean("tree(2)", lambda m: True),
        "tree(2), worst cell >= 0.92": worst("tree(2)", qwen8b),
        "tree(8) M>=2048, geo-mean >= 0.85": mean("tree(8)", lambda m: m >= 2048),
        "tree(8) M>=2048, worst cell >= 0.85": worst("tree(8)", lambda r: r["shape"][0] >= 2048),
        "tree(8) M<=64, geo-mean >= 0.95": mean("tree(8)", lambda m: m <= 64),
        "tree(8) M<=64, worst cell >= 0.95": worst("tree(8)", lambda r: r["shape"][0] <= 64),
        "dX, geo-mean >= 0.97": mean("dX", lambda m: True),
        "dX, worst cell >= 0.97": worst("dX", qwen8b),
        "dW, geo-mean >= 0.97": mean("dW", lambda m: True),
        "dW, worst cell >= 0.97": worst("dW", qwen8b),
        "gate_up+swiglu against strict unfused, M<=64": fused("strict unfused"),
        "gate_up+swiglu against cublas, silu_and_mul, M<=64 >= 1.00": fused("cublas, silu_and_mul"),
        "chain against vllm batch-invariant, M<=32": _mean(invariant),
    }


if __name__ == "__main__":
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = (False, False)
    torch.backends.cuda.preferred_blas_library("cublaslt")
    print(json.dumps(_measure(float(sys.argv[1]), only="cublas")))
