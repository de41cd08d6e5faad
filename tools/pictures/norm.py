"""Ratios of norms, rotations and gates: to a copy that moves as many bytes, and to vLLM's kernels, over rows."""

from typing import Any

from pictures import panels
from pictures.panels import Panel

PEERS = {"copy": "a copy that moves as many bytes", "vllm": "vLLM's kernels"}
LARGE = 64e6  # bytes from which the target of a copy's bandwidth holds


def picture(payload: dict[str, Any], path: str) -> None:
    panels.draw(panels_of(payload), path)


def panels_of(payload: dict[str, Any]) -> list[Panel]:
    rows, summary = panels.timed(payload), payload["summary"]
    found = []
    for peer in dict.fromkeys(row["peer"] for row in rows):
        mine = [row for row in rows if row["peer"] == peer]
        panel = Panel(f"against {PEERS.get(peer, peer)}", "rows (tokens)")
        for row in mine:
            panel.add(row["op"], row["shape"][0], row["ratio"])
        for op in dict.fromkeys(row["op"] for row in mine):
            start = f"{op}, of copy bandwidth" if peer == "copy" else f"{op} at 64 rows against vLLM"
            large = [r["shape"][0] for r in mine if r["op"] == op and (r["bytes"] >= LARGE or peer != "copy")]
            asked = panels.target(summary, start)
            if asked and large:
                span = (min(large), max(large)) if peer == "copy" else (64, 64)
                panel.targets.append((*span, asked))
        # the operations reach 64 MB at different rows; one line from where the first does
        if panel.targets:
            asked = panel.targets[0][2]
            if all(t[2] == asked for t in panel.targets):
                panel.targets = [(min(t[0] for t in panel.targets), max(t[1] for t in panel.targets), asked)]
        found.append(panel)
    return found
