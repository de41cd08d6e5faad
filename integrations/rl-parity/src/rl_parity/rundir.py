"""The files of a run directory: who writes them, who reads them, and that one directory holds one run."""

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rl_contract import ContractError

MANIFEST, SUMMARY, REPORT = "manifest.json", "summary.json", "report.html"


def write_json(path: Path, value: Any) -> None:
    """Write through a temporary file and a rename, so that a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    with os.fdopen(handle, "w", encoding="utf-8") as stream:
        json.dump(value, stream, indent=2, allow_nan=True)
        stream.write("\n")
    os.chmod(name, 0o644)
    os.replace(name, path)


@dataclass(frozen=True)
class StepSamples:
    """What one step sampled and scored, flat over the completion tokens of all samples.

    Attributes:
        prompt_index, sample_index, prompt_length, length: int32 [samples]; ``length`` counts completion tokens.
        prompt_tokens: int32 [sum(prompt_length)]; tokens: int32 [sum(length)].
        rollout, train, forward: fp32 [sum(length)], log-probability by the engine, by the scoring pass and by the
            training forward; NaN with ``absent`` set where there is none.
        absent: bool [sum(length)].
        reward: fp32 [samples].
    """

    prompt_index: np.ndarray
    sample_index: np.ndarray
    prompt_length: np.ndarray
    length: np.ndarray
    prompt_tokens: np.ndarray
    tokens: np.ndarray
    rollout: np.ndarray
    train: np.ndarray
    forward: np.ndarray
    absent: np.ndarray
    reward: np.ndarray

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(path, **self.__dict__)

    @classmethod
    def load(cls, path: Path) -> "StepSamples":
        with np.load(path, allow_pickle=False) as data:
            return cls(**{name: data[name] for name in data.files})

    def locate(self, flat: int) -> tuple[int, int]:
        """(sample, position in the completion) of a flat token index."""
        ends = np.cumsum(self.length)
        sample = int(np.searchsorted(ends, flat, side="right"))
        return sample, int(flat - (ends[sample] - self.length[sample]))


class RunDirectory:
    """Writer and reader of ``DIR``."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)

    @staticmethod
    def refusal(root: Path | str) -> str | None:
        """Why ``root`` cannot take a new run, or None."""
        root = Path(root)
        if root.exists() and not root.is_dir():
            return f"--out {root}: is a file; give a new or empty directory"
        if root.is_dir() and any(root.iterdir()):
            what = "holds another run" if (root / MANIFEST).exists() else "is not empty"
            return f"--out {root}: {what}; give a new directory or remove that one"
        return None

    def write_manifest(self, manifest: Mapping[str, Any]) -> None:
        write_json(self.root / MANIFEST, manifest)

    def set_status(self, status: str, reason: str | None = None) -> None:
        """Record ``running``, ``finished``, ``mismatch``, ``failed`` or ``interrupted`` in the manifest."""
        self.write_manifest({**self.manifest(), "status": status, "reason": reason})

    def append_step(self, arm: str, record: Mapping[str, Any]) -> None:
        path = self.root / arm / "steps.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a", encoding="utf-8") as stream:
            stream.write(json.dumps(record) + "\n")
            stream.flush()

    def samples_path(self, arm: str, step: int) -> Path:
        return self.root / arm / "samples" / f"step-{step:05d}.npz"

    def manifest(self) -> dict[str, Any]:
        return self._read(MANIFEST)

    def summary(self) -> dict[str, Any]:
        return self._read(SUMMARY)

    def evidence(self, arm: str) -> dict[str, Any]:
        path = self.root / arm / "evidence.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

    def steps(self, arm: str) -> list[dict[str, Any]]:
        path = self.root / arm / "steps.jsonl"
        if not path.is_file():
            return []
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]

    def arms(self) -> list[str]:
        return [arm for arm in ("native", "strict") if (self.root / arm / "steps.jsonl").is_file()]

    def _read(self, name: str) -> dict[str, Any]:
        path = self.root / name
        if not path.is_file():
            raise ContractError(f"{self.root} has no {name}; give a directory written by `rl-parity run --out`")
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return data


COUNTS = (
    "valid_count",
    "mismatch_count",
    "nonfinite_count",
    "absent_count",
    "token_id_mismatch_count",
    "weight_version_mismatch_count",
)


def summarize(steps: Sequence[Mapping[str, Any]], seconds: float) -> dict[str, Any]:
    """One arm's totals over its steps; maxima and means are None where nothing was compared.

    ``reward_first`` and ``reward_last`` are means over the first and last tenth of the steps, at least one.
    """
    compared = [s for s in steps if s.get("max_abs_diff") is not None]
    tokens = sum(s["valid_count"] for s in compared)
    weighted = sum(s["mean_abs_diff"] * s["valid_count"] for s in compared if s["valid_count"])
    out: dict[str, Any] = {"steps": len(steps), **{name: sum(int(s[name]) for s in steps) for name in COUNTS}}
    out["forward_mismatch_count"] = sum(int(s["forward_mismatch_count"]) for s in steps)
    out["max_abs_diff"] = max((s["max_abs_diff"] for s in compared), default=None)
    out["mean_abs_diff"] = weighted / tokens if tokens else None
    out["bitwise_equal"] = bool(compared) and len(compared) == len(steps) and is_equal(out)
    out["tokens"] = sum(int(s["tokens"]) for s in steps)
    # a single step is too noisy to show learning
    window = max(1, len(steps) // 10)
    rewards = [float(s["reward"]) for s in steps]
    out["reward_first"] = sum(rewards[:window]) / window if steps else None
    out["reward_last"] = sum(rewards[-window:]) / window if steps else None
    out["seconds"] = seconds
    return out


def is_equal(counts: Mapping[str, Any]) -> bool:
    """Whether the integer verdicts of a step or an arm say: exactly equal, nothing absent, something compared."""
    wrong = [name for name in (*COUNTS[1:], "forward_mismatch_count") if counts[name]]
    return not wrong and counts["valid_count"] > 0
