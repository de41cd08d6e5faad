"""Weights as a directory of safetensors files plus manifest.json: whole or not there, and verified when read.

On shared memory (``/dev/shm``) this moves weights between processes of one host; on a disk it is a checkpoint. A
directory may also hold manifest.json alone and name memory that the trainer lends, see ``vime_sync.lend``.
"""

import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from rl_contract import ContractError
from vime_sync.files import DAMAGE, making, path_of, read_json, reading
from vime_sync.lend import Loan, check_description
from vime_sync.manifest import DTYPES, Manifest, check_manifest, described, named_pairs
from vime_sync.raw import bytes_problem
from vime_sync.shape import ModelShape
from vime_sync.version import PolicyVersion, check_version
from vime_sync.vllm_layout import shard_digests

MANIFEST_FILE = "manifest.json"
_SAFETENSORS_DTYPES = {"BF16": "bfloat16", "F32": "float32"}


def write_weights(
    directory: str | os.PathLike[str],
    named_tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
    version: PolicyVersion,
    manifest: Manifest,
    *,
    max_file_bytes: int = 2 << 30,
) -> Path:
    """Write the tensors of ``manifest`` into the new directory ``directory`` and return its path.

    Files are written and flushed in a hidden sibling which is renamed at the end, so that no reader ever sees a part; a
    place where that cannot be made is refused. Their modes, and the directory's, are those that the umask gives.
    Tensors come over to the host one file (``max_file_bytes``) at a time. They are not digested again: bytes that
    differ from the manifest's are written, and refused by ``read_weights`` and ``Publisher.publish``.

    Raises:
        ContractError: the directory exists; the version carries another digest than the manifest; a tensor is missing,
            extra, has no bytes to read (``raw.flat_bytes``), or another type or shape than the manifest says. Nothing
            is left behind.
    """
    if not isinstance(max_file_bytes, int) or isinstance(max_file_bytes, bool) or max_file_bytes < 1:
        raise ContractError(f"max_file_bytes={max_file_bytes!r}; supported: a positive integer")
    check_manifest("write_weights", manifest)
    pairs = named_pairs(named_tensors, "write_weights")
    return _write(
        directory,
        version,
        manifest,
        lambda staging: {"files": _write_files(staging, pairs, manifest, max_file_bytes)},
    )


def lend_weights(
    directory: str | os.PathLike[str],
    loan: Loan,
    version: PolicyVersion,
    shape: ModelShape,
    tps: Iterable[int],
    *,
    source: Mapping[str, torch.Tensor] | None = None,
) -> Path:
    """Write the directory of a push whose tensors lie in ``loan``; it is valid until the loan is filled again.

    Args:
        tps: tensor-parallel sizes of the engines that will be given it. Shards are digested here, because the publisher
            cannot read a device's memory.
        source: what the loan was filled from, digested in its place.

    Raises:
        ContractError: the directory exists or cannot be made, the loan is closed or not filled, or the version carries
            another digest than its manifest.
    """
    manifest = loan.manifest
    source = loan if source is None else source
    shards = {}
    for tp in sorted(set(tps)):
        found = shard_digests(source, shape, tp, manifest.algorithm)
        shards[str(tp)] = [[rank, name, digest] for (rank, name), digest in found.items()]
    stated = {**loan.describe(), "algorithm": manifest.algorithm, "shards": shards}
    return _write(directory, version, manifest, lambda _: {"files": {}, "loan": stated})


def _write(
    directory: str | os.PathLike[str],
    version: PolicyVersion,
    manifest: Manifest,
    fill: Callable[[Path], dict[str, Any]],
) -> Path:
    target = path_of("a push of weights", directory)
    check_version(f"a push to {target}", version)
    with making(str(target)):
        exists = target.exists()
    if exists:
        raise ContractError(f"{target} exists; a version is written once, give a new directory")
    if not manifest.digest.startswith(version.digest):
        raise ContractError(f"version {version} does not carry the manifest's digest {manifest.digest[:12]}")
    with making(str(target)):
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
    try:
        described = {"version": f"{version.run_id}:{version.step}:{manifest.digest}", **fill(staging)}
        described["manifest"] = json.loads(manifest.to_json())
        (staging / MANIFEST_FILE).write_text(json.dumps(described, indent=1))
        files, folder = _modes(staging)
        for path in staging.iterdir():
            path.chmod(files)
            _fsync(path)
        _fsync(staging)
        staging.chmod(folder)
        staging.rename(target)
        _fsync(target.parent)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return target


