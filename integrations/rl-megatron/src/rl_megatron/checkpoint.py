"""Hugging Face checkpoints in and out, at any TP size; every defect is listed before a weight is written."""

import json
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rl_contract import ContractError
from rl_megatron import topology
from rl_megatron.checks import folder_problem
from rl_megatron.fingerprint import fingerprint
from rl_megatron.model import shard_dim
from vime_sync import layout
from vime_sync.shape import ModelShape

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_INDEX = "model.safetensors.index.json"
_WEIGHTS = "model.safetensors"
# a folder inside the one that is written, so that what a killed save leaves says what it is
_PARTIAL = "save.partial"


def read_config(path: str | Path) -> dict[str, Any]:
    """``config.json`` of a Hugging Face folder.

    Raises:
        ContractError: no path, the folder or the file is not there, or is not JSON of one mapping.
    """
    if problem := folder_problem("path", path):
        raise ContractError(f"read_config: {problem}")
    file = Path(path) / "config.json"
    try:
        return _read_mapping(file)
    except (OSError, ValueError) as error:
        raise ContractError(
            f"{file} can't be read ({error}); give a Hugging Face folder with config.json and *.safetensors"
        ) from error


def _read_mapping(file: Path) -> dict[str, Any]:
    """The JSON of a file; OSError or ValueError for every defect."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    if not isinstance(found, dict):
        raise ValueError(f"it holds {found!r:.80}, supported: a mapping")
    return found


def _read_index(file: Path) -> dict[str, str]:
    """Name of a weight file by name of a tensor; OSError or ValueError for every defect."""
    listed = _read_mapping(file).get("weight_map")
    if not isinstance(listed, dict):
        raise ValueError(f"weight_map={listed!r:.80}, supported: a mapping of tensors to files")
    if not listed:
        raise ValueError("weight_map lists no tensor")
    wrong = {name: held for name, held in listed.items() if not (isinstance(held, str) and held)}
    if wrong:
        raise ValueError(f"weight_map has {wrong!r:.200}, supported: names of files")
    return listed


class HfTensors(Mapping[str, Tensor]):
    """The tensors of a Hugging Face folder by name, read when asked.

    Raises:
        ContractError: no path, no safetensors file, one that is cut short or is none, an index that can't be read or
            names a missing file, a missing tensor or another file of it, a tensor that is in two files; as a tensor is
            read, a file that is no longer what it was, a type that torch can't read.
    """

    def __init__(self, path: str | Path) -> None:
        if problem := folder_problem("path", path):
            raise ContractError(f"HfTensors: {problem}")
        folder = Path(path)
        index = folder / _INDEX
        listed: dict[str, str] = {}
        try:
            # a link to nothing is an index that can't be read
            if os.path.lexists(index):
                listed = _read_index(index)
        except (OSError, ValueError) as error:
            raise ContractError(
                f"checkpoint {folder}: {_INDEX} can't be read ({error}); give a complete Hugging Face folder"
            ) from error
        if not os.path.isdir(folder):
            raise ContractError(f"checkpoint {str(folder)!r} is no folder; give a complete Hugging Face folder")
        files = sorted(set(listed.values())) or sorted(f.name for f in folder.glob("*.safetensors"))
        problems = [f"{name} is not there" for name in files if not os.path.isfile(folder / name)]
        if not files:
            killed = os.path.lexists(folder / _PARTIAL)
            left = f" ({_PARTIAL} is what a save that was killed has left)" if killed else ""
            problems.append(f"no *.safetensors file{left}")
        self._files: dict[str, Path] = {}
        self._states: dict[Path, tuple[int, ...] | None] = {}
        found = {name: folder / name for name in files if os.path.isfile(folder / name)}
        for name, file in found.items():
            self._states[file] = _state(file)
            try:
                with safe_open(file, framework="pt") as handle:
                    keys = list(handle.keys())
            except (SafetensorError, OSError) as error:
                problems.append(f"{name} can't be read ({error})")
                continue
            for key in keys:
                if key in self._files:
                    problems.append(f"{key} is in {self._files[key].name} and in {name}")
                self._files[key] = file
        for key, name in listed.items():
            if key not in self._files:
                problems.append(f"{_INDEX} lists {key}, no file has it")
            elif self._files[key] != folder / name:
                problems.append(f"{_INDEX} lists {key} in {name}, it is in {self._files[key].name}")
        if problems:
            raise ContractError(f"checkpoint {folder}: {'; '.join(problems)}; give a complete Hugging Face folder")
        self._found = found

    def fingerprints(self) -> dict[str, str]:
        """``fingerprint`` of each weight file, by its name in the folder."""
        found = {}
        for name, file in self._found.items():
            try:
                found[name] = fingerprint(file)
            except (OSError, ValueError) as error:
                raise self._unread(file, name, error) from error
        return found

    def __getitem__(self, name: str) -> Tensor:
        try:
            with safe_open(self._files[name], framework="pt") as handle:
                return handle.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise self._unread(self._files[name], name, error) from error

    def _unread(self, file: Path, what: str, error: Exception) -> ContractError:
        if self._states[file] != _state(file):
            return ContractError(
                f"{file} can't be read any more ({error}); leave a checkpoint alone while it is loaded, and load it "
                "again"
            )
        return ContractError(
            f"{what} of {file} can't be read ({error}); supported: bfloat16, float16, float32, in a file that this "
            "process may read; give such a checkpoint"
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def __contains__(self, name: object) -> bool:
        return name in self._files


def _state(file: Path) -> tuple[int, ...] | None:
    """What tells that a file has been written or replaced; None where it is gone."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def open_hf(path: str | Path) -> HfTensors:
    """The weights of a Hugging Face folder, once every rank of the world has found the same ones in its own.

    Ranks compare names, sizes and fingerprints of the weight files (see ``rl_megatron.fingerprint``, which says what is
    read of a file); every rank must call it. A rank alone compares nothing.

    Raises:
        ContractError: as ``HfTensors``, on every rank if on one; ranks whose files differ, on every rank, naming the
            first one and the files.
    """

    def look() -> tuple[HfTensors, dict[str, str]]:
        tensors = HfTensors(path)
        return tensors, tensors.fingerprints() if topology.ranks() > 1 else {}

    tensors, found = topology.together(look)
    topology.agree({f"checkpoint file {name}": said for name, said in found.items()})
    return tensors


