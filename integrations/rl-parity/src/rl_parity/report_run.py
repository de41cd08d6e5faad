"""Sections of the report about how a run was carried out: who ran where, time by phase, in how many sittings."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from rl_parity.svg import number, timeline

# in the order in which a step goes through them; wake, sleep and prove are those of GPUs
PHASES = ("wake", "push", "prove", "rollout", "sleep", "score", "train", "other")
GIB = 2**30


def topology(manifest: Mapping[str, Any], evidence: Mapping[str, Mapping[str, Any]]) -> str:
    """Ranks and workers, on GPUs where there are any, and how weights went between them."""
    t, r = manifest["config"]["train"], manifest["config"]["rollout"]
    gpus = manifest.get("gpus") or []
    placement = manifest.get("placement") or {}
    number_of = {gpu["uuid"]: gpu["index"] for gpu in gpus}

    def on(uuid: str | None) -> str:
        return "" if uuid is None else f"<br><small>GPU {number_of[uuid]}</small>"

    trainers = placement.get("trainers") or [None] * (t["tp"] * t["cp"])
    workers = placement.get("engines") or [[None] * r["tp"]] * r["engines"]
    style = f'style="grid-template-columns:repeat({t["tp"]},1fr)"'
    ranks = "".join(
        f'<div class="rank">rank {c * t["tp"] + i}<br>tp {i} · cp {c}{on(trainers[c * t["tp"] + i])}</div>'
        for c in range(t["cp"])
        for i in range(t["tp"])
    )
    wide = f'style="grid-template-columns:repeat({r["tp"]},1fr)"'
    engines = "".join(
        f'<div class="note">engine {e}</div><div class="ranks" {wide}>'
        + "".join(f'<div class="rank">worker tp {w}{on(workers[e][w])}</div>' for w in range(r["tp"]))
        + "</div>"
        for e in range(r["engines"])
    )
    launcher = escape(str(manifest["config"]["launcher"]))
    return (
        f'<h2>Topology</h2><div class="topo"><div class="side"><b>Megatron-core, {t["tp"] * t["cp"]} ranks</b>'
        f'<div class="ranks" {style}>{ranks}</div></div><div class="arrow">weights &#8594;<br>&#8592; tokens<br>'
        f"<small>{launcher}</small></div>"
        f'<div class="side"><b>vLLM, {r["engines"]} engine(s) of {r["tp"]}</b>{engines}</div></div>'
        f"{_gpus(manifest, gpus, placement)}{_weights(evidence)}"
    )


def _gpus(manifest: Mapping[str, Any], gpus: Sequence[Mapping[str, Any]], placement: Mapping[str, Any]) -> str:
    if not gpus:
        return ""
    used = {*placement["trainers"], *(uuid for engine in placement["engines"] for uuid in engine)}
    rows = "".join(
        f"<tr><td>GPU {gpu['index']}</td><td>{escape(gpu['name'])}</td>"
        f'<td class="n">{gpu["memory"] / GIB:.0f} GiB</td><td>{escape(gpu["capability"])}</td>'
        f"<td>{escape(gpu['driver'])}</td><td><code>{escape(gpu['uuid'])}</code></td>"
        f"<td>{'' if gpu['uuid'] in used else 'unused'}</td></tr>"
        for gpu in gpus
    )
    config = manifest["config"]
    meaning = {
        "colocated": "trainer and engines take turns on the same GPUs",
        "split": "trainer and engines have GPUs of their own",
        "shared": "ranks share GPUs, for a test",
    }[placement["kind"]]
    engines = "eager" if config.get("eager") else "compiled, with CUDA graphs where the engine takes them"
    return (
        '<div class="scroll gpus"><table><tr><th>GPU</th><th>name</th><th class="n">memory</th><th>capability</th>'
        f"<th>driver</th><th>UUID</th><th></th></tr>{rows}</table></div>"
        f'<p class="note">Placement {placement["kind"]}: {meaning}. Trainer ranks talk over {placement["backend"]}. '
        f"Engines are {engines}.</p>"
    )


def _weights(evidence: Mapping[str, Mapping[str, Any]]) -> str:
    out = []
    names = {
        "ipc": "lent as memory of the trainer's GPU (CUDA IPC)",
        "host": "lent as memory of the host",
        "file": "written to files",
    }
    for arm, data in reversed(list(evidence.items())):
        found = data.get("weights")
        if not found:
            continue
        text = f"{arm} arm: weights are {names[found['transport']]}"
        if found["reason"]:
            text += f", because {found['reason']}"
        if proofs := found["sha256_proofs"]:
            shards = sum(proof["shards"] for proof in proofs)
            wrong = sum(proof["different"] for proof in proofs)
            algorithm = proofs[0].get("algorithm", "sha256")
            text += (
                f"; the {algorithm} of {number(shards)} shards held by engines was read back at step(s) "
                f"{', '.join(str(proof['step']) for proof in proofs)}, {wrong} engines differ"
            )
        out.append(f'<p class="note">{escape(text)}.</p>')
    return "".join(out)


def phases(manifest: Mapping[str, Any], steps: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Seconds of a step by phase, one column an arm, and the steps of one arm drawn to scale."""
    if not any(steps.values()):
        return ""
    arms = [arm for arm in ("strict", "native") if steps.get(arm)]
    kept = {arm: _settled(arm, manifest, steps[arm]) for arm in arms}
    rows = []
    for phase in PHASES:
        means = {arm: _mean([s["seconds"].get(phase, 0.0) for s in kept[arm]]) for arm in arms}
        if any(means.values()):
            cells = "".join(f'<td class="n">{means[arm]:.3f}</td>' for arm in arms)
            rows.append(f'<tr><td><i class="swatch k-{phase}"></i>{phase}</td>{cells}</tr>')
    whole = "".join(f'<td class="n"><b>{_mean([_total(s) for s in kept[arm]]):.3f}</b></td>' for arm in arms)
    tokens = "".join(f'<td class="n">{number(round(_mean([s["tokens"] for s in kept[arm]])))}</td>' for arm in arms)
    rows += [f"<tr><td>whole step</td>{whole}</tr>", f"<tr><td>sampled tokens a step</td>{tokens}</tr>"]
    for side, who in (("trainers", "a trainer rank"), ("engines", "an engine worker")):
        peaks = {arm: max((m["peak_gib"] for s in steps[arm] for m in _memory(s, side)), default=None) for arm in arms}
        if any(peaks.values()):
            cells = "".join(f'<td class="n">{number(peaks[arm])}</td>' for arm in arms)
            rows.append(f"<tr><td>peak GPU memory of {who}'s tensors, GiB</td>{cells}</tr>")
    head = "".join(f'<th class="n">{arm}</th>' for arm in arms)
    first = any(len(kept[arm]) < len(steps[arm]) for arm in arms)
    return (
        f'<h2>Time by phase</h2><div class="scroll"><table><tr><th>mean seconds a step</th>{head}</tr>{"".join(rows)}'
        f"</table></div>{_WARM if first else ''}{_drawn(steps, arms[0])}"
    )


