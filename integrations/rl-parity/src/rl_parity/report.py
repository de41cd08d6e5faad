"""``report.html``: one self-contained page about a run, the verdict first. Reads the run directory and nothing else."""

import sys
from collections.abc import Callable, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from rl_contract import ContractError, Profile
from rl_parity import contracts, doubts, landed, report_run, sittings, verify
from rl_parity.manifest import INPUTS
from rl_parity.rundir import MANIFEST, REPORT, SUMMARY, RunDirectory, ends_run, is_equal, write_text
from rl_parity.svg import Series, bars, lines, number

_ROWS: tuple[tuple[str, str, bool], ...] = (
    ("valid_count", "valid tokens compared", False),
    ("mismatch_count", "log-probabilities that differ (rollout against train)", True),
    ("forward_mismatch_count", "log-probabilities that differ (scoring against training forward)", True),
    ("nonfinite_count", "nonfinite values", True),
    ("absent_count", "absent values", True),
    ("token_id_mismatch_count", "token ids that differ", True),
    ("weight_version_mismatch_count", "tokens made by other weights", True),
    ("max_abs_diff", "largest difference, nats", True),
    ("mean_abs_diff", "mean difference over tokens, nats", True),
    ("kl_rollout_to_train", "KL rollout to train, mean of -(train - rollout)", False),
    ("k3", "KL estimate k3, mean of exp(d) - d - 1", False),
    ("reward_first", "mean reward, first tenth of the steps", False),
    ("reward_last", "mean reward, last tenth of the steps", False),
    ("steps", "steps", False),
    ("seconds", "seconds", False),
)


def write_report(run: RunDirectory, *, model: bool = True) -> Path:
    """Render the page of a finished, failed or running run; returns its path. Arguments as for ``render``.

    What nothing bears out is also said on stderr.
    """
    path = run.root / REPORT
    summary = verify.totals(run, model=model)
    page = _page(run, summary)
    for line in _doubts(summary):
        print(f"rl-parity: {line}", file=sys.stderr)
    try:
        write_text(path, page)
    except OSError as error:
        raise ContractError(f"{path} cannot be written ({error}); make its directory writable") from error
    return path


def render(run: RunDirectory, *, model: bool = True) -> str:
    """The page as one string; its verdict is that of the records and samples.

    Args:
        model: also prove that the run's copy of a built-in model is undamaged.

    Raises:
        ContractError: a file that is missing or damaged, named with what is wrong; nothing is written.
    """
    return _page(run, verify.totals(run, model=model))


def _page(run: RunDirectory, summary: Mapping[str, Any]) -> str:
    manifest = run.manifest()
    steps = {arm: run.recorded(arm, manifest) for arm in run.arms()}
    evidence = {arm: run.evidence(arm) for arm in steps}
    strict = run.evidence("strict")
    sections = [
        _section(run, (MANIFEST, SUMMARY, "ARM/steps.jsonl"), lambda: _verdict(manifest, summary, steps)),
        _section(run, (SUMMARY,), lambda: _figures(summary)),
        _section(run, ("ARM/steps.jsonl",), lambda: _curves(steps)),
        _section(run, (MANIFEST, "ARM/evidence.json"), lambda: report_run.topology(manifest, evidence)),
        _section(run, (MANIFEST,), lambda: report_run.sittings(manifest)),
        _section(run, ("ARM/evidence.json",), lambda: _evidence(evidence)),
        _section(run, ("ARM/evidence.json",), lambda: report_run.graphs(evidence)),
        _section(run, (MANIFEST, "ARM/steps.jsonl"), lambda: report_run.phases(manifest, steps)),
        _section(run, (MANIFEST, "strict/evidence.json"), lambda: _contracts(manifest, strict)),
        _section(run, (MANIFEST,), lambda: _provenance(manifest)),
    ]
    css = files("rl_parity").joinpath("report.css").read_text(encoding="utf-8")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>rl-parity report</title><style>{css}</style></head><body><main>{''.join(sections)}</main></body>"
        "</html>\n"
    )