class Weights(Mapping[str, torch.Tensor]):
    """The tensors of a directory, read one at a time and only when asked for. Close it, or use it as a context.

    ``algorithm`` names the digest that its shards are compared by after a push: the manifest's.
    """

    def __init__(self, path: Path, version: PolicyVersion, manifest: Manifest, files: Mapping[str, str]) -> None:
        self.path, self.version, self.manifest = path, version, manifest
        self.algorithm = manifest.algorithm
        self._files = files
        self._open: dict[str, Any] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._handle(name).get_tensor(name)

    def slice(self, name: str) -> Any:
        """A lazy slice: ``weights.slice(name)[rows, columns]`` reads those bytes only."""
        return self._handle(name).get_slice(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.manifest.names)

    def __len__(self) -> int:
        return len(self.manifest.entries)

    def shard_digests(self, shape: ModelShape, tp: int) -> dict[tuple[int, str], str]:
        """What every worker of an engine of this ``tp`` must report, see ``layout.shard_digests``."""
        return shard_digests(self, shape, tp, self.algorithm)

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].__exit__(None, None, None)

    def __enter__(self) -> "Weights":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _handle(self, name: str) -> Any:
        file = self._files[name]
        if file not in self._open:
            with reading(f"{self.path / file} cannot be read", "push again"):
                handle: Any = safe_open(self.path / file, framework="pt")
                self._open[file] = handle.__enter__()
        return self._open[file]


class LentWeights(Weights):
    """Views into memory that the trainer lends; opened when the first tensor is asked for, valid for this push only."""

    def __init__(self, path: Path, version: PolicyVersion, manifest: Manifest, loan: Mapping[str, Any]) -> None:
        super().__init__(path, version, manifest, {})
        self._loan = loan
        self._views: dict[str, torch.Tensor] | None = None

    def __getitem__(self, name: str) -> torch.Tensor:
        if self._views is None:
            self._views = Loan.open(self._loan, self.manifest)
        return self._views[name]

    def slice(self, name: str) -> Any:
        return self[name]

    def shard_digests(self, shape: ModelShape, tp: int) -> dict[tuple[int, str], str]:
        stated = self._loan["shards"].get(str(tp))
        if stated is None:
            raise ContractError(
                f"{self.path} states digests for tp {sorted(self._loan['shards'])}, an engine has tp={tp}; lend with it"
            )
        return {(int(rank), str(name)): str(digest) for rank, name, digest in stated}

    def close(self) -> None:
        self._views = None


def read_weights(
    directory: str | os.PathLike[str],
    expected: PolicyVersion | Manifest | None = None,
    *,
    check_bytes: bool = True,
) -> Weights:
    """Open a directory of ``write_weights`` and verify it.

    Args:
        expected: the version or the manifest that the directory must hold, None for any; a version's text is refused.
        check_bytes: also digest every tensor and look for NaN. A worker that reads only its slice may leave that out:
            its shard digests are compared after loading. Lent memory is never digested here, for that reason.

    Raises:
        ContractError: one error that lists every missing, extra, mis-shaped, mistyped, altered, nonfinite or
            unreadable (truncated) tensor and file, or that another version is there. ``expected`` is neither.
    """
    path = path_of("read_weights", directory)
    if expected is not None and not isinstance(expected, Manifest):
        check_version("read_weights", expected)
    version, manifest, files, loan = _read_manifest(path)
    problems: list[str] = []
    if isinstance(expected, PolicyVersion) and not expected.matches(version):
        problems.append(f"holds version {version}, expected was {expected}")
    if isinstance(expected, Manifest):
        problems += expected.differences(manifest)
    if loan is not None:
        if problems:
            raise ContractError(f"weights in {path}: " + "; ".join(problems))
        # bytes are compared after loading, shard by shard: their digests come with the loan
        return LentWeights(path, version, manifest, loan)
    weights = Weights(path, version, manifest, files)
    readable = _check_headers(weights, problems)
    if check_bytes:
        for entry, bad in described(weights.algorithm, ((name, weights[name]) for name in readable)):
            stated = manifest[entry.name].digest
            if entry.digest != stated:
                problems.append(f"{entry.name} has digest {entry.digest[:12]}, the manifest says {stated[:12]}")
            if bad:
                problems.append(f"{entry.name} holds {bad} NaN or infinite values")
    if problems:
        weights.close()
        raise ContractError(f"weights in {path}: " + "; ".join(problems))
    return weights


