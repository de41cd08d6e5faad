"""Attention: the strict kernels beside FlashAttention 3 and the Triton backend (vLLM's), cuDNN and FlexAttention.

32 query and 8 kv heads of 128, bf16, causal. Decode and chunks read a paged cache of page size 16 in shuffled order.
"fa3" is the library with its own split heuristic, "fa3 nosplit" the same with one split, which is what the family
``nosplit`` serves. "one segment" is the strict kernel itself with a segment longer than any row: what the order of
segments costs. A ratio is peer time over strict time. GB/s count the keys and values once. What is not installed is
left out.
"""

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from benches import timing

from rl_contract.profile import KEY_TILE, SEGMENT

METHOD = (
    "Medians over graph replays; inputs are not rotated, so keys and values that fit in the L2 are read from it, by "
    "every peer alike"
)
HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
SCALE = DIM**-0.5
TILES = {"key_tile": KEY_TILE, "segment": SEGMENT}
PEERS = ("fa3", "fa3 nosplit", "cudnn", "vllm triton", "flex", "one segment")
FLEX_TOKENS = 8192
LIBRARY = Path("/tmp/_vllm_fa3_C.abi3.so")  # where the bench machine has the library without its wheel
DECODE = (
    (1, 131072), (1, 65536), (1, 16384), (64, 8192), (16, 8192), (256, 4096), (1, 4096), (4, 65536), (16, 32768),
    (64, 32768), (128, 8192), (4, 16384), (64, 1024), (256, 1024), (16, 1024), (1, 1024),
)  # fmt: skip


def cases() -> Iterator[dict[str, Any]]:
    """What is measured, most wanted first: the cells that targets are about, then what completes the table."""
    yield {"op": "prefill", "tokens": 8192}
    for batch, keys in DECODE[:6]:
        yield {"op": "decode", "batch": batch, "keys": keys}
    for tokens in (2048, 8192):
        yield {"op": "forward+backward", "tokens": tokens}
    yield {"op": "chunk", "tokens": 2048, "keys": 8192, "mates": 64, "mate_keys": 4096}
    for tokens in (4096, 16384):
        yield {"op": "prefill", "tokens": tokens}
    yield {"op": "memory", "tokens": FLEX_TOKENS}
    # compiled anew for every shape, so for one alone
    for op in ("prefill", "forward+backward"):
        yield {"op": op, "tokens": FLEX_TOKENS, "beside": "flex"}
    for tokens in (4096, 16384):
        yield {"op": "forward+backward", "tokens": tokens}
    for batch, keys in DECODE[6:]:
        yield {"op": "decode", "batch": batch, "keys": keys}
    yield {"op": "chunk", "tokens": 512, "keys": 32768, "mates": 0, "mate_keys": 0}
    for tokens in (2048, 32768, 1024):
        yield {"op": "prefill", "tokens": tokens}


def _library() -> Callable[..., Any] | None:
    from rl_attn import nosplit
    from rl_contract import MissingSupport

    if LIBRARY.is_file():
        nosplit.use_file(LIBRARY)
    try:
        return nosplit._load("sm90")
    except MissingSupport as error:
        print(f"attn: no FlashAttention 3 beside it: {error}", flush=True)
        return None


def _triton_backend() -> Callable[..., Any] | None:
    """What vLLM's Triton backend launches, with the settings that backend gives it."""
    try:
        from vllm.v1.attention.ops.triton_unified_attention import unified_attention
    except ImportError as error:
        print(f"attn: no Triton backend of vLLM beside it: {error}", flush=True)
        return None
    most, parts = 128 // KV_HEADS, 16
    segments = {
        "seq_threshold_3D": most,
        "num_par_softmax_segments": parts,
        "softmax_segm_output": torch.empty(most, HEADS, parts, DIM, device="cuda"),
        "softmax_segm_max": torch.empty(most, HEADS, parts, device="cuda"),
        "softmax_segm_expsum": torch.empty(most, HEADS, parts, device="cuda"),
    }

    def call(q: Any, k: Any, v: Any, out: Any, starts: Any, rows: int, used: Any, keys: int, table: Any) -> Any:
        return unified_attention(
            q, k, v, out, starts, rows, used, keys, SCALE, True, (-1, -1), table, 0.0, None, None, None, **segments
        )  # fmt: skip

    return call


