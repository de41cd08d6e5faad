"""The contract table of a profile as Markdown; the pages under docs/ are made from it."""

from rl_contract import Contract, Profile

COLUMNS = ("boundary", "dependency", "partition", "merge", "precision", "rounding", "primitives")


def cells(contract: Contract) -> list[str]:
    """One table row, plain text."""
    return [
        contract.boundary,
        contract.dependency,
        contract.partition,
        contract.merge,
        ", ".join(f"{k} {v}" for k, v in contract.precision.items()),
        "; ".join(contract.rounding) or "none",
        "; ".join(f"{k}: {v}" for k, v in contract.primitives.items()) or "none",
    ]


def markdown(profile: Profile) -> str:
    """Fingerprint, settings and one row per boundary."""
    lines = [
        f"Profile `{profile.name}`, fingerprint `{profile.fingerprint}`.",
        "",
        "Settings: " + ", ".join(f"`{k}={v}`" for k, v in profile.settings.to_dict().items()) + ".",
        "",
        "| " + " | ".join(COLUMNS) + " | fingerprint |",
        "|" + "---|" * (len(COLUMNS) + 1),
    ]
    for name in sorted(profile.contracts):
        contract = profile.contracts[name]
        row = [c.replace("|", "\\|") for c in cells(contract)]
        lines.append("| " + " | ".join(row) + f" | `{contract.fingerprint[:12]}` |")
    return "\n".join(lines) + "\n"