def _doubts(summary: Mapping[str, Any]) -> list[str]:
    """What nothing in the run bears out, and why it may prove little."""
    said = [*doubts.lines(summary), landed.sentence(summary["not_here"])]
    said += [f"Warning: {arm} arm: {text}" for arm, totals in summary["arms"].items() for text in totals["warnings"]]
    return [line for line in said if line]


def _section(run: RunDirectory, sources: Sequence[str], make: Callable[[], str]) -> str:
    try:
        return make()
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise ContractError(
            f"{run.root}: {' or '.join(sources)} lacks or misstates what the report shows "
            f"({type(error).__name__}: {error}); restore the file or give a directory as `rl-parity run --out` wrote it"
        ) from error


def _verdict(manifest: Mapping[str, Any], summary: Mapping[str, Any], steps: Mapping[str, Sequence[Any]]) -> str:
    arms = summary["arms"]
    strict, native, status = arms.get("strict"), arms.get("native"), manifest.get("status", "unknown")
    good = False
    # a step that ends the run may be found when the run can no longer say so in its status
    wrong = any(ends_run("strict", step) for step in steps.get("strict", ()))
    if summary["failed"] and not wrong:
        title = f"Not equal: a step of the {next(iter(summary['failed']))} arm, which the run could not record"
        lead = "What it has recorded is counted below."
    elif status in ("interrupted", "failed") and not wrong:
        title = "The run was interrupted" if status == "interrupted" else "The run failed"
        lead = escape(str(manifest.get("reason") or "no reason was recorded").splitlines()[0])
    elif status == "running" and (strict or native) and not wrong:
        title, lead = "The run has not ended", "What it has done so far is counted below."
    elif strict is None and native is None:
        title, lead = "Nothing was compared", "The run has no finished step."
    elif strict is None:
        title = (
            f"Native: {number(native['mismatch_count'])} of {number(native['valid_count'])} log-probabilities differ"
        )
        lead = "Only the engines' own operators ran; there is no strict verdict."
    elif strict["bitwise_equal"]:
        good = True
        title = f"Equal: {number(strict['mismatch_count'])} of {number(strict['valid_count'])} log-probabilities differ"
        if summary["not_here"].get("strict"):
            title += ", as the records say"
        lead = "vLLM's log-probability of every valid token has the bits of Megatron's, and of the training forward's."
    else:
        title = (
            f"Not equal: {number(strict['mismatch_count'])} of {number(strict['valid_count'])} log-probabilities differ"
        )
        lead = _why(steps.get("strict", ()))
        if status != "mismatch":
            lead += escape(f" The run could not say so when it ended: its status is {status}.")
    if native is not None and strict is not None and native["valid_count"]:
        share = 100 * native["mismatch_count"] / native["valid_count"]
        lead += (
            f" With the engines' own operators {number(native['mismatch_count'])} of {number(native['valid_count'])} "
            f"({share:.0f}%) differ, by up to {number(native['max_abs_diff'])} nats."
        )
    c = manifest["config"]
    device = f" on {', '.join(sorted({gpu['name'] for gpu in manifest['gpus']}))}" if manifest.get("gpus") else ""
    eyebrow = (
        f"{c['model']}{device} · train tp={c['train']['tp']}, cp={c['train']['cp']} · rollout tp={c['rollout']['tp']}, "
        f"engines={c['rollout']['engines']} · seed {c['seed']} · {manifest.get('started', '')}"
    )
    unproven = "".join(f'<p class="note"><b>{escape(line)}</b></p>' for line in _doubts(summary))
    plant = f'<p class="note"><b>Planted on purpose: {escape(str(c["plant"]))}</b></p>' if c.get("plant") else ""
    return (
        f'<section class="verdict {"good" if good else "bad"}"><p class="eyebrow">{escape(eyebrow)}</p>'
        f'<h1>{escape(title)}</h1><p class="lead">{lead}</p>{unproven}{plant}</section>'
    )


