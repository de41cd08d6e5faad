"""Ratios of the products, a panel for each model, kind of product and peer, over rows; targets are those of a cell."""

from typing import Any

from pictures import panels
from pictures.panels import Panel

PEERS = {"cublas": "cuBLAS", "vllm batch-invariant": "batch-invariant vLLM", "strict unfused": "two strict launches",
         "cublas, silu_and_mul": "cuBLAS, then silu_and_mul"}  # fmt: skip


def picture(payload: dict[str, Any], path: str) -> None:
    panels.draw(panels_of(payload), path)


def kind(op: str) -> str:
    if op in ("dX", "dW"):
        return "gradients"
    return "trees" if op.startswith("tree") else op


def panels_of(payload: dict[str, Any]) -> list[Panel]:
    rows, summary = panels.timed(payload), payload["summary"]
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        what = kind(row["op"])
        title = what if what == "gate_up+swiglu" else f"{row['group']}, {what}"
        groups.setdefault((title, row["peer"]), []).append(row)
    found = []
    for (title, peer), mine in sorted(groups.items(), key=lambda item: order(rows, item[1][0])):
        panel = Panel(f"{title}\nagainst {PEERS.get(peer, peer)}", "rows (tokens)")
        for row in mine:
            panel.add(label(row), row["shape"][0], row["ratio"])
        if peer.startswith("cublas"):
            panel.targets = targets(summary, mine)
        found.append(panel)
    return found


def order(rows: list[dict[str, Any]], row: dict[str, Any]) -> tuple[Any, ...]:
    """Groups as the bench has them, and within one the peers."""
    groups = list(dict.fromkeys((r["group"], kind(r["op"])) for r in rows if kind(r["op"]) != "gate_up+swiglu"))
    what = kind(row["op"])
    place = len(groups) if what == "gate_up+swiglu" else groups.index((row["group"], what))
    return place, list(dict.fromkeys(r["peer"] for r in rows)).index(row["peer"])


def label(row: dict[str, Any]) -> str:
    what = kind(row["op"])
    if what == "gate_up+swiglu":
        return str(row["group"])
    return row["layer"] if what == "chain" else f"{row['layer']} {row['op']}"


def targets(summary: dict[str, Any], mine: list[dict[str, Any]]) -> list[tuple[float, float, float]]:
    """Of the cells that the summary's worst cell looks at."""
    asked = [
        ("chain", "chain, five layers at TP1 and TP4, worst cell", 1, 1 << 40),
        ("tree(2)", "tree(2), worst cell", 1, 1 << 40),
        ("tree(8)", "tree(8) M>=2048, worst cell", 2048, 1 << 40),
        ("tree(8)", "tree(8) M<=64, worst cell", 1, 64),
        ("dX", "dX, worst cell", 1, 1 << 40),
        ("dW", "dW, worst cell", 1, 1 << 40),
        ("gate_up+swiglu", "gate_up+swiglu against cublas, silu_and_mul, M<=64", 1, 64),
    ]
    found = []
    for op, start, low, high in asked:
        own = op == "gate_up+swiglu"
        sizes = [
            row["shape"][0]
            for row in mine
            if row["op"] == op and low <= row["shape"][0] <= high and (own or row["group"].startswith("qwen3-8b"))
        ]
        value = panels.target(summary, start)
        if sizes and value:
            found.append((min(sizes), max(sizes), value))
    return list(dict.fromkeys(found))
