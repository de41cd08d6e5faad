"""The head's log-probability beside the bare products, torch, Liger-Kernel and cut-cross-entropy.

"bare" is cuBLAS alone at its default: the head's forward product, and for forward + backward the three products
(logits, dX, dW) or four, with the logits computed twice as everything must that keeps none. "strict, logits kept" is
the strict call with ``keep_logits="auto"``, which keeps them all here. Peers run in the same process and
minutes, in turn. ``tp4`` is one rank's share of the vocabulary; its peers are not measured, since none of them shards.
"""

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from benches import data

HIDDEN = 4096
METHOD = "Medians of 3 or 5 eager calls between device events, variants in turn; hidden size 4096"
KEPT = "strict, logits kept"


def cases() -> Iterator[dict[str, Any]]:
    """What is measured, most wanted first."""
    qwen = 151936
    for tokens in (8192, 2048):
        for mode in ("forward", "forward+backward"):
            yield {"tokens": tokens, "vocab": qwen, "tp": 1, "mode": mode}
    for tokens, vocab, tp in (
        (256, qwen, 1), (512, qwen, 1), (8192, qwen, 4), (2048, qwen, 4), (8192, 32768, 1), (8192, 262144, 1),
        (16384, qwen, 1), (2048, 32768, 1), (2048, 262144, 1),
    ):  # fmt: skip
        for mode in ("forward", "forward+backward"):
            yield {"tokens": tokens, "vocab": vocab, "tp": tp, "mode": mode}


