"""What ranks compare of their weight files before they load them: another training step shows, little is read."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl_megatron import OptimizerConfig, TrainerRank
from rl_megatron.checkpoint import HfTensors
from rl_megatron.fingerprint import BLOCK, BLOCKS, fingerprint


def test_one_training_step_changes_the_fingerprint_and_nothing_else_does(tiny: Any, tmp_path: Path) -> None:
    config = tiny.tiny_config()
    folder = tiny.write_folder(tmp_path / "model", config, tiny.tiny_tensors(config))
    trainer = TrainerRank(
        rank=0, init_method=f"file://{tmp_path}/init", hf_path=folder, profile=tiny.tiny_profile(config),
        optimizer=OptimizerConfig(lr=1e-6), threads=None,
    )  # fmt: skip
    try:
        trainer.init()
        trainer.save(tmp_path / "before")
        trainer.save(tmp_path / "same")
        samples = tiny.tiny_samples(97, ((3, 5), (1, 1)))
        trainer.train_step(samples, [1.0, -0.5], trainer.logprobs(samples))
        trainer.save(tmp_path / "after")
    finally:
        trainer.close()
    before, same, after = (tmp_path / name / "model.safetensors" for name in ("before", "same", "after"))
    assert fingerprint(before) == fingerprint(same)
    assert before.stat().st_size == after.stat().st_size
    header = 8 + int.from_bytes(before.read_bytes()[:8], "little")
    assert before.read_bytes()[:header] == after.read_bytes()[:header], "only values can tell the files apart"
    changed = sum(
        int((x.view(torch.int16) != y.view(torch.int16)).sum())
        for x, y in zip(load_file(before).values(), load_file(after).values())
    )
    assert 0 < changed < 0.1 * before.stat().st_size / 2, "few values of a small step survive the rounding to bf16"
    assert fingerprint(before) != fingerprint(after)
    assert HfTensors(tmp_path / "after").fingerprints() == {"model.safetensors": fingerprint(after)}


def test_a_fingerprint_covers_both_ends_of_every_tensor_and_small_ones_whole(tmp_path: Path) -> None:
    tensors = {
        "large": torch.zeros(1 << 18, dtype=torch.uint8),
        "small": torch.zeros(BLOCKS * BLOCK, dtype=torch.uint8),
        "none": torch.zeros(0),
    }
    save_file(tensors, tmp_path / "zeros")
    found = [fingerprint(tmp_path / "zeros")]
    step = ((1 << 18) - BLOCK) / (BLOCKS - 1)
    places = [("large", int(i * step) + at) for i in range(BLOCKS) for at in (0, BLOCK - 1)]
    places += [("small", at) for at in range(0, BLOCKS * BLOCK, 997)]
    for name, at in places:
        tensors[name][at] = 1
        save_file(tensors, tmp_path / "one")
        tensors[name][at] = 0
        found.append(fingerprint(tmp_path / "one"))
    save_file({("larger" if n == "large" else n): x for n, x in tensors.items()}, tmp_path / "renamed")
    save_file(tensors | {"none": torch.zeros(0, 2)}, tmp_path / "shape")
    found += [fingerprint(tmp_path / "renamed"), fingerprint(tmp_path / "shape")]
    assert len(set(found)) == len(found)
    # what lies between two blocks is not looked at, which the docstring says
    tensors["large"][BLOCK + 1] = 1
    save_file(tensors, tmp_path / "between")
    assert fingerprint(tmp_path / "between") == found[0]


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="no count of bytes read")
def test_a_large_file_is_not_read_whole(tmp_path: Path) -> None:
    size = 4 << 30
    places = [[i * size // 4, (i + 1) * size // 4] for i in range(4)]
    entries = {f"w{i}": {"dtype": "U8", "shape": [size // 4], "data_offsets": at} for i, at in enumerate(places)}
    header = json.dumps(entries).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        # a hole, which takes no room
        file.truncate(8 + len(header) + size)

    def read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    tensors = HfTensors(tmp_path)
    before = read()
    tensors.fingerprints()
    assert 4 * BLOCKS * BLOCK <= read() - before < 4 * BLOCKS * BLOCK + 65536
