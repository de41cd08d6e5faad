"""The files of a run directory: who writes them, who reads them, and that one directory holds one run."""

import hashlib
import json
import math
import os
import re
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from rl_contract import ContractError
from rl_parity import shapes
from rl_parity.jsonfile import REPAIR, lines, read_object, read_text, require
from rl_parity.lock import LOCK

MANIFEST, SUMMARY, REPORT = "manifest.json", "summary.json", "report.html"
# a built-in model that is being made
PARTIAL_MODEL = ".model.partial"
ARMS = ("native", "strict")

STATUSES = ("running", "finished", "mismatch", "failed", "interrupted")

_TORN = re.compile(
    r"(?:manifest\.json|summary\.json|report\.html|evidence\.json|sync\.json|steps\.jsonl|ledger\.jsonl)[a-z0-9_]{8}\.tmp"
)
# what a check of a directory makes in it
_PROBE = ".rl-parity-"

_PER_TOKEN = ("tokens", "rollout", "train", "forward", "absent")
_DTYPES = {"rollout": "float32", "train": "float32", "forward": "float32", "absent": "bool", "reward": "float32"}
_BROKEN_ARCHIVE = (
    OSError,
    EOFError,
    ValueError,
    KeyError,
    NotImplementedError,
    OverflowError,
    MemoryError,
    zipfile.BadZipFile,
    zlib.error,
)


