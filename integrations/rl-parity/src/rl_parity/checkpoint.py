"""What a checkpoint folder holds, read from the safetensors headers without loading it; its faults listed at once."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from rl_contract import ContractError
from rl_parity.jsonfile import read_object

_FLOATS = {"BF16": "bfloat16", "F32": "float32"}
_AGAIN = "save the checkpoint again"
INDEX = "model.safetensors.index.json"


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's ``config.json``.

    Raises:
        ContractError: no such folder or file, or no JSON object in it.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ContractError(
            f"--model {folder}: no config.json there; give a Hugging Face checkpoint folder, tiny-qwen3 or tiny-llama"
        )
    return read_object(path, _AGAIN)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, sorted by name."""
    return sorted(folder.glob("*.safetensors"))


def headers(folder: Path) -> Iterator[tuple[str, tuple[int, ...], str, Path]]:
    """(name, shape, safetensors dtype, file) of every tensor."""
    from safetensors import safe_open

    for path in weight_files(folder):
        with safe_open(str(path), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                piece = file.get_slice(name)
                yield name, tuple(piece.get_shape()), piece.get_dtype(), path


def size_in_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in weight_files(folder))


def problems(folder: Path, config: dict[str, Any]) -> list[str]:
    """Every missing, extra, mis-shaped, mixed-type or nonfinite tensor of a checkpoint, one line each."""
    from safetensors import SafetensorError

    from vime_sync.layout import ModelShape

    index = _index_problems(folder)
    if not weight_files(folder):
        return [f"--model {folder}: no *.safetensors there; save the checkpoint with safe_serialization=True"]
    model = ModelShape.from_hf_config(config)
    expected, tied = dict(model.hf_shapes()), model.tied
    found: list[str] = index
    seen: dict[str, str] = {}
    needed = config_dtype(config)
    others: dict[str, list[str]] = {}
    try:
        for name, shape, dtype, path in headers(folder):
            if name in seen:
                found.append(f"checkpoint: {name} is in {seen[name]} and in {path.name}; keep one")
            seen[name] = path.name
            if name not in expected:
                if not (tied and name == "lm_head.weight"):
                    found.append(f"checkpoint: unexpected tensor {name}; the config.json does not describe it")
                elif shape != (embedding := expected["model.embed_tokens.weight"]):
                    found.append(
                        f"checkpoint: {name} has shape {shape}, the embedding that config.json ties it to {embedding}"
                    )
            elif shape != expected[name]:
                found.append(f"checkpoint: {name} has shape {shape}, the config.json needs {expected[name]}")
            if dtype not in _FLOATS:
                found.append(f"checkpoint: {name} is {dtype}, supported are bfloat16 and float32; convert it")
            elif _FLOATS[dtype] != needed:
                others.setdefault(_FLOATS[dtype], []).append(name)
        found += [
            f"checkpoint: {len(names)} of {len(seen)} tensors are {dtype} ({', '.join(names[:3])}"
            f"{', ...' if len(names) > 3 else ''}), the dtype of config.json is {needed} (bfloat16 where it states "
            "none); convert them, or state theirs if all are alike"
            for dtype, names in others.items()
        ]
        found += [
            f"checkpoint: tensor {name} is missing; save the whole model" for name in expected if name not in seen
        ]
        found += _nonfinite(folder)
        if tied and not found and "lm_head.weight" in seen and not _same_bits(folder, seen):
            found.append(
                "checkpoint: lm_head.weight differs from model.embed_tokens.weight, config.json ties them; "
                "remove it, or set tie_word_embeddings to false"
            )
    except (SafetensorError, OSError) as error:
        found.append(f"checkpoint {folder} can't be read: {error}; copy it again")
    return found


def config_dtype(config: dict[str, Any]) -> str:
    """The type that ``config.json`` states for its weights; bfloat16 where it states none, as the profile has it."""
    return str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")


def _index_problems(folder: Path) -> list[str]:
    """Files and tensors that ``model.safetensors.index.json`` names and the folder lacks."""
    from safetensors import SafetensorError

    path = folder / INDEX
    if not path.is_file():
        return []
    try:
        named = {str(name): str(file) for name, file in read_object(path, _AGAIN)["weight_map"].items()}
    except (ContractError, KeyError, AttributeError) as error:
        return [f"checkpoint: {INDEX} can't be read ({type(error).__name__}: {error}); save the checkpoint again"]
    gone = sorted(file for file in set(named.values()) if not (folder / file).is_file())
    found = [f"checkpoint: {INDEX} names {file}, which is missing; copy the whole checkpoint" for file in gone]
    try:
        held = {(name, file.name) for name, _, _, file in headers(folder)}
    except (SafetensorError, OSError):
        # the reading of the weights names the file
        return found
    found += [
        f"checkpoint: {INDEX} places {name} in {file}, which does not hold it; save the checkpoint again"
        for name, file in named.items()
        if file not in gone and (name, file) not in held
    ]
    found += [
        f"checkpoint: {name} in {file} is not in {INDEX}; remove that file or save the checkpoint again"
        for name, file in sorted(held)
        if name not in named
    ]
    return found


def _same_bits(folder: Path, files: dict[str, str]) -> bool:
    """Whether head and embedding are the same bytes."""
    from safetensors import safe_open

    pair = []
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        with safe_open(str(folder / files[name]), framework="pt") as file:
            pair.append(file.get_tensor(name).view(torch.uint8))
    return torch.equal(*pair)


def _nonfinite(folder: Path) -> list[str]:
    from safetensors import safe_open

    found = []
    for path in weight_files(folder):
        with safe_open(str(path), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                tensor = file.get_tensor(name)
                if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                    bad = int((~torch.isfinite(tensor)).sum())
                    found.append(f"checkpoint: {name} holds {bad} NaN or infinite values; use an undamaged checkpoint")
    return found
