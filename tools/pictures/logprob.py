"""Milliseconds and memory of the head's log-probabilities, for one number of tokens: all peers, fastest first."""

from typing import Any

from pictures import panels

TOKENS, VOCAB = 8192, 151936
PEERS = {
    "strict": "strict, nothing kept",
    "torch": "PyTorch, log_softmax",
    "liger": "Liger-Kernel",
    "cut-cross-entropy": "cut-cross-entropy",
}
# targets are against the products alone
MODES = {
    "forward": ("8192 tokens: forward against the bare product", "cuBLAS, the product alone"),
    "forward+backward": (
        "8192 tokens: forward + backward against three bare products", "cuBLAS, three products alone",
    ),
}  # fmt: skip


def picture(payload: dict[str, Any], path: str) -> None:
    rows = payload["rows"]
    modes = [mode for mode in MODES if of(rows, mode)]
    if not modes:
        raise ValueError(f"no row of {TOKENS} tokens and {VOCAB} ids on one rank, which the picture shows")
    made, axes = panels.figure(len(modes), columns=1, height=3.6)
    for axis, mode in zip(axes, modes):
        start, alone = MODES[mode]
        found = of(rows, mode)
        words = PEERS | {"bare": alone, "bare, logits twice": "cuBLAS, four products (logits twice)"}
        bars = [("strict", found[0]["strict_us"], found[0]["strict_peak_mib"])]
        bars += [(row["peer"], row["peer_us"], row["peer_peak_mib"]) for row in found]
        bars.sort(key=lambda bar: bar[1])
        colours = ["tab:blue" if name.startswith("strict") else "#a0a0a0" for name, _, _ in bars]
        names = [f"{words.get(name, name)}\n{us / 1e3:.1f} ms, {mib:,.0f} MiB" for name, us, mib in bars]
        axis.barh(names, [us / 1e3 for _, us, _ in bars], color=colours, height=0.7)
        bare, asked = [us for name, us, _ in bars if name == "bare"], panels.target(payload["summary"], start)
        if bare and asked:
            most, place = bare[0] / 1e3 / asked, [name for name, _, _ in bars].index("strict")
            label = f"most that the target ({alone} / {asked:g}) lets strict take"
            axis.plot([most] * 2, [place - 0.48, place + 0.48], "--", color="crimson", linewidth=2, label=label)
            axis.legend(fontsize=panels.TEXT, loc="upper center", bbox_to_anchor=(0.4, -0.2), frameon=False)
        panels.style(
            axis,
            f"{mode}: {TOKENS:,} tokens, {VOCAB:,} ids, hidden size 4,096; MiB beyond inputs",
            "milliseconds on the GPU",
        )
        axis.invert_yaxis()
    panels.save(made, path)


def of(rows: list[dict[str, Any]], mode: str) -> list[dict[str, Any]]:
    wanted = (mode, TOKENS, VOCAB, 1)
    return [r for r in rows if "peer_us" in r and (r["mode"], r["tokens"], r["vocab"], r["tp"]) == wanted]