def check_hf(tensors: Mapping[str, Tensor], shape: ModelShape) -> None:
    """Raise one ContractError that lists every missing, extra, mis-shaped, unreadable, non-float or non-finite tensor.

    The shapes of a checkpoint with an unreadable one are not looked at.
    """
    problems = []
    try:
        layout.check_hf(tensors, shape)
    except ContractError as error:
        problems.append(str(error))
    for name in sorted(tensors):
        try:
            tensor = tensors[name]
        except ContractError as error:
            # of a file that is gone, the same for each of its tensors
            if str(error) not in problems:
                problems.append(str(error))
            continue
        if tensor.dtype not in FLOATS:
            problems.append(f"{name} is {tensor.dtype}, supported: bfloat16, float16, float32")
        elif not bool(torch.isfinite(tensor).all()):
            count = int((~torch.isfinite(tensor)).sum())
            problems.append(f"{name} has {count} NaN or infinite value{'s' if count > 1 else ''}")
    if problems:
        raise ContractError("; ".join(problems) + "; fix or download the checkpoint again, no weight was loaded")


def load_hf(model: GPTModel, path: str | Path) -> None:
    """Load a Hugging Face folder into this rank's part of the model; every rank must call it.

    A tensor of another float type than the model's is rounded once, to nearest even.

    Raises:
        ContractError: every defect of the checkpoint, before this rank writes anything, on every rank if on one; ranks
            whose folders differ, see ``open_hf``.
    """
    tensors = open_hf(path)
    topology.together(lambda: load_tensors(model, tensors))