_WARM = '<p class="note">The first step of each sitting, which warms everything up, is left out of the means.</p>'


def _drawn(steps: Mapping[str, Sequence[Mapping[str, Any]]], arm: str) -> str:
    rows = []
    for s in steps[arm][:80]:
        spent = [(p, float(s["seconds"][p])) for p in PHASES if s["seconds"].get(p)]
        rows.append((f"step {s['step']}  weights {str(s['weight_digest'])[:12]}", spent))
    there = [p for p in PHASES if any(p == name for _, spent in rows for name, _ in spent)]
    legend = "".join(f'<span><i class="k-{p}"></i>{p}</span>' for p in there)
    more = f'<p class="note">The first 80 of {len(steps[arm])} steps.</p>' if len(steps[arm]) > 80 else ""
    return (
        f"<h2>Weight sync and time, {arm} arm</h2>"
        f'<div class="legend">{legend}</div>'
        f"{timeline('Seconds by phase; every step samples from the weights named', rows)}{more}"
    )


def _memory(step: Mapping[str, Any], side: str) -> Sequence[Mapping[str, float]]:
    found: Sequence[Mapping[str, float]] = step.get("memory", {}).get(side, [])
    return [m for m in found if m]


def _settled(arm: str, manifest: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    first = {0} | {(sitting.get("from_step") or {}).get(arm, 0) for sitting in manifest.get("sittings") or []}
    kept = [step for step in steps if step["step"] not in first]
    return kept if len(kept) > 1 else steps


def _total(step: Mapping[str, Any]) -> float:
    return sum(float(s) for s in step["seconds"].values())


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def graphs(evidence: Mapping[str, Mapping[str, Any]]) -> str:
    """How each engine worker was compiled, and the CUDA graphs it captured and replayed; empty on a CPU."""
    rows = []
    for arm, data in reversed(list(evidence.items())):
        for name, report in sorted((data.get("reports") or {}).items()):
            found, compiled = report.get("graphs"), report.get("compilation", {})
            if found and (found["captures"] or found["replays"]):
                words = (arm, name, compiled.get("mode", "–"), compiled.get("graphs", "–"))
                counts = (found["captures"], found["replays"], report.get("forwards"))
                cells = [f"<td>{escape(str(word))}</td>" for word in words]
                cells += [f'<td class="n">{number(count)}</td>' for count in counts]
                rows.append(f"<tr>{''.join(cells)}</tr>")
    if not rows:
        return ""
    return (
        '<h2>CUDA graphs</h2><div class="scroll"><table><tr><th>arm</th><th>worker</th><th>compilation</th>'
        '<th>graphs</th><th class="n">captures</th><th class="n">replays</th><th class="n">forward passes</th></tr>'
        f'{"".join(rows)}</table></div><p class="note">Counted in the workers. Launches recorded by a capture are '
        "counted at each of its replays, in phase replay above.</p>"
    )


def sittings(manifest: Mapping[str, Any]) -> str:
    """When the run was done in several sittings: each one's start, first steps and machine."""
    found = manifest.get("sittings") or []
    if len(found) < 2:
        return ""
    rows = []
    for index, sitting in enumerate(found):
        begins = ", ".join(f"{arm} {step}" for arm, step in (sitting.get("from_step") or {}).items()) or "0"
        again = ", ".join(f"{arm} {len(steps)}" for arm, steps in (sitting.get("done_again") or {}).items()) or "–"
        gpus = {gpu["name"] for gpu in sitting.get("gpus") or []}
        where = ", ".join(sorted(gpus)) or str((sitting.get("hardware") or {}).get("processor", "–"))
        rows.append(
            f'<tr><td class="n">{index + 1}</td><td>{escape(str(sitting.get("started")))}</td><td>{escape(begins)}</td>'
            f"<td>{escape(again)}</td><td>{escape(where)}</td></tr>"
        )
    return (
        f"<h2>The run's {len(found)} sittings</h2>"
        '<div class="scroll"><table><tr><th class="n">sitting</th><th>started</th><th>from step</th>'
        f"<th>steps done again</th><th>machine</th></tr>{''.join(rows)}</table></div>"
        '<p class="note">A later sitting takes up the trainer’s saved state; the ledger holds the digest of the '
        "weights it went on from, which the next version had to have.</p>"
    )