class _Alone:
    """Rank 0 of ``world_size``, with nobody to wait for: every rank is taken to have sent what this one did."""

    rank = 0

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def all_gather(self, x: torch.Tensor, *, dim: int = 0) -> torch.Tensor:
        return torch.cat([x] * self.world_size, dim)

    def all_reduce(self, partial: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        return partial if out_dtype is None else partial.to(out_dtype)


def _liger() -> Callable[..., Any]:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    # one number, as Liger is used: with a loss per token it cannot give a right gradient
    loss = LigerFusedLinearCrossEntropyLoss(reduction="sum")
    return lambda h, w, t: loss(w, h, t)


def _cut_cross_entropy() -> Callable[..., Any]:
    from cut_cross_entropy import linear_cross_entropy

    return lambda h, w, t: linear_cross_entropy(h, w, t, reduction="sum")


def _torch() -> Callable[..., Any]:
    def call(h: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        logp = torch.log_softmax(torch.mm(h, w.t()).float(), 1)
        return -logp.gather(1, t[:, None]).sum()

    return call


PEERS: dict[str, Callable[[], Callable[..., Any]]] = {
    "torch": _torch,
    "liger": _liger,
    "cut-cross-entropy": _cut_cross_entropy,
}


def _calls(case: dict[str, Any]) -> tuple[dict[str, Callable[[], object]], dict[str, str]]:
    import rl_logprob

    tokens, vocab, tp = case["tokens"], case["vocab"], case["tp"]
    backward = case["mode"] != "forward"
    padded = rl_logprob.padded_vocab_size(vocab)
    rows, real = padded // tp, min(vocab, padded // tp)
    weight = data.matrix(rows, HIDDEN, "normal", 1, scale=0.03)
    hidden = data.matrix(tokens, HIDDEN, "normal", 2)
    targets = torch.randint(0, real, (tokens,), device="cuda")
    bare_weight = weight[:real]
    if backward:
        weight.requires_grad_()
        hidden.requires_grad_()
        weight.main_grad = torch.zeros(weight.shape, dtype=torch.float32, device="cuda")
    comm = _Alone(tp) if tp > 1 else None

    def strict(room: int | str = 0) -> object:
        logp = rl_logprob.linear_logprob(
            hidden, weight, targets, vocab_size=vocab, comm=comm, leaves=tp, nonfinite="nan", keep_logits=room
        )
        if backward:
            hidden.grad = None
            logp.sum().backward()
        return logp

    def products(again: int) -> Callable[[], object]:
        h, w = hidden.detach(), bare_weight.detach()
        # a chunk of the vocabulary stands for all of it, so that the gradient of the logits needs no [T, V] here either
        chunk = 16384
        d = data.matrix(tokens, min(chunk, real), "normal", 3) if backward else None

        def call() -> object:
            for _ in range(again if backward else 1):
                out = torch.mm(h, w.t())
            if d is not None:
                for begin in range(0, real, chunk):
                    part = w[begin : begin + chunk]
                    out = torch.mm(d[:, : len(part)], part)
                    torch.mm(d[:, : len(part)].t(), h)
            return out

        return call

    calls = {"strict": strict, "bare": products(1)}
    if backward:
        calls["bare, logits twice"] = products(2)
    if backward and tokens >= 4096:
        calls[KEPT] = lambda: strict("auto")
    failed = {}
    if tp == 1:
        for name, make in PEERS.items():
            try:
                function = make()
            except Exception as error:
                failed[name] = f"{type(error).__name__}: {error}"[:200]
                continue
            own_weight = bare_weight.detach().clone().requires_grad_(backward)
            own_hidden = hidden.detach().clone().requires_grad_(backward)

            def peer(function: Any = function, h: Any = own_hidden, w: Any = own_weight) -> object:
                h.grad = w.grad = None
                loss = function(h, w, targets)
                if backward:
                    loss.backward()
                return loss

            calls[name] = peer
    return calls, failed


def _measure(
    calls: dict[str, Callable[[], object]], failed: dict[str, str], rounds: int
) -> dict[str, tuple[float, float]]:
    """name -> (microseconds, MiB at the peak beyond what stood before). Variants in turn; the median round counts."""
    memory, times, long = {}, {}, set()
    for name, call in list(calls.items()):
        try:
            call()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            started = time.perf_counter()
            call()
            torch.cuda.synchronize()
            if time.perf_counter() - started > 0.02:
                long.add(name)
            memory[name] = (torch.cuda.max_memory_allocated() - before) / 2**20
            times[name] = []
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"[:200]
            del calls[name]
        torch.cuda.empty_cache()
    for _ in range(rounds):
        for name, call in calls.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            # a short call also depends on what ran before it
            if name not in long:
                call()
            start.record()
            call()
            end.record()
            end.synchronize()
            times[name].append(1e3 * start.elapsed_time(end))
    return {name: (median(values), memory[name]) for name, values in times.items()}


def run(budget: float) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows and targets."""
    from rl_contract import launches, reset_launches

    started, rows = time.time(), []
    for case in cases():
        if time.time() - started > budget:
            print(f"logprob: budget reached before {case}", flush=True)
            break
        calls, failed = _calls(case)
        reset_launches()
        calls["strict"]()
        plans = {r["plan"] for r in launches() if r["boundary"] == "logprob" and ":" in r["plan"]}
        found = _measure(calls, failed, 3 if case["tokens"] > 8192 or case["vocab"] > 200_000 else 5)
        us, mib = found.pop("strict")
        head = {
            "case": f"{case['mode']} V={case['vocab']} TP{case['tp']} M={case['tokens']}",
            "shape": [case["tokens"], case["vocab"], HIDDEN],
            **case,
            "plan": "; ".join(sorted(plans)),
            "strict_us": round(us, 1),
            "strict_peak_mib": round(mib, 1),
        }
        for peer, (peer_us, peer_mib) in found.items():
            more = {"peer_us": round(peer_us, 1), "peer_peak_mib": round(peer_mib, 1), "ratio": round(peer_us / us, 3)}
            rows.append(head | {"peer": peer} | more)
        rows += [head | {"peer": name, "error": text} for name, text in failed.items()]
        print(
            {k: (round(v[0]), round(v[1])) for k, v in found.items()},
            head["case"],
            round(us),
            round(mib),
            failed,
            flush=True,
        )
        calls.clear()
        torch.cuda.empty_cache()
    return rows, summary(rows)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The targets: against the bare products, against every peer, and memory."""

    def ratio(mode: str, peer: str, tokens: int = 8192) -> float | None:
        wanted = (mode, peer, tokens, 151936, 1)
        return next(
            (r.get("ratio") for r in rows if (r["mode"], r["peer"], r["tokens"], r["vocab"], r["tp"]) == wanted), None
        )

    both = "forward+backward"

    def margin(mode: str, call: str | None = None) -> float | None:
        """Least time of a peer over that of the strict call, or of the strict call with its logits kept."""
        found = [p for p in (ratio(mode, peer) for peer in PEERS) if p is not None]
        own = 1.0 if call is None else ratio(mode, call)
        return round(min(found) / own, 3) if found and own else None

    kept = ratio(both, KEPT)
    three = ratio(both, "bare")
    return {
        "8192 tokens: forward against the bare product >= 0.85": ratio("forward", "bare"),
        "8192 tokens: forward + backward against three bare products >= 0.75": three,
        "the same against three products, logits kept": round(three / kept, 3) if three and kept else None,
        "the same, nothing kept, against four products (logits twice)": ratio(both, "bare, logits twice"),
        "8192 tokens: forward against the fastest peer > 1": margin("forward"),
        "8192 tokens: forward + backward against the fastest peer > 1": margin(both),
        "the same against the fastest peer, logits kept": margin(both, KEPT),
        "extra MiB at 8192 tokens, nothing kept <= 256": next(
            (r["strict_peak_mib"] for r in rows if r["tokens"] == 8192 and r["mode"] == both and r["tp"] == 1), None
        ),
        "extra MiB, most of all cases, nothing kept <= 256": max((r["strict_peak_mib"] for r in rows), default=None),
    }


def picture(rows: list[dict[str, Any]], path: str, tokens: int = 8192, vocab: int = 151936) -> None:
    """Bars of milliseconds, with the memory beyond inputs beside each, for one number of tokens."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 3.2))
    for axis, mode in zip(axes, ("forward", "forward+backward"), strict=True):
        found = [r for r in rows if (r["mode"], r["tokens"], r["vocab"], r["tp"]) == (mode, tokens, vocab, 1)]
        bars = [("strict", found[0]["strict_us"], found[0]["strict_peak_mib"])]
        bars += [(r["peer"], r["peer_us"], r["peer_peak_mib"]) for r in found if "peer_us" in r]
        bars.sort(key=lambda bar: bar[1], reverse=True)
        colours = ["tab:blue" if name.startswith("strict") else "tab:grey" for name, _, _ in bars]
        drawn = axis.barh([name for name, _, _ in bars], [us / 1e3 for _, us, _ in bars], color=colours)
        axis.bar_label(drawn, [f"{us / 1e3:.1f} ms, {mib:.0f} MiB" for _, us, mib in bars], fontsize=7, padding=2)
        axis.set_xlim(0, 1.35 * max(us for _, us, _ in bars) / 1e3)
        axis.set_title(f"{mode}, {tokens} tokens, {vocab} ids, hidden {HIDDEN}", fontsize=9)
        axis.tick_params(labelsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    import json
    import sys
    from pathlib import Path

    file = Path(sys.argv[1])
    picture(json.loads(file.read_text())["rows"], str(file.with_suffix(".png")))