def load_tensors(model: GPTModel, tensors: Mapping[str, Tensor]) -> None:
    """As ``load_hf``, from tensors by Hugging Face name, of this rank alone: nothing is asked of the others."""
    built = model.rl
    shape = model_shape(model)
    check_hf(tensors, shape)
    local = layout.from_hf(
        tensors,
        shape,
        # no communicator, which ranks make together, in what one of them may refuse
        parallel_state.get_tensor_model_parallel_rank(),
        built.parallel.tp,
        padded_vocab=built.padded_vocab,
        # TransformerEngine keeps a layer's norms in its linear modules
        norms="fused" if built.native_operators == "te" else "local",
    )
    parameters = dict(model.named_parameters())
    if parameters.keys() != local.keys():
        raise ContractError(
            f"the model's parameters and the mapping differ in {sorted(parameters.keys() ^ local.keys())}; "
            "this megatron-core names them in a way that is not supported"
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(local[name])


def export_hf(model: GPTModel) -> dict[str, Tensor] | None:
    """Copies of the weights by Hugging Face name, in the model's type, on tensor parallel rank 0; elsewhere None.

    Every tensor parallel rank must call it. Nothing is computed or cast, so bits survive the round trip.
    """
    comm = topology.tensor_parallel()
    joined: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        dim = shard_dim(name)
        data = parameter.detach()
        whole = data if dim is None else comm.all_gather(data.contiguous(), dim=dim)
        if comm.rank == 0:
            joined[name] = whole
    if comm.rank:
        return None
    return {name: t.clone() for name, t in layout.to_hf(joined, model_shape(model), comm.world_size)}


def save_hf(model: GPTModel, path: str | Path, hf_config: Mapping[str, Any]) -> None:
    """Write ``config.json`` and ``model.safetensors``; every rank must call it, the first one writes, all wait for it.

    Both are written into ``save.partial`` in the folder, with the mode that the umask gives to new files; then the
    config and last the weights take their places, each as a whole. A save that fails leaves no weights, one that is
    killed leaves none beside ``save.partial``; both may be made again.

    Raises:
        ContractError: no path, the folder already holds weights or their index or cannot be written to, a config that
            is no JSON; on every rank if on one.
    """

    def prepare() -> tuple[Path, str]:
        if problem := folder_problem("path", path):
            raise ContractError(f"save_hf: {problem}")
        try:
            held = [*Path(path).glob("*.safetensors"), *Path(path).glob(_INDEX)]
        except OSError as error:
            raise ContractError(f"{path} can't be read ({error}); give a folder that can be written to") from error
        if held:
            raise ContractError(f"{path} already holds weights ({held[0].name}); give an empty or new folder")
        if not isinstance(hf_config, Mapping):
            raise ContractError(f"save_hf: hf_config={hf_config!r:.80}, supported: a mapping, what config.json holds")
        try:
            return Path(path), json.dumps(dict(hf_config), indent=1)
        except (TypeError, ValueError, RecursionError) as error:
            raise ContractError(f"save_hf: hf_config is no JSON ({error}); give what config.json holds") from error

    # every rank looks before the first one writes
    folder, config = topology.together(prepare)
    tensors = export_hf(model)

    def write() -> None:
        if tensors is None or parallel_state.get_context_parallel_rank():
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ContractError(f"{folder} cannot be made ({error}); give a folder that can be written to") from error
        try:
            _write_folder(folder, tensors, config)
        except (OSError, SafetensorError) as error:
            raise ContractError(
                f"{folder} cannot be written to ({error}); give a folder that can, with room for the weights"
            ) from error

    topology.together(write)


def _write_folder(folder: Path, tensors: Mapping[str, Tensor], config: str) -> None:
    partial = folder / _PARTIAL
    # of a save that was killed
    if partial.is_dir():
        shutil.rmtree(partial)
    partial.mkdir()
    try:
        save_file(dict(tensors), partial / _WEIGHTS, metadata={"format": "pt"})
        (partial / "config.json").write_text(config, encoding="utf-8")
        # safetensors writes what only its owner may read
        (partial / _WEIGHTS).chmod(stat.S_IMODE((partial / "config.json").stat().st_mode))
        (partial / "config.json").replace(folder / "config.json")
        (partial / _WEIGHTS).replace(folder / _WEIGHTS)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def model_shape(model: GPTModel) -> ModelShape:
    """vime-sync's description of the model."""
    c = model.rl.config
    return ModelShape(
        architecture=c.architecture,
        layers=c.num_layers,
        hidden=c.hidden_size,
        ffn=c.intermediate_size,
        heads=c.num_heads,
        kv_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        vocab_size=c.vocab_size,
        tied=c.tied,
        qk_norm=c.qk_norm,
        qkv_bias=False,
    )
