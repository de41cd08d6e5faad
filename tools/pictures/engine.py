"""Ratios of tokens a second of strict vLLM to each other engine, over the number of requests at once."""

from typing import Any

from pictures import panels
from pictures.panels import Panel

NAMES = {
    "native": "vLLM at its best",
    "batch-invariant": "batch-invariant vLLM",
    "batch-invariant-eager": "batch-invariant vLLM, eager",
}


def picture(payload: dict[str, Any], path: str) -> None:
    panels.draw(panels_of(payload), path)


def panels_of(payload: dict[str, Any]) -> list[Panel]:
    """One of decode and one of prefill for each peer; a curve each prompt length and number of layers."""
    rows, summary = panels.timed(payload), payload["summary"]
    found = []
    for peer in dict.fromkeys(row["peer"] for row in rows):
        for phase in ("decode", "prefill"):
            panel = Panel(
                f"{phase}: strict vLLM against {NAMES.get(peer, peer)}", "requests at once",
                ylabel="strict tokens/s / peer's tokens/s",
            )  # fmt: skip
            for row in rows:
                batch, prompt, layers = row["shape"]
                if (row["peer"], row["op"]) == (peer, phase):
                    panel.add(f"{layers} layers, {prompt:,} prompt tokens", batch, row["ratio"])
            batches = {row["shape"][0] for row in rows if (row["peer"], row["op"]) == (peer, phase)}
            for batch in sorted(batches):
                if asked := target_of(summary, peer, phase, batch):
                    panel.targets.append((batch, batch, asked))
            found.append(panel)
    return found


def target_of(summary: dict[str, Any], peer: str, phase: str, batch: int) -> float | None:
    if phase == "prefill":
        return panels.target(summary, f"prefill of {peer},")
    # of a peer by name, as the bench says it
    told = (f"decode of {peer} at batch {batch},", f"decode of {peer} vLLM at batch {batch},")
    return next((asked for start in told if (asked := panels.target(summary, start))), None)
