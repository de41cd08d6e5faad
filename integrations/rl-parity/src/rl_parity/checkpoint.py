"""What a checkpoint folder holds, read from the safetensors headers without loading it; its faults listed at once."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from rl_contract import ContractError

_FLOATS = ("BF16", "F32")


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
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ContractError(f"{path} is not JSON ({error}); save the checkpoint again") from None
    if not isinstance(config, dict):
        raise ContractError(f"{path} holds {type(config).__name__}, not an object; save the checkpoint again")
    return config


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

    if not weight_files(folder):
        return [f"--model {folder}: no *.safetensors there; save the checkpoint with safe_serialization=True"]
    expected = dict(ModelShape.from_hf_config(config).hf_shapes())
    tied = bool(config.get("tie_word_embeddings", False))
    found: list[str] = []
    seen: dict[str, str] = {}
    try:
        for name, shape, dtype, path in headers(folder):
            if name in seen:
                found.append(f"checkpoint: {name} is in {seen[name]} and in {path.name}; keep one")
            seen[name] = path.name
            if name not in expected:
                if not (tied and name == "lm_head.weight"):
                    found.append(f"checkpoint: unexpected tensor {name}; the config.json does not describe it")
            elif shape != expected[name]:
                found.append(f"checkpoint: {name} has shape {shape}, the config.json needs {expected[name]}")
            if dtype not in _FLOATS:
                found.append(f"checkpoint: {name} is {dtype}, supported are bfloat16 and float32; convert it")
        found += [
            f"checkpoint: tensor {name} is missing; save the whole model" for name in expected if name not in seen
        ]
        found += _nonfinite(folder)
    except (SafetensorError, OSError) as error:
        found.append(f"checkpoint {folder} can't be read: {error}; copy it again")
    return found


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
