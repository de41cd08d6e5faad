"""Two run directories, bit against bit: settings, every stored array, and every figure of every step."""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from rl_contract import ContractError
from rl_parity import doubts, native, verify
from rl_parity.config import RunConfig
from rl_parity.manifest import INPUTS, weight_algorithm
from rl_parity.rundir import MANIFEST, RunDirectory, StepSamples

_LABELS = {"rollout": "rollout logprob", "train": "train logprob", "forward": "forward logprob"}
# sections of the manifest that say what was computed; in "config" all but the keys below
_SETTINGS = ("config", "sampling", "seeds", "profile", "fingerprints", "plant")
# two runs that differ in these promise the same bits; leaves take part through the profile, steps and arms as data
_FREE = (
    *("arm", "train", "rollout", "launcher", "leaves", "out", "steps", "timeout"),
    *("gpus", "placement", "gpu_memory_utilization", "sleep", "weights", "eager", "save_every", "limit"),
)
_INFORMATION = ("topology", "versions", "hardware", "gpus", "placement", INPUTS)
_ABSENT = "absent"
_NAMES_OF_WEIGHTS = ("weight_digest", "weight_version")


@dataclass
class Comparison:
    """Counts of compared and of differing values by quantity; ``first`` says where each quantity differs first.

    ``notes`` hold what may differ between equal runs (layout, launcher, versions), how an unfinished run ended,
    and what nothing in a run bears out.
    """

    compared: dict[str, int] = field(default_factory=dict)
    different: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        return sum(self.compared.values()) > 0 and not any(self.different.values())

    def add(self, quantity: str, compared: int, different: int, where: str = "") -> None:
        self.compared[quantity] = self.compared.get(quantity, 0) + compared
        self.different[quantity] = self.different.get(quantity, 0) + different
        if different:
            self.first.setdefault(quantity, where)

    def lines(self) -> list[str]:
        out = [f"note: {note}" for note in self.notes]
        for quantity, total in self.compared.items():
            bad = self.different[quantity]
            verdict = "equal" if not bad else f"{bad:,} differ, first: {self.first[quantity]}"
            out.append(f"{quantity:<40} {total:>10,} compared   {verdict}")
        return out


def compare_runs(a: RunDirectory, b: RunDirectory) -> Comparison:
    """Compare the settings, every arm and every step; what one side alone has is a difference.

    Raises:
        ContractError: no arm in common, or a file that is missing or damaged, named with what is wrong.
    """
    manifests = a.manifest(), b.manifest()
    doubted = [(run, doubts.lines(verify.whole(run))) for run in (a, b)]
    arms = a.arms(), b.arms()
    if not set(arms[0]) & set(arms[1]):
        raise ContractError(f"{a.root} has arms {arms[0]}, {b.root} has {arms[1]}; give two runs with an arm in common")
    out = Comparison()
    if a.root.resolve() == b.root.resolve():
        out.notes.append(f"both are {a.root}: a run equals itself, which proves nothing")
    elif manifests[0]["run_id"] == manifests[1]["run_id"]:
        out.notes.append(f"both have the id {manifests[0]['run_id']}: one may be a copy of the other")
    began = [native.began(run) for run in (a, b)] if "native" in arms[0] and "native" in arms[1] else []
    _settings(out, *manifests, (str(a.root), str(b.root)), began)
    if "native" in arms[0] and "native" in arms[1] and (ran := [native.names(run) for run in (a, b)])[0] != ran[1]:
        out.notes.append(f"native trainers: {' against '.join(', then '.join(one) for one in ran)}")
    algorithms = [weight_algorithm(run.root / MANIFEST, m) for run, m in zip((a, b), manifests)]
    named_alike = algorithms[0] == algorithms[1]
    if not named_alike:
        out.notes.append(f"weights are named by {' against '.join(algorithms)}: their digests were not compared")
    for arm in sorted({*arms[0], *arms[1]}):
        if arm not in arms[0] or arm not in arms[1]:
            out.add(f"{arm} arm", 1, 1, f"only in {(a if arm in arms[0] else b).root}")
            continue
        out.add(f"{arm} arm", 1, 0)
        _arm(out, arm, a, b, [str(m["run_id"]) for m in manifests], () if named_alike else _NAMES_OF_WEIGHTS)
    for run, manifest in zip((a, b), manifests):
        if manifest["status"] != "finished":
            how = manifest.get("reason") or "no reason recorded"
            out.notes.append(f"{run.root}: status {manifest['status']}, {how}")
    out.notes += [f"{run.root}: {line}" for run, said in doubted for line in said]
    return out