def _flex(tokens: int) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, tokens, tokens, device="cuda")
    compiled = torch.compile(flex_attention)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask, scale=SCALE, enable_gqa=True)


def _fa3(
    fwd: Callable[..., Any], q: Any, k: Any, v: Any, starts: Any, rows: int, keys: int, splits: int, out: Any,
    key_starts: Any = None, used: Any = None, table: Any = None,
) -> Any:  # fmt: skip
    return fwd(
        q, k, v, None, None, None, out, starts, key_starts, None, None, used, rows, keys, table, None, None, None, None,
        None, None, None, None, SCALE, True, -1, -1, 0.0, True, None, splits, None, 0, None, 1, 0, None,
    )  # fmt: skip


def _randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def _packed_calls(case: dict[str, Any], peers: dict[str, Any]) -> dict[str, Callable[[int], object]]:
    from rl_attn import gpu, gpu_backward, nosplit
    from rl_attn.ops_backward import positions_of_all_keys

    tokens, backward = case["tokens"], case["op"] != "prefill"
    q, k, v = _randn(tokens, HEADS, DIM), _randn(tokens, KV_HEADS, DIM), _randn(tokens, KV_HEADS, DIM)
    cu = torch.tensor([0, tokens], device="cuda")
    cu32, at = cu.int(), positions_of_all_keys(cu, tokens)
    grad, out = _randn(tokens, HEADS, DIM), torch.empty_like(q)
    q4, k4, v4 = (x.transpose(0, 1)[None].detach().requires_grad_(backward) for x in (q, k, v))
    grad4 = grad.transpose(0, 1)[None]

    def strict(_: int, segment: int = TILES["segment"]) -> object:
        o, lse = gpu.packed(q, k, v, cu, cu, at, SCALE, TILES["key_tile"], segment)
        if not backward:
            return o
        delta = gpu_backward.row_delta(grad, o)
        return (
            gpu_backward.grad_queries(grad, q, k, v, lse, delta, cu, cu, at, SCALE),
            gpu_backward.grad_keys(grad, q, k, v, lse, delta, cu, cu, at, at, SCALE),
        )

    def cudnn(_: int) -> object:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
            o = F.scaled_dot_product_attention(q4, k4, v4, is_causal=True, enable_gqa=True)
        return torch.autograd.grad(o, (q4, k4, v4), grad4) if backward else o

    if case.get("beside") == "flex":
        flex = _flex(tokens)

        def flexible(_: int) -> object:
            o = flex(q4, k4, v4)
            return torch.autograd.grad(o, (q4, k4, v4), grad4) if backward else o

        return {"strict": strict, "flex": flexible}
    calls: dict[str, Callable[[int], object]] = {"strict": strict, "cudnn": cudnn}
    if not backward:
        calls["one segment"] = lambda i: strict(i, 1 << 20)
        if fa3 := peers["fa3"]:
            calls["fa3"] = lambda _: _fa3(fa3, q, k, v, cu32, tokens, tokens, 0, out, key_starts=cu32)
            calls["strict nosplit"] = lambda _: nosplit.packed(q, k, v, cu32, cu32, at, SCALE)
        if triton_backend := peers["triton"]:
            pages = _cache([tokens])
            calls["vllm triton"] = lambda _: triton_backend(
                q, *pages[:2], out, cu32, tokens, pages[3], tokens, pages[2]
            )
    return calls