def _why(steps: Sequence[Mapping[str, Any]]) -> str:
    for step in steps:
        if step.get("not_compared"):
            return escape(f"Step {step['step']} was not compared: {step['not_compared']}.")
        first = step.get("first_mismatch")
        if first:
            return (
                f"First at step {first['step']}, sample {first['sample']}, position {first['position']}, token "
                f"<code>{escape(str(first['token']))}</code>: {first['left_name']} {first['left']!r} "
                f"(<code>{first['left_bits']}</code>), {first['right_name']} {first['right']!r} "
                f"(<code>{first['right_bits']}</code>)."
            )
        if not is_equal(step):
            return escape(f"Step {step['step']} has nonzero counts below.")
    return ""


def _figures(summary: Mapping[str, Any]) -> str:
    arms = [a for a in ("strict", "native") if a in summary["arms"]]
    if not arms:
        return ""
    head = "".join(f'<th class="n">{arm}</th>' for arm in arms)
    rows = []
    for key, text, zero_is_good in _ROWS:
        if not any(key in summary["arms"][a] for a in arms):
            continue
        tds = []
        for arm in arms:
            value = summary["arms"][arm].get(key)
            mark = ""
            if zero_is_good and value is not None:
                mark = " zero" if value == 0 else " nonzero"
            tds.append(f'<td class="n{mark}">{number(value)}</td>')
        rows.append(f"<tr><td>{escape(text)}</td>{''.join(tds)}</tr>")
    return (
        f'<h2>Counts</h2><div class="scroll"><table class="first"><tr><th></th>{head}</tr>{"".join(rows)}</table></div>'
        '<p class="note">Bits are compared as integers. Differences are train minus rollout, in nats. A mean close to '
        "zero is not a count of zero, so the counts decide.</p>"
    )


def _series(steps: Mapping[str, Sequence[Mapping[str, Any]]], key: str) -> list[Series]:
    return [Series(arm, arm, [s.get(key) for s in steps[arm]]) for arm in steps]