def _settings(
    out: Comparison, a: dict[str, Any], b: dict[str, Any], roots: tuple[str, str], began: Sequence[native.Began]
) -> None:
    """A setting of the configuration that one side lacks, as older versions wrote none, has its default there.

    Args:
        began: what each side's native trainer began with; empty where not both have that arm.
    """
    free = _FREE if began else (*_FREE, "native_operators")
    # before there was that option, there was nothing else
    defaults = {**dict(_leaves(RunConfig().to_dict(), "config")), "config.native_operators": "local"}
    alike = bool(began) and all(one.certain for one in began) and began[0].operators == began[1].operators
    for section in (*_SETTINGS, *_INFORMATION):
        if section == INPUTS and not (section in a and section in b):
            # older runs do not tell
            continue
        x, y = dict(_leaves(a.get(section, _ABSENT), section)), dict(_leaves(b.get(section, _ABSENT), section))
        for name in dict.fromkeys((*x, *y)):
            left, right = x.get(name, _ABSENT), y.get(name, _ABSENT)
            same = _same(left, right)
            if not same and name in defaults and (name in x) != (name in y):
                said = right if name in y else left
                same = _same(said, defaults[name])
                if same:
                    out.notes.append(f"{name}: not said by {roots[name in x]}, compared as its default {said!r}")
            text = f"{left!r} against {right!r}"
            if not same and name == "config.native_operators" and alike:
                same = True
                out.notes.append(f"{name}: {text}, and both ran {began[0].operators}")
            if section in _INFORMATION or (section == "config" and name.split(".")[1:2] and name.split(".")[1] in free):
                if not same:
                    out.notes.append(f"{name}: {text}")
            elif same:
                out.add("settings", 1, 0)
            else:
                out.add(f"setting {name}", 1, 1, text)


def _arm(
    out: Comparison, arm: str, a: RunDirectory, b: RunDirectory, run_ids: list[str], without: tuple[str, ...]
) -> None:
    records = [{record["step"]: record for record in run.recorded(arm, run.manifest())} for run in (a, b)]
    # an interrupted run may hold the samples of a step that it did not record
    stored = [{*known, *run.sample_steps(arm)} for run, known in zip((a, b), records)]
    for step in sorted(stored[0] | stored[1]):
        one_sided = [kind for kind in (stored, records) if (step in kind[0]) != (step in kind[1])]
        if one_sided:
            has = a if step in one_sided[0][0] else b
            what = "samples" if one_sided[0] is stored else "record"
            out.add(f"{arm} steps", 1, 1, f"{what} of step {step} only in {has.root}")
        else:
            out.add(f"{arm} steps", 1, 0)
        if step in stored[0] and step in stored[1]:
            _samples(out, arm, step, a, b)
        if step in records[0] and step in records[1]:
            pair = [{k: v for k, v in record[step].items() if k not in without} for record in records]
            _figures(out, arm, step, pair[0], pair[1], run_ids)


def _samples(out: Comparison, arm: str, step: int, a: RunDirectory, b: RunDirectory) -> None:
    x, y = StepSamples.load(a.samples_path(arm, step)), StepSamples.load(b.samples_path(arm, step))
    for name in (f.name for f in fields(StepSamples)):
        _array(out, f"{arm} {_LABELS.get(name, name)}", step, x, name, getattr(x, name), getattr(y, name))


def _array(
    out: Comparison, quantity: str, step: int, samples: StepSamples, name: str, a: np.ndarray, b: np.ndarray
) -> None:
    if a.shape != b.shape:
        total = max(a.size, b.size)
        out.add(quantity, total, total, f"step {step}: {a.size} values against {b.size}")
        return
    bits = f"u{a.dtype.itemsize}"
    differs = a.view(bits) != b.view(bits)
    where = ""
    if differs.any():
        flat = int(differs.argmax())
        place = f"step {step}, {samples.place(name, flat)}"
        where = f"{place}: {_shown(a[flat])} against {_shown(b[flat])}"
    out.add(quantity, int(a.size), int(differs.sum()), where)


def _shown(value: np.generic) -> str:
    if value.dtype.kind == "f":
        return f"{float(value)!r} ({int(value.view(f'u{value.dtype.itemsize}')):#010x})"
    return str(value)


def _figures(out: Comparison, arm: str, step: int, a: dict[str, Any], b: dict[str, Any], run_ids: list[str]) -> None:
    for name in dict.fromkeys((*a, *b)):
        if name in ("step", "seconds", "memory"):
            continue
        # a version is named after its run, which is no difference in what was computed
        x, y = (
            {
                key: value.replace(run_id, "RUN") if isinstance(value, str) else value
                for key, value in _leaves(record.get(name, _ABSENT), name)
            }
            for record, run_id in zip((a, b), run_ids)
        )
        for key in dict.fromkeys((*x, *y)):
            left, right = x.get(key, _ABSENT), y.get(key, _ABSENT)
            out.add(f"{arm} {name}", 1, int(not _same(left, right)), f"step {step}, {key}: {left!r} against {right!r}")


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """``("config.train.tp", 2)`` and so on; an empty object or list is a leaf."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{name}.{key}")
    elif isinstance(value, list) and value:
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{name}.{index}")
    else:
        yield name, value


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return struct.pack("d", a) == struct.pack("d", b)
    return type(a) is type(b) and bool(a == b)