def _cache(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    pages = [-(-n // PAGE) for n in lengths]
    blocks = sum(pages)
    cache = torch.empty(2, blocks, PAGE, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16).normal_()
    ids = torch.randperm(blocks, device="cuda").int()
    table = torch.zeros(len(lengths), max(pages), dtype=torch.int32, device="cuda")
    taken = 0
    for n, count in enumerate(pages):
        table[n, :count] = ids[taken : taken + count]
        taken += count
    return cache[0], cache[1], table, torch.tensor(lengths, dtype=torch.int32, device="cuda")


def _paged_calls(rows: list[int], lengths: list[int], peers: dict[str, Any]) -> dict[str, Callable[[int], object]]:
    """``rows`` queries of each request, whose keys number ``lengths``."""
    from rl_attn import PagedKV, gpu, nosplit

    k, v, table, used = _cache(lengths)
    starts = torch.tensor([0, *rows], device="cuda").cumsum(0).int()
    q = _randn(sum(rows), HEADS, DIM)
    out = torch.empty_like(q)
    ours = k.permute(0, 2, 1, 3), v.permute(0, 2, 1, 3)
    calls: dict[str, Callable[[int], object]] = {
        # the bound on rows that an engine knows
        "strict": lambda _: gpu.paged(q, *ours, starts, used, table, SCALE, *TILES.values(), most_rows=max(rows))
    }
    most = max(lengths)
    if fa3 := peers["fa3"]:
        for name, splits in (("fa3", 0), ("fa3 nosplit", 1)):
            calls[name] = lambda _, s=splits: _fa3(
                fa3, q, k, v, starts, max(rows), most, s, out, used=used, table=table
            )
        calls["strict nosplit"] = lambda _: nosplit.paged(q, PagedKV(*ours), starts, used, table, SCALE, max(rows))
    if triton_backend := peers["triton"]:
        calls["vllm triton"] = lambda _: triton_backend(q, k, v, out, starts, max(rows), used, most, table)
    return calls


def _calls(case: dict[str, Any], peers: dict[str, Any]) -> dict[str, Callable[[int], object]]:
    op = case["op"]
    if op == "decode":
        return _paged_calls([1] * case["batch"], [case["keys"]] * case["batch"], peers)
    if op == "chunk":
        mates = case["mates"]
        return _paged_calls([case["tokens"]] + [1] * mates, [case["keys"]] + [case["mate_keys"]] * mates, peers)
    return _packed_calls(case, peers)


def _that_run(calls: dict[str, Callable[[int], object]]) -> dict[str, Callable[[int], object]]:
    """A peer that fails on this machine is named and left out."""
    found = {}
    for name, call in calls.items():
        try:
            call(0)
            torch.cuda.synchronize()
            found[name] = call
        except Exception as error:
            if name.startswith("strict"):
                raise
            print(f"attn: {name} left out: {repr(error)[:200]}", flush=True)
    return found


def _memory(tokens: int) -> dict[str, Any]:
    """Memory that the backward takes at most beyond what the forward keeps, in units of q + k + v."""
    from rl_attn import attention_packed

    q, k, v = (_randn(tokens, h, DIM).requires_grad_() for h in (HEADS, KV_HEADS, KV_HEADS))
    cu, grad = torch.tensor([0, tokens], device="cuda"), _randn(tokens, HEADS, DIM)
    out = attention_packed(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, scale=SCALE, **TILES)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(out, (q, k, v), grad)
    most = (torch.cuda.max_memory_allocated() - before) / (2 * (q.numel() + k.numel() + v.numel()))
    case = {"op": "memory", "tokens": tokens, "case": f"segments: memory of the backward M={tokens}"}
    return case | {"shape": [tokens], "family": "segments", "peer": "q + k + v", "memory": round(most, 3)}


def _work(case: dict[str, Any], us: float) -> dict[str, float]:
    """TFLOP/s of the causal products, or GB/s of the keys and values."""
    if case["op"] in ("prefill", "forward+backward"):
        flops = 2.0 * case["tokens"] ** 2 * HEADS * DIM
        return {"tflops": round((3.5 if case["op"] != "prefill" else 1) * flops / us / 1e6, 1)}
    keys = case["batch"] * case["keys"] if case["op"] == "decode" else case["keys"] + case["mates"] * case["mate_keys"]
    return {"gb_per_s": round(4.0 * keys * KV_HEADS * DIM / us / 1e3, 1)}


def _name(case: dict[str, Any]) -> str:
    """M is the axis of the picture: tokens, or keys of a decode."""
    if case["op"] == "decode":
        return f"decode batch {case['batch']} M={case['keys']}"
    if case["op"] == "chunk":
        return f"chunk at {case['keys']} keys, {case['mates']} decodes of {case['mate_keys']} M={case['tokens']}"
    return f"{case['op']} M={case['tokens']}"


def measure(budget: float, match: str = "") -> Iterator[list[dict[str, Any]]]:
    """Rows of one case after the other, of those whose name matches, until ``budget`` seconds have passed."""
    began, wanted = time.monotonic(), [case for case in cases() if re.search(match, _name(case))]
    peers = {"fa3": _library(), "triton": _triton_backend()}
    for case in wanted:
        if time.monotonic() - began > budget:
            print("attn: out of time before", _name(case), flush=True)
            return
        try:
            yield [_memory(case["tokens"])] if case["op"] == "memory" else _rows(case, peers)
        except (RuntimeError, torch.OutOfMemoryError) as error:
            print("attn:", _name(case), repr(error)[:200], flush=True)
        finally:
            torch.cuda.empty_cache()


def again(budget: float, match: str) -> list[dict[str, Any]]:
    """Rows of the matching cases."""
    return [row for rows in measure(budget, match) for row in rows]


def _rows(case: dict[str, Any], peers: dict[str, Any]) -> list[dict[str, Any]]:
    from rl_contract import launches, reset_launches

    calls = _calls(case, peers)
    reset_launches()
    calls["strict"](0)
    plan = ", ".join(f"{x['kernel']} {x['plan']}" for x in launches())
    times = timing.time_calls(_that_run(calls), span_ms=2.0, rounds=5)
    print(_name(case), {k: round(v, 1) for k, v in times.items()}, flush=True)
    rows = []
    for family, ours in (("segments", "strict"), ("nosplit", "strict nosplit")):
        for peer in PEERS:
            alone = family == "nosplit" and peer == "one segment"
            if ours in times and peer in times and not alone:
                head = case | {
                    "case": f"{family}: {_name(case)}",
                    "shape": [case["keys"] if case["op"] == "decode" else case["tokens"]],
                    "family": family,
                    "plan": plan if family == "segments" else "",
                    "strict_us": round(times[ours], 2),
                    "peer": peer,
                    "peer_us": round(times[peer], 2),
                }
                rows.append(head | {"ratio": round(times[peer] / times[ours], 3), **_work(case, times[ours])})
    return rows


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The worst cell of each target."""

    def worst(family: str, op: str, peer: str, keep: Callable[[dict[str, Any]], bool] = lambda r: True) -> Any:
        cells = [r["ratio"] for r in rows if (r["family"], r["op"], r["peer"]) == (family, op, peer) and keep(r)]
        return min(cells, default=None)

    decodes = [r for r in rows if r["op"] == "decode" and r["family"] == "segments"]
    large = [r["gb_per_s"] for r in decodes if 4 * r["batch"] * r["keys"] * KV_HEADS * DIM >= 256e6]
    return {
        "segments: prefill from 4096 tokens against fa3 >= 0.75": worst(
            "segments", "prefill", "fa3", lambda r: r["tokens"] >= 4096
        ),
        "segments: prefill from 4096 tokens against cudnn >= 0.75": worst(
            "segments", "prefill", "cudnn", lambda r: r["tokens"] >= 4096
        ),
        "segments: prefill against the same kernel with one segment >= 0.97": worst(
            "segments", "prefill", "one segment", lambda r: r["tokens"] >= 4096
        ),
        "segments: decode reading 256 MB and more, GB/s >= 3400": min(large, default=None),
        "segments: decode batch 1 from 16k keys against fa3 >= 1.0": worst(
            "segments", "decode", "fa3", lambda r: r["batch"] == 1 and r["keys"] >= 16384
        ),
        "segments: forward+backward against cudnn >= 0.65": worst("segments", "forward+backward", "cudnn"),
        "segments: memory of the backward, in units of q + k + v <= 2": next(
            (r["memory"] for r in rows if r["op"] == "memory"), None
        ),
        "nosplit: prefill against fa3 >= 0.97": worst("nosplit", "prefill", "fa3"),
        "nosplit: decode batch >= 16 against fa3 >= 0.97": worst(
            "nosplit", "decode", "fa3", lambda r: r["batch"] >= 16
        ),
    }