def _curves(steps: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    if not steps:
        return ""
    legend = "".join(f'<span><i class="k-{arm}"></i>{arm}</span>' for arm in reversed(list(steps)))
    charts = [
        lines("Mean reward", _series(steps, "reward"), zero=True),
        lines("Mean |train - rollout| per token, nats", _series(steps, "mean_abs_diff"), log=True),
        lines("Largest |train - rollout|, nats", _series(steps, "max_abs_diff"), log=True),
        lines("KL rollout to train (k3), nats", _series(steps, "k3"), log=True),
        lines("Loss", _series(steps, "loss")),
        lines("Gradient norm", _series(steps, "grad_norm"), zero=True),
        lines("KL to the frozen reference, nats", _series(steps, "kl_reference"), zero=True),
        _histogram(steps),
    ]
    return f'<h2>Curves</h2><div class="legend">{legend}</div><div class="grid2">{"".join(charts)}</div>'


def _histogram(steps: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    labels: list[str] = []
    totals: dict[str, list[float]] = {}
    for arm, records in steps.items():
        for record in records:
            buckets = record.get("ratio_histogram") or {}
            labels = labels or list(buckets)
            counts = totals.setdefault(arm, [0.0] * len(labels))
            for i, name in enumerate(labels):
                counts[i] += buckets.get(name, 0)
    if not labels:
        return ""
    series = []
    for arm in reversed(list(totals)):
        whole = sum(totals[arm]) or 1.0
        series.append(Series(arm, arm, [100 * v / whole for v in totals[arm]]))
    exact = labels.index("exactly 1") if "exactly 1" in labels else None
    title = "Policy ratio exp(train - rollout), share of tokens"
    return bars(title, [_short(name) for name in labels], series, highlight=exact, label="ratio")


def _short(bucket: str) -> str:
    """``[0.8, 0.99)`` as ``.8–.99``, which fits under a bar."""
    if bucket == "exactly 1":
        return "exactly 1"
    text = bucket.strip("[]()").replace(", ", "–").replace("0.", ".")
    return text.replace("above ", ">")


def _evidence(evidence: Mapping[str, Mapping[str, Any]]) -> str:
    out = []
    for arm, data in reversed(list(evidence.items())):
        table: dict[tuple[str, str, str, str, str], dict[str, int]] = {}
        workers: dict[str, set[str]] = {"train": set(), "rollout": set()}
        told = [(side, entry.get(side) or {}) for entry in sittings.entries(data) for side in workers]
        for side, named in told:
            for name, rows in named.items():
                workers[side].add(name)
                for row in rows:
                    key = (
                        row["boundary"],
                        row["kernel"],
                        row.get("plan", "-"),
                        row.get("layout", "-"),
                        row.get("phase", "-"),
                    )
                    cell = table.setdefault(key, {})
                    cell[side] = cell.get(side, 0) + int(row["count"])
        body = "".join(
            f"<tr><td>{escape(b)}</td><td><code>{escape(k)}</code></td><td>{escape(plan)}</td><td>{escape(layout)}</td>"
            f"<td>{escape(phase)}</td>"
            f'<td class="n">{number(cell.get("train", 0))}</td><td class="n">{number(cell.get("rollout", 0))}</td></tr>'
            for (b, k, plan, layout, phase), cell in sorted(table.items())
        )
        if not body:
            body = '<tr><td colspan="7">No launch of our operators was reported by any worker.</td></tr>'
        out.append(
            f'<h2>Evidence, {arm} arm</h2><div class="scroll"><table class="evidence"><tr><th>boundary</th>'
            "<th>kernel</th>"
            "<th>plan</th><th>layout</th><th>phase</th>"
            f'<th class="n">{len(workers["train"])} trainer ranks</th>'
            f'<th class="n">{len(workers["rollout"])} engine workers</th></tr>{body}</table></div>'
        )
    if out:
        out.append(
            '<p class="note">Launches, counted inside the operators by each worker process; nothing here comes from '
            "configuration.</p>"
        )
    return "".join(out)


def _held(profile: Profile, evidence: Mapping[str, Any]) -> str:
    reports = evidence.get("reports", {}).values()
    ranks = sum(r.get("fingerprint") == profile.fingerprint for r in reports)
    workers = sum(r.get("profile") == profile.fingerprint for r in reports)
    return f", reported by {ranks} trainer ranks and {workers} engine workers" if ranks or workers else ""


def _contracts(manifest: Mapping[str, Any], strict: Mapping[str, Any]) -> str:
    if "profile" not in manifest:
        return ""
    profile = Profile.from_dict(manifest["profile"])
    blocks = []
    for name in sorted(profile.contracts):
        contract = profile.contracts[name]
        rows = "".join(
            f"<tr><th>{escape(column)}</th><td>{escape(cell)}</td></tr>"
            for column, cell in zip(contracts.COLUMNS[1:], contracts.cells(contract)[1:])
        )
        blocks.append(
            f"<details><summary><b>{escape(name)}</b> <code>{contract.fingerprint[:16]}</code></summary>"
            f"<table>{rows}</table></details>"
        )
    return (
        f'<h2>Contracts</h2><p class="note">Fingerprint <code>{profile.fingerprint}</code>{_held(profile, strict)}. '
        f'Sides with different fingerprints are not compared.</p><div class="contracts">{"".join(blocks)}</div>'
    )


def _provenance(manifest: Mapping[str, Any]) -> str:
    rows: list[tuple[str, str]] = [("command", " ".join(manifest.get("command", [])))]
    rows += [(name, str(version or "not installed")) for name, version in manifest.get("versions", {}).items()]
    rows += [(name, str(value)) for name, value in manifest.get("hardware", {}).items()]
    rows += [(f"sampling {name}", str(value)) for name, value in manifest.get("sampling", {}).items()]
    rows += [(f"sha256 of {name}", digest) for name, digest in manifest.get(INPUTS, {}).items()]
    rows += [("not covered", text) for text in manifest.get("notes", [])]
    body = "".join(f"<tr><td>{escape(k)}</td><td><code>{escape(v)}</code></td></tr>" for k, v in rows)
    return f'<h2>Provenance</h2><div class="scroll"><table>{body}</table></div>'
