"""As ``decode``, with all 36 layers of Qwen3-8B."""

from collections.abc import Iterator
from typing import Any

from two_gpu_parts import decode


def run(rank: int, folder: str, settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from decode.run(rank, folder, {**settings, "layers": 36})