def write_text(path: Path, text: str, *, sync: bool = False) -> None:
    """Write through a temporary file and a rename, so that a reader never sees half a file.

    Args:
        sync: wait until it is on the disk.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    with os.fdopen(handle, "w", encoding="utf-8") as stream:
        stream.write(text)
        if sync:
            stream.flush()
            os.fsync(stream.fileno())
    os.chmod(name, 0o644)
    os.replace(name, path)


def write_json(path: Path, value: Any) -> None:
    """``write_text`` of it."""
    write_text(path, json.dumps(value, indent=2, allow_nan=True) + "\n")


def _is_torn(path: Path) -> bool:
    """Whether ``path`` is what ``write_text`` leaves where it is killed before its rename."""
    return bool(_TORN.fullmatch(path.name)) and path.is_file() and not path.is_symlink()


def _is_left_by_a_start(path: Path) -> bool:
    """Whether a run that was killed before its manifest was there may have left ``path``."""
    if path.name == LOCK or (path.name.startswith(MANIFEST) and _is_torn(path)):
        return True
    return path.name.startswith(_PROBE) and path.is_dir() and not path.is_symlink() and not any(path.iterdir())


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

    def digest(self) -> str:
        """sha256 over every array but the ids of tokens, whose own sha256 the ledger has of each sample."""
        found = hashlib.sha256()
        for name, array in self.__dict__.items():
            if name in ("tokens", "prompt_tokens"):
                continue
            found.update(f"{name} {array.dtype} {array.size}\n".encode())
            found.update(np.ascontiguousarray(array).data)
        return found.hexdigest()

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(path, **self.__dict__)

    @classmethod
    def load(cls, path: Path) -> "StepSamples":
        """Read what ``save`` wrote.

        Raises:
            ContractError: no such file, a damaged one, or arrays of other names, dtypes or sizes.
        """
        if not path.is_file():
            raise ContractError(f"{path} is missing, its step is recorded; {REPAIR}")
        try:
            data = np.load(path, allow_pickle=False)
            if not isinstance(data, np.lib.npyio.NpzFile):
                raise ValueError("it holds one array, not an archive of arrays")
            with data:
                arrays = {name: data[name] for name in data.files}
        except _BROKEN_ARCHIVE as error:
            raise ContractError(f"{path} cannot be read ({type(error).__name__}: {error}); {REPAIR}") from error
        wrong = cls._wrong(arrays)
        if wrong:
            raise ContractError(f"{path}: {wrong}; {REPAIR}")
        return cls(**{f.name: arrays[f.name] for f in fields(cls)})

    @classmethod
    def _wrong(cls, arrays: Mapping[str, np.ndarray]) -> str | None:
        names = [f.name for f in fields(cls)]
        if set(arrays) != set(names):
            return f"holds the arrays {sorted(arrays)}, supported are exactly {sorted(names)}"
        for name in names:
            dtype = np.dtype(_DTYPES.get(name, "int32"))
            if not isinstance(arrays[name], np.ndarray):
                return f"{name} is no array"
            if arrays[name].dtype != dtype or arrays[name].ndim != 1:
                return f"{name} is {arrays[name].dtype} {list(arrays[name].shape)}, supported is {dtype} of one axis"
        samples = arrays["length"].size
        tokens = {"prompt_tokens": "prompt_length", **dict.fromkeys(_PER_TOKEN, "length")}
        for name in names:
            expected = int(arrays[tokens[name]].sum()) if name in tokens else samples
            if arrays[name].size != expected:
                return f"{name} has {arrays[name].size} values, the lengths of its {samples} samples say {expected}"
        if any((arrays[name] < 0).any() for name in ("length", "prompt_length")):
            return "a length is negative"
        return None

    def locate(self, flat: int) -> tuple[int, int]:
        """(sample, position in the completion) of a flat token index."""
        ends = np.cumsum(self.length)
        sample = int(np.searchsorted(ends, flat, side="right"))
        return sample, int(flat - (ends[sample] - self.length[sample]))

    def place(self, name: str, flat: int) -> str:
        """In words, where the value ``flat`` of the array ``name`` belongs."""
        if name == "prompt_tokens":
            ends = np.cumsum(self.prompt_length)
            sample = int(np.searchsorted(ends, flat, side="right"))
            return f"sample {sample}, prompt position {flat - int(ends[sample] - self.prompt_length[sample])}"
        if name in _PER_TOKEN:
            sample, position = self.locate(flat)
            return f"sample {sample}, position {position}"
        return f"sample {flat}"


def record_digests(record: Mapping[str, Any], samples: StepSamples | None) -> dict[str, str]:
    """What the ledger keeps of a step: sha256 of its record as ``steps.jsonl`` has it, and of its samples if given."""
    found = {"record": hashlib.sha256(json.dumps(record).encode()).hexdigest()}
    return found if samples is None else found | {"samples": samples.digest()}


class RunDirectory:
    """Writer and reader of ``DIR``."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)

    @staticmethod
    def refusal(root: Path | str) -> str | None:
        """Why ``root`` cannot take a new run, or None."""
        root = Path(root)
        try:
            if root.exists() and not root.is_dir():
                return f"--out {root}: is a file; give a new or empty directory"
            if root.is_dir() and not all(map(_is_left_by_a_start, root.iterdir())):
                what = "holds another run" if (root / MANIFEST).exists() else "is not empty"
                return f"--out {root}: {what}; give a new directory or remove that one"
            above = next(p for p in (root.absolute(), *root.absolute().parents) if p.exists())
            if not above.is_dir():
                return f"--out {root}: {above} is a file; give a directory that can be made"
            # permissions alone don't tell, e.g. on a read-only or virtual file system
            os.rmdir(tempfile.mkdtemp(prefix=_PROBE, dir=above))
        except (OSError, ValueError) as error:
            return f"--out {root}: can't be made or written ({error}); give a directory that can be written"
        return None

    def remove_torn(self) -> None:
        """Remove files that were never whole, and what was about to be removed, of a sitting that was killed."""
        for folder in (self.root, *(self.root / arm for arm in ARMS)):
            for path in list(folder.iterdir()) if folder.is_dir() else ():
                if _is_torn(path):
                    path.unlink()
                elif path.name.startswith(_PROBE):
                    with suppress(OSError):
                        path.rmdir()
        for arm in ARMS:
            shutil.rmtree(self._going(arm), ignore_errors=True)
        shutil.rmtree(self.root / PARTIAL_MODEL, ignore_errors=True)

    def remove_arm(self, arm: str) -> None:
        """Remove all of an arm in one move: killed midway, it is there whole or not at all."""
        shutil.rmtree(self._going(arm), ignore_errors=True)
        if (self.root / arm).is_dir():
            (self.root / arm).rename(self._going(arm))
            shutil.rmtree(self._going(arm), ignore_errors=True)

    def _going(self, arm: str) -> Path:
        return self.root / f".{arm}.removed"

    def write_manifest(self, manifest: Mapping[str, Any]) -> None:
        write_json(self.root / MANIFEST, manifest)

    def append_step(self, arm: str, record: Mapping[str, Any]) -> None:
        path = self.root / arm / "steps.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a", encoding="utf-8") as stream:
            stream.write(json.dumps(record) + "\n")
            stream.flush()

    def samples_path(self, arm: str, step: int) -> Path:
        return self.root / arm / "samples" / f"step-{step:05d}.npz"

    def sample_steps(self, arm: str) -> list[int]:
        """Steps whose samples are stored."""
        stems = [path.stem.removeprefix("step-") for path in (self.root / arm / "samples").glob("step-*.npz")]
        return sorted(int(stem) for stem in stems if stem.isdecimal())

    def manifest(self) -> dict[str, Any]:
        """What the run was and how it ended; ``status``, ``run_id`` and ``config`` are there.

        Raises:
            ContractError: the file is missing, empty or broken, or lacks one of these.
        """
        path, data = self.root / MANIFEST, self._read(MANIFEST)
        require(path, data, {"run_id": str, "status": str, "config": dict})
        if data["status"] not in STATUSES:
            raise ContractError(
                f"{path}: 'status' is {data['status']!r}, supported are {', '.join(STATUSES)}; {REPAIR}"
            )
        require(path, data["config"], {"steps": int, "arm": str, "train": dict, "rollout": dict})
        shapes.check_sittings(path, data)
        return data

    def summary(self) -> dict[str, Any]:
        """Each arm's totals, of which ``seconds`` is a number; raises as ``manifest`` does."""
        path, data = self.root / SUMMARY, self._read(SUMMARY)
        require(path, data, {"arms": dict})
        for arm, totals in data["arms"].items():
            seconds: Any = totals.get("seconds", 0.0) if isinstance(totals, dict) else totals
            if not isinstance(totals, dict) or type(seconds) not in (int, float) or not 0 <= seconds < math.inf:
                raise ContractError(f"{path} says seconds {seconds!r} of the {arm} arm; {REPAIR}")
        return data

    def evidence(self, arm: str) -> dict[str, Any]:
        """What the workers of the arm counted, {} where it was not written; raises as ``manifest`` does."""
        path = self.root / arm / "evidence.json"
        if not path.is_file():
            return {}
        found = read_object(path)
        shapes.check_evidence(path, found)
        return found

    def steps(self, arm: str, *, torn: bool = False) -> list[dict[str, Any]]:
        """The arm's step records, [] where there are none.

        Args:
            torn: leave out a last line without its newline, which a run that was killed may leave.

        Raises:
            ContractError: an empty file, a torn or broken line, a record without its step, or other steps than 0, 1, 2
                and so on.
        """
        path = self.root / arm / "steps.jsonl"
        if not path.is_file():
            return []
        records: list[dict[str, Any]] = []
        text = read_text(path)
        if torn:
            text = text[: text.rfind("\n") + 1]
            if not text:
                return []
        for number, record in lines(path, text):
            require(path, record, {"step": int}, number)
            if any(record["step"] == other["step"] for other in records):
                raise ContractError(f"{path}, line {number}: step {record['step']} is recorded twice; {REPAIR}")
            if record["step"] != len(records):
                raise ContractError(
                    f"{path}, line {number}: step {record['step']} where step {len(records)} belongs; {REPAIR}"
                )
            records.append(record)
        return records

    def recorded(self, arm: str, manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
        """``steps``, where a run that has not ended may have left a torn last line: its step will be done again."""
        return self.steps(arm, torn=manifest["status"] == "running")

    def arms(self) -> list[str]:
        return [arm for arm in ARMS if (self.root / arm / "steps.jsonl").is_file()]

    def _read(self, name: str) -> dict[str, Any]:
        path = self.root / name
        if not path.is_file():
            raise ContractError(f"{self.root} has no {name}; give a directory written by `rl-parity run --out`")
        return read_object(path)


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

    ``reward_first`` and ``reward_last`` are means over the first and last tenth of the steps, at least one;
    ``warnings`` say why the run proves little, where its weights never moved.
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
    out["warnings"] = _warnings(steps)
    return out


def _warnings(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    """Why equal bits of these steps would prove little."""
    trained = [s for s in steps if s.get("loss") is not None]
    found = []
    if trained and all(s["grad_norm"] == 0 for s in trained):
        found.append(
            f"no gradient: its norm was 0 in each of the {len(trained)} trained steps, as where all samples of a "
            "prompt earn the same; give a --reward that tells them apart, such as partial"
        )
    if len(steps) > 1 and len({s["weight_digest"] for s in steps}) == 1:
        found.append(f"no weight moved: all of its {len(steps)} steps sampled and pushed the same bytes")
    return found


def is_equal(counts: Mapping[str, Any]) -> bool:
    """Whether the integer verdicts of a step or an arm say: exactly equal, nothing absent, something compared."""
    wrong = [name for name in (*COUNTS[1:], "forward_mismatch_count") if counts[name]]
    return not wrong and counts["valid_count"] > 0


def ends_run(arm: str, record: Mapping[str, Any]) -> bool:
    """Whether a run ends with this step: it was not compared, or is of the strict arm and not equal."""
    return bool(record.get("not_compared")) or (arm == "strict" and not is_equal(record))
