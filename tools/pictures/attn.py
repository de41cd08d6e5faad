"""Attention's ratios: prefill, decode, forward + backward and chunks of the two families, over tokens or keys.

The family ``nosplit`` is a call of FlashAttention 3 with one split, so a comparison with "fa3 nosplit" is one of a call
with itself: the table says so, the picture leaves it out.
"""

from typing import Any

from pictures import panels
from pictures.panels import Panel

FAMILIES = {"segments": "segments (our kernels)", "nosplit": "nosplit (FlashAttention 3, one split)"}
FAR = "vllm triton"
PEERS = {
    "fa3": "FlashAttention 3",
    "fa3 nosplit": "FlashAttention 3, one split",
    "cudnn": "cuDNN",
    "vllm triton": "vLLM's Triton kernel",
    "flex": "FlexAttention",
    "one segment": "our kernel, one segment",
}
NOTES = {
    "fa3": "The rows of nosplit are calls of this same library: it here chooses the number of splits, nosplit has one.",
    "fa3 nosplit": "The rows of nosplit make the same library call as this peer: they show the spread of the timing, "
    "and what nosplit's checks cost.",
}


def picture(payload: dict[str, Any], path: str) -> None:
    panels.draw(panels_of(payload), path)


def same_call(row: dict[str, Any]) -> bool:
    return (row["family"], row["peer"]) == ("nosplit", "fa3 nosplit")


def panels_of(payload: dict[str, Any]) -> list[Panel]:
    rows = [row for row in panels.timed(payload) if not same_call(row)]
    summary = payload["summary"]
    found = []
    families = list(dict.fromkeys(row["family"] for row in rows))
    for op in ("prefill", "forward+backward"):
        found += [packed(rows, summary, family, op) for family in families]
    found.append(far(rows, families))
    found += [decode(rows, summary, family, peer) for family in families for peer in PEERS]
    found.append(chunks(rows, families))
    return found


def peer_name(family: str, peer: str) -> str:
    if (family, peer) == ("nosplit", "fa3"):
        return "the same library, splits as it chooses"
    return PEERS.get(peer, peer)


def packed(rows: list[dict[str, Any]], summary: dict[str, Any], family: str, op: str) -> Panel:
    panel = Panel(f"{op}: {FAMILIES.get(family, family)}", "tokens of one sequence")
    mine = [row for row in rows if (row["family"], row["op"]) == (family, op) and row["peer"] != FAR]
    for row in mine:
        panel.add(peer_name(family, row["peer"]), row["tokens"], row["ratio"])
    for peer in dict.fromkeys(row["peer"] for row in mine):
        told = "the same kernel with one segment" if peer == "one segment" else peer
        for start, begin in (
            (f"{family}: {op} from 4096 tokens against {told} ", 4096),
            (f"{family}: {op} against {told} ", 4096 if peer == "one segment" else 1),
        ):
            asked = panels.target(summary, start)
            sizes = [row["tokens"] for row in mine if row["peer"] == peer and row["tokens"] >= begin]
            if asked and sizes:
                panel.targets.append((min(sizes), max(sizes), asked))
    panel.targets = list(dict.fromkeys(panel.targets))
    return panel


def far(rows: list[dict[str, Any]], families: list[str]) -> Panel:
    """The peer that is several times slower, whose curves would flatten the others."""
    panel = Panel(f"prefill against {PEERS[FAR]}", "tokens of one sequence")
    for family in families:
        for row in rows:
            if (row["family"], row["op"], row["peer"]) == (family, "prefill", FAR):
                panel.add(FAMILIES.get(family, family), row["tokens"], row["ratio"])
    return panel


def decode(rows: list[dict[str, Any]], summary: dict[str, Any], family: str, peer: str) -> Panel:
    panel = Panel(f"decode: {family} against\n{peer_name(family, peer)}", "keys of each request")
    mine = [row for row in rows if (row["family"], row["op"], row["peer"]) == (family, "decode", peer)]
    for row in sorted(mine, key=lambda row: row["batch"]):
        panel.add(f"{row['batch']} request{'s'[: row['batch'] - 1]}", row["keys"], row["ratio"])
    alone = [row for row in mine if row["batch"] == 1 and row["keys"] >= 16384]
    for start, kept in (
        (f"{family}: decode batch 1 from 16k keys against {peer}", alone),
        (f"{family}: decode batch >= 16 against {peer}", [row for row in mine if row["batch"] >= 16]),
    ):
        asked = panels.target(summary, f"{start} ")
        if asked and kept:
            keys = [row["keys"] for row in kept]
            panel.targets.append((min(keys), max(keys), asked))
    return panel


def chunks(rows: list[dict[str, Any]], families: list[str]) -> Panel:
    mine = [row for row in rows if row["op"] == "chunk"]
    cases = {row["tokens"]: f"{row['tokens']:,} at {row['keys']:,} keys beside {row['mates']} decodes" for row in mine}
    title = "chunks of a prompt, tokens:\n" + ",\n".join(cases.values())
    panel = Panel(title, "tokens of the chunk", joined=False)
    for family in families:
        for row in mine:
            if row["family"] == family:
                panel.add(f"{family}, {peer_name(family, row['peer'])}", row["tokens"], row["ratio"])
    return panel
