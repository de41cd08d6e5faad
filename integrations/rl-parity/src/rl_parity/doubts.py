"""What a run could not record, and what nothing in it bears out, as sentences: for its page, stderr, a comparison."""

from collections.abc import Mapping
from typing import Any


def lines(found: Mapping[str, Any]) -> list[str]:
    """Of what ``rl_parity.verify.whole`` returns; [] where everything is borne out."""
    out = [f"{text[0].upper()}{text[1:]}." for text in found["failed"].values()]
    if missing := [f"{len(steps)} step(s) of the {arm} arm" for arm, steps in found["unproven"].items()]:
        out.append(
            f"Unproven: {' and '.join(missing)}. The ledger has no digests of their records and samples, as in old "
            "runs: loss and gradients are shown as steps.jsonl has them, and nothing else in the run bears them out."
        )
    if found["unbound"]:
        out.append(
            "Unproven: evidence, pushes and the ends of the files. The manifest has no digests of them, as in old runs "
            "and in those that have not ended."
        )
    out += [
        f"Unproven: what {one.count} of the {arm} arm's {one.of} workers and engines launched"
        f"{'' if one.sitting is None else f' in sitting {one.sitting + 1}'}, which did not say it: "
        f"{'; '.join(one.why)}."
        for arm, silences in found["silent"].items()
        for one in silences
    ]
    out += [
        f"Unproven: what the {arm} arm launched in sitting {which}: no evidence of it is there, as of one that was "
        "killed."
        for arm, which in found["unheard"].items()
    ]
    return out