def _write_files(
    staging: Path, pairs: Iterable[tuple[str, torch.Tensor]], manifest: Manifest, max_file_bytes: int
) -> dict[str, str]:
    expected = {entry.name: entry for entry in manifest.entries}
    files: dict[str, str] = {}
    batch: dict[str, torch.Tensor] = {}
    problems: list[str] = []
    size = count = 0

    def flush() -> None:
        nonlocal size, count
        if batch and not problems:
            save_file(batch, staging / f"weights-{count:05d}.safetensors")
        count, size = count + 1, 0
        batch.clear()

    for name, tensor in pairs:
        entry = expected.get(name)
        if entry is None or name in files:
            problems.append(f"{name} is {'given twice' if name in files else 'not in the manifest'}")
            continue
        if problem := bytes_problem(tensor):
            problems.append(f"{name} is {problem}; the manifest says {entry.dtype} {entry.shape}")
            continue
        if DTYPES.get(tensor.dtype) != entry.dtype or tuple(tensor.shape) != entry.shape:
            given = f"{tensor.dtype} {tuple(tensor.shape)}"
            problems.append(f"{name} is {given}, the manifest says {entry.dtype} {entry.shape}")
            continue
        nbytes = tensor.numel() * tensor.element_size()
        if batch and size + nbytes > max_file_bytes:
            flush()
        files[name] = f"weights-{count:05d}.safetensors"
        batch[name] = _own_storage(tensor)
        size += nbytes
    flush()
    problems += [f"{name} is missing" for name in expected if name not in files]
    if problems:
        raise ContractError("weights do not fit their manifest: " + "; ".join(problems))
    return files


def _own_storage(tensor: torch.Tensor) -> torch.Tensor:
    # safetensors refuses tensors that share a storage, as views of a fused parameter do
    host = tensor.detach().cpu().contiguous()
    return host if host.untyped_storage().nbytes() == host.numel() * host.element_size() else host.clone()


def _read_manifest(path: Path) -> tuple[PolicyVersion, Manifest, dict[str, str], dict[str, Any] | None]:
    with reading(f"{path} holds no readable {MANIFEST_FILE}", "write it with write_weights"):
        described = read_json(path / MANIFEST_FILE)
        version = PolicyVersion.parse(described["version"])
        manifest = Manifest.from_json(json.dumps(described["manifest"]))
        files = {str(name): str(file) for name, file in described["files"].items()}
        loan = described.get("loan")
        if loan is not None:
            check_description(loan, manifest)
            for stated in loan["shards"].values():
                {(int(rank), str(name)): str(digest) for rank, name, digest in stated}
    if version.digest != manifest.digest:
        raise ContractError(f"{path}: version {version} does not carry the manifest's digest {manifest.digest[:12]}")
    if loan is None and (unlisted := [name for name in manifest.names if name not in files]):
        raise ContractError(f"{path}/{MANIFEST_FILE} names no file for {', '.join(unlisted)}")
    if outside := sorted({file for file in files.values() if Path(file).name != file}):
        raise ContractError(f"{path}/{MANIFEST_FILE} points outside its directory: {', '.join(outside)}")
    return version, manifest, files, loan


def _check_headers(weights: Weights, problems: list[str]) -> list[str]:
    # the names whose header is right and whose bytes can therefore be read
    expected = {entry.name: entry for entry in weights.manifest.entries}
    readable: list[str] = []
    present: set[str] = set()
    for file in sorted(set(weights._files.values())):
        try:
            with safe_open(weights.path / file, framework="pt") as handle:
                for name in handle.keys():  # noqa: SIM118 (not a dict)
                    entry = expected.get(name)
                    if entry is None or weights._files.get(name) != file:
                        problems.append(f"{file} holds {name}, which the manifest does not list there")
                        continue
                    present.add(name)
                    view = handle.get_slice(name)
                    dtype = _SAFETENSORS_DTYPES.get(view.get_dtype(), view.get_dtype())
                    shape = tuple(view.get_shape())
                    if (dtype, shape) == (entry.dtype, entry.shape):
                        readable.append(name)
                    else:
                        problems.append(f"{name} is {dtype} {shape}, the manifest says {entry.dtype} {entry.shape}")
        except DAMAGE as error:
            problems.append(f"{file} cannot be read ({error})")
            present |= {name for name, at in weights._files.items() if at == file}
    problems += [f"{name} is missing" for name in expected if name not in present]
    return readable


def _modes(staging: Path) -> tuple[int, int]:
    # what mkdtemp and safetensors make is private to this user, and the engine may run as another, where the umask
    # lets it: new files and directories tell, since asking for the umask would change it under other threads
    probe = staging / "probe"
    probe.mkdir()
    folder = stat.S_IMODE(probe.stat().st_mode)
    probe.rmdir()
    return stat.S_IMODE((staging / MANIFEST_FILE).stat().st_mode), folder


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
