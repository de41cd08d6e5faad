"""Weights lent instead of copied: one region of memory that the trainer fills and every engine of the host maps.

The trainer keeps one region for the whole run and fills it for each push; engines copy out of it before the push is
verified, so nothing reads it while it is being filled. A region on a GPU is opened through CUDA IPC on the device with
the same UUID, wherever CUDA_VISIBLE_DEVICES puts it; one on the host is a file that both sides map.
"""

import os
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from rl_contract import ContractError, MissingSupport
from vime_sync.digest import WEIGHT_DIGEST, check_algorithm
from vime_sync.files import path_of
from vime_sync.manifest import DTYPES, Manifest, named_pairs
from vime_sync.raw import bytes_problem

_TYPES = {name: dtype for dtype, name in DTYPES.items()}
# what any vector load needs, and whole words for digests
_ALIGN = 256


class Loan(Mapping[str, torch.Tensor]):
    """The trainer's side: ``fill`` copies one version in, ``manifest`` describes what lies there now.

    Close it, or use it as a context: the region's file then goes. It also goes when the loan is collected and when
    the process exits; a process that is killed leaves it.

    Args:
        device: where the region lies, ``cpu`` or a CUDA device; tensors from anywhere are copied in.
        folder: for ``cpu``, where the file is made (``/dev/shm``).

    Raises:
        ContractError: what names no device.
        MissingSupport: another kind of device, or a CUDA device that this process does not have.
    """

    def __init__(self, device: torch.device | str, folder: str | os.PathLike[str] = "/dev/shm") -> None:
        try:
            self.device = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise ContractError(f"Loan got device={device!r}; supported: 'cpu', or a CUDA device, 'cuda:0'") from error
        if self.device.type not in ("cpu", "cuda"):
            raise MissingSupport(f"memory of {self.device} cannot be lent; supported: cpu, cuda; write files instead")
        if self.device.type == "cuda" and (self.device.index or 0) >= torch.cuda.device_count():
            raise MissingSupport(
                f"memory of {self.device} cannot be lent: this process sees {torch.cuda.device_count()} CUDA devices; "
                "lend memory of the host with Loan('cpu')"
            )
        self._folder = path_of("Loan", folder)
        self._file: Path | None = None
        self._region: torch.Tensor | None = None
        self._shared: tuple[Any, ...] | None = None
        self._pinned = False
        self._views: dict[str, torch.Tensor] = {}
        self._offsets: dict[str, int] = {}
        self._manifest: Manifest | None = None
        self._closed = False
        self._end: weakref.finalize[Any, Loan] | None = None

    def __enter__(self) -> "Loan":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fill(
        self,
        named_tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
        *,
        algorithm: str = WEIGHT_DIGEST,
    ) -> Manifest:
        """Copy the tensors in and digest what then lies there; returns the manifest.

        What came from a GPU into memory of the host is digested where it came from, as the GPU is faster by far: what
        the copy may have done to it is found when the engines' shards are compared.

        What a failed first call was given does not bind the loan; after any other failure it holds no version until it
        is filled again.

        Raises:
            ContractError: see ``Manifest.from_tensors``; other names, types or shapes than the first time; the loan is
                closed; or there is no room for the region.
        """
        if self._closed:
            raise ContractError("this loan is closed, and engines may read it no more; make another Loan")
        pairs = _pairs(named_tensors)
        self._manifest = None
        first = self._region is None
        try:
            if first:
                self._allocate(pairs)
            held = {name: (view.dtype, view.shape) for name, view in self._views.items()}
            if {name: (t.dtype, t.shape) for name, t in pairs.items()} != held:
                raise ContractError(
                    "a loan holds one model for a whole run; other tensors were given, make another loan"
                )
            for name, tensor in pairs.items():
                self._views[name].copy_(tensor, non_blocking=True)
            if self.device.type == "cuda" or any(tensor.is_cuda for tensor in pairs.values()):
                torch.cuda.synchronize()
            on_gpus = all(tensor.is_cuda for tensor in pairs.values())
            self._manifest = Manifest.from_tensors(pairs if on_gpus else self._views, algorithm=algorithm)
        except BaseException:
            if first:
                self._release()
            raise
        return self._manifest

    @property
    def manifest(self) -> Manifest:
        if self._closed:
            raise ContractError("this loan is closed and holds no version; make another Loan")
        if self._manifest is None:
            raise ContractError("this loan holds no whole version; fill it first")
        return self._manifest

    def describe(self) -> dict[str, Any]:
        """What another process of this host needs to open the region, as JSON.

        Raises:
            ContractError: the loan holds no version, or is closed.
        """
        if self._region is None:
            raise ContractError("this loan has no region; fill it first, or make another when it is closed")
        where: dict[str, Any] = {"bytes": self._region.numel(), "offsets": self._offsets}
        if self._file is not None:
            return {"kind": "mapped", "file": str(self._file), **where}
        if self._shared is None:
            self._shared = self._region.untyped_storage()._share_cuda_()
        fields = [part.hex() if isinstance(part, bytes) else part for part in self._shared[1:]]
        return {"kind": "cuda-ipc", "gpu": gpu_uuid(self.device), "handle": fields, **where}

    def close(self) -> None:
        """End the loan for good; engines must not read it any more. A second call does nothing."""
        self._closed = True
        self._release()

    def _release(self) -> None:
        if self._pinned and self._region is not None:
            torch.cuda.cudart().cudaHostUnregister(self._region.data_ptr())
        self._views, self._offsets, self._manifest, self._region, self._shared = {}, {}, None, None, None
        self._pinned = False
        if self._end is not None:
            self._end()
        self._file, self._end = None, None

    @staticmethod
    def open(described: Mapping[str, Any], manifest: Manifest) -> dict[str, torch.Tensor]:
        """The borrower's side: views of every tensor.

        Raises:
            MissingSupport: this process cannot map the region: the GPU is not visible, or IPC is not allowed here.
        """
        region = _mapped(described) if described["kind"] == "mapped" else _borrowed(described)
        views = {}
        for entry in manifest.entries:
            dtype, start = _TYPES[entry.dtype], int(described["offsets"][entry.name])
            count = int(torch.Size(entry.shape).numel())
            views[entry.name] = region[start : start + count * dtype.itemsize].view(dtype).view(entry.shape)
        return views

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)

    def _allocate(self, pairs: Mapping[str, torch.Tensor]) -> None:
        if odd := [f"{name} is {t.dtype}" for name, t in pairs.items() if t.dtype not in DTYPES]:
            raise ContractError(f"weights that cannot be lent: {'; '.join(odd)}, supported are {sorted(_TYPES)}")
        end = 0
        for name, tensor in pairs.items():
            self._offsets[name] = end
            end += -(-tensor.numel() * tensor.element_size() // _ALIGN) * _ALIGN
        end = max(end, 1)
        if self.device.type == "cpu":
            self._file = _create(self._folder, end)
            self._end = weakref.finalize(self, _remove, self._file, os.getpid())
            self._region = torch.from_file(str(self._file), shared=True, size=end, dtype=torch.uint8)
            if any(tensor.is_cuda for tensor in pairs.values()):
                self._pinned = _pin(self._region)
        else:
            self._region = torch.zeros(end, dtype=torch.uint8, device=self.device)
        for name, tensor in pairs.items():
            size = tensor.numel() * tensor.element_size()
            part = self._region[self._offsets[name] : self._offsets[name] + size]
            self._views[name] = part.view(tensor.dtype).view(tensor.shape)


def _pairs(
    named_tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
) -> dict[str, torch.Tensor]:
    pairs: dict[str, torch.Tensor] = {}
    problems: list[str] = []
    for name, tensor in named_pairs(named_tensors, "Loan.fill"):
        if name in pairs:
            problems.append(f"{name} is given twice")
        if problem := bytes_problem(tensor):
            problems.append(f"{name} is {problem}")
        pairs[name] = tensor
    if not pairs:
        problems.append("no tensor was given")
    if problems:
        raise ContractError("weights that cannot be lent: " + "; ".join(problems))
    return pairs


def _create(folder: Path, size: int) -> Path:
    try:
        handle, file = tempfile.mkstemp(prefix="rl-parity-loan-", dir=folder)
    except OSError as error:
        raise ContractError(f"{folder} takes no file for lent memory ({error}); give another folder") from error
    try:
        # room is taken now: a full file system is an answer here and a crash at the first write
        os.posix_fallocate(handle, 0, size)
    except OSError as error:
        os.unlink(file)
        raise ContractError(f"{folder} has no room for {size} bytes of lent memory ({error}); free it") from error
    finally:
        os.close(handle)
    return Path(file)


def _remove(file: Path, owner: int) -> None:
    # a forked child inherits the loan, not the right to end it
    if os.getpid() == owner:
        file.unlink(missing_ok=True)


def check_description(described: Mapping[str, Any], manifest: Manifest) -> None:
    """Raise ValueError, KeyError or TypeError for what ``Loan.open`` could not open whatever machine it is on."""
    if described["kind"] not in ("mapped", "cuda-ipc"):
        raise ValueError(f"kind {described['kind']!r}")
    if check_algorithm(described["algorithm"], "algorithm") != manifest.algorithm:
        raise ValueError(f"algorithm {described['algorithm']!r}, the manifest's is {manifest.algorithm!r}")
    for key in ("file",) if described["kind"] == "mapped" else ("gpu", "handle"):
        described[key]
    size = int(described["bytes"])
    for entry in manifest.entries:
        dtype, start = _TYPES[entry.dtype], int(described["offsets"][entry.name])
        end = start + int(torch.Size(entry.shape).numel()) * dtype.itemsize
        if start < 0 or start % dtype.itemsize or end > size:
            raise ValueError(f"{entry.name} at {start} to {end} of {size} bytes")


def _pin(region: torch.Tensor) -> bool:
    """Let GPUs write to the pages themselves; where that is not allowed, copies are only slower."""
    runtime: Any = torch.cuda.cudart()
    if not int(runtime.cudaHostRegister(region.data_ptr(), region.numel(), 0)):
        return True
    # CUDA keeps the error for whoever looks next
    with suppress(RuntimeError):
        torch.ones(1, device="cuda").add_(1)
    return False


def gpu_uuid(device: torch.device | int) -> str:
    """``GPU-xxxxxxxx-...`` of a visible CUDA device, as nvidia-smi spells it."""
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


def _mapped(described: Mapping[str, Any]) -> torch.Tensor:
    path = Path(described["file"])
    if not path.is_file() or path.stat().st_size < int(described["bytes"]):
        raise MissingSupport(f"the lent memory {path} is not there; the trainer has gone, or runs on another host")
    return torch.from_file(str(path), shared=True, size=int(described["bytes"]), dtype=torch.uint8)


# one region a process: opening costs milliseconds, and the same handle comes with every push
_opened: dict[str, torch.Tensor] = {}


def _borrowed(described: Mapping[str, Any]) -> torch.Tensor:
    key = repr((described["gpu"], described["handle"]))
    if key in _opened:
        return _opened[key]
    devices = {gpu_uuid(i): i for i in range(torch.cuda.device_count())}
    device = devices.get(described["gpu"])
    if device is None:
        raise MissingSupport(
            f"the lent memory is on {described['gpu']}, this process sees {sorted(devices)}; "
            "add that GPU to its CUDA_VISIBLE_DEVICES, or push files"
        )
    handle, size, offset, counter, counter_offset, event, sync = (
        bytes.fromhex(part) if isinstance(part, str) else part for part in described["handle"]
    )
    try:
        with torch.cuda.device(device):
            storage = torch.UntypedStorage._new_shared_cuda(
                device, handle, size, offset, counter, counter_offset, event, sync
            )
    except RuntimeError as error:
        raise MissingSupport(
            f"CUDA IPC cannot open memory of {described['gpu']} here ({str(error).splitlines()[0]}); push files"
        ) from error
    region = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    _opened.clear()
    _opened[key] = region
    return region
