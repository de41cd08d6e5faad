"""The head's log-probability beside the bare products, torch, Liger-Kernel and cut-cross-entropy.

    tools/bench logprob --json FILE [--budget SECONDS] [--only REGEX]

Cases come most wanted first, each kind among the first; the file is written anew after every case. 100 s hold them all
on a GPU and a host that do nothing else. ``host_us`` is what the host took until the call came back: a call whose
host_us is near its time waited for the host, not for the GPU, and ``spread``, the slowest over the fastest round, tells
a host or an allocator that interfered.

"bare" is cuBLAS alone at its default: the head's forward product, and for forward + backward the three products
(logits, dX, dW) or four, with the logits computed twice as everything must that keeps none. It writes bf16, for dW 2
bytes an element, and so do the peers; the strict call reads and writes the fp32 ``main_grad``, 8 bytes. "strict, logits
kept" is the strict call with ``keep_logits="auto"``, which keeps them all here. Peers run in the same process and
minutes, in turn. ``tp4`` is one rank's share of the vocabulary; its peers are not measured, since none of them shards.
"""

import argparse
import re
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from benches import data
from command_line import pattern

HIDDEN = 4096
METHOD = (
    "Medians of 5 eager calls between device events, variants in turn, the faster of 2 where a call takes over 100 ms; "
    "hidden size 4096; MiB beyond inputs at the peak. Strict adds dW to an fp32 main_grad, the others write it in bf16"
)
SLOW_SECONDS = 0.1
KEPT = "strict, logits kept"


def cases() -> Iterator[dict[str, Any]]:
    """What is measured, most wanted first."""
    qwen, both = 151936, ("forward", "forward+backward")
    for tokens, vocab, tp, modes in (
        (8192, qwen, 1, both), (256, qwen, 1, both), (2048, qwen, 1, both), (8192, qwen, 4, both),
        (8192, 32768, 1, both), (8192, 262144, 1, both), (16384, qwen, 1, both), (512, qwen, 1, both),
        (64, qwen, 1, both), (1024, qwen, 1, both[1:]), (2048, qwen, 4, both), (2048, 32768, 1, both),
        (2048, 262144, 1, both),
    ):  # fmt: skip
        for mode in modes:
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
        weight.main_grad = torch.zeros(weight.shape, dtype=torch.float32, device="cuda")  # type: ignore[attr-defined]
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


def _timed(call: Callable[[], object]) -> tuple[float, float]:
    """Microseconds on the device, and on the host until the call came back."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    began = time.perf_counter()
    call()
    host = time.perf_counter() - began
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end), 1e6 * host


def _measure(calls: dict[str, Callable[[], object]], failed: dict[str, str]) -> dict[str, dict[str, float]]:
    """name -> us, host_us, spread, and peak_mib beyond what stood before. Variants in turn."""
    memory, rounds = {}, {}
    for name, call in list(calls.items()):
        try:
            call()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            call()
            torch.cuda.synchronize()
            seconds = time.perf_counter() - began
            memory[name] = (torch.cuda.max_memory_allocated() - before) / 2**20
            # the first round also fills the allocator's pool again, in the order of the rounds, and does not count
            rounds[name] = 3 if seconds > SLOW_SECONDS else 6
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"[:200]
            del calls[name]
        torch.cuda.empty_cache()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for round_ in range(max(rounds.values(), default=0)):
        for name, call in calls.items():
            if round_ >= rounds[name]:
                continue
            # a short call also depends on what ran before it
            if times[name] and times[name][-1][0] < 2e4:
                call()
            times[name].append(_timed(call))
    found = {}
    for name, values in times.items():
        device, host = zip(*values[1:], strict=True)
        us = min(device) if len(device) < 3 else median(device)
        spread = max(device) / min(device)
        found[name] = {"us": us, "host_us": median(host), "spread": spread, "peak_mib": memory[name]}
    return found


def options(rest: list[str]) -> dict[str, Any]:
    """This bench's own part of the command line."""
    parser = argparse.ArgumentParser(prog="tools/bench logprob")
    parser.add_argument("--only", type=pattern, default="", help="regular expression on case names")
    found = parser.parse_args(rest)
    names = [_name(case) for case in cases()]
    if not any(re.search(found.only, name) for name in names):
        parser.error(f"--only: no case matches {found.only!r}; one is {names[0]!r}")
    return vars(found)


Keep = Callable[[list[dict[str, Any]], dict[str, Any]], None]


def _name(case: dict[str, Any]) -> str:
    return f"{case['mode']} V={case['vocab']} TP{case['tp']} M={case['tokens']}"


def _rows(case: dict[str, Any], plan: str, found: dict[str, dict[str, float]]) -> Iterator[dict[str, Any]]:
    """One row a peer, the strict call's numbers in each."""
    digits = {"us": 1, "host_us": 0, "spread": 2, "peak_mib": 1}

    def named(prefix: str, numbers: dict[str, float]) -> dict[str, float]:
        return {f"{prefix}_{key}": round(value, digits[key]) for key, value in numbers.items()}

    strict = found.pop("strict")
    head = {"case": _name(case), "shape": [case["tokens"], case["vocab"], HIDDEN], **case, "plan": plan}
    for peer, numbers in found.items():
        ratio = round(numbers["us"] / strict["us"], 3)
        yield head | named("strict", strict) | {"peer": peer} | named("peer", numbers) | {"ratio": ratio}


def run(budget: float, only: str = "", keep: Keep | None = None) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows and targets. ``budget``: seconds; ``keep`` is given rows and targets after each case."""
    from rl_contract import launches, reset_launches

    started, rows = time.monotonic(), []
    for case in cases():
        if not re.search(only, _name(case)):
            continue
        if time.monotonic() - started > budget:
            print(f"logprob: budget reached before {_name(case)}", flush=True)
            break
        began = time.monotonic()
        calls, failed = _calls(case)
        reset_launches()
        calls["strict"]()
        plans = {r["plan"] for r in launches() if r["boundary"] == "logprob" and ":" in r["plan"]}
        found = _measure(calls, failed)
        if "strict" not in found:
            raise RuntimeError(f"the strict call failed at {_name(case)}: {failed['strict']}")
        line = {
            name: f"{v['us']:.0f} us (host {v['host_us']:.0f}), {v['peak_mib']:.0f} MiB" for name, v in found.items()
        }
        new = list(_rows(case, "; ".join(sorted(plans)), found))
        rows += new + [{"case": _name(case), **case, "peer": name, "error": text} for name, text in failed.items()]
        print(_name(case), line, failed or "", f"{time.monotonic() - began:.1f} s", flush=True)
        if keep is not None:
            keep(rows, summary(rows))
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
            (
                r["strict_peak_mib"]
                for r in rows
                if (r["tokens"], r["vocab"], r["tp"], r["mode"]) == (8192, 151936, 1, both) and "strict_peak_mib" in r
            ),
            None,
        ),
        "extra MiB, most of all cases, nothing kept <= 256": max(
            (r["strict_peak_mib"] for r in rows if "strict_peak_mib" in r), default=None
        ),
    }
