"""Hugging Face folders in and out: every defect at once, nothing half-written, the round trip bit for bit."""

import json
import os
import re
import stat
import struct
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from rl_contract import ContractError
from rl_megatron import ParallelConfig, TrainerRank, build_model, checkpoint, load_hf, save_hf
from rl_megatron.checkpoint import HfTensors, export_hf, load_tensors, read_config

MODELS = [("Qwen3ForCausalLM", False), ("LlamaForCausalLM", True)]


def build(tiny: Any, config: dict[str, Any], mode: Any = "strict") -> Any:
    return build_model(config, tiny.tiny_profile(config), ParallelConfig(), mode=mode)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n].view(torch.int16), b[n].view(torch.int16)) for n in a)


@pytest.mark.field_report("R65")
@pytest.mark.parametrize("mode", ["strict", "native"])
@pytest.mark.parametrize(("arch", "tied"), MODELS)
def test_round_trip_keeps_every_bit(
    one_rank: None, tiny: Any, tmp_path: Path, arch: str, tied: bool, mode: str
) -> None:
    config = tiny.tiny_config(arch, tie_word_embeddings=tied)
    tensors = tiny.tiny_tensors(config)
    tensors["model.embed_tokens.weight"][0, 0] = -0.0
    folder = tiny.write_folder(tmp_path / "in", config, tensors)
    model = build(tiny, config, mode)
    load_hf(model, folder)
    exported = export_hf(model)
    assert exported is not None
    assert same(exported, tensors)
    save_hf(model, tmp_path / "out", config)
    assert same(load_file(tmp_path / "out" / "model.safetensors"), tensors)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config
    with pytest.raises(ContractError, match="already holds weights"):
        save_hf(model, tmp_path / "out", config)
    (tmp_path / "file").touch()
    for wrong in (tmp_path / "file", tmp_path / "file" / "x"):
        with pytest.raises(ContractError, match=r"cannot be made.*give a folder"):
            save_hf(model, wrong, config)
    for wrong in (None, "", 3):
        with pytest.raises(ContractError, match=r"save_hf: path=.*supported: a path"):
            save_hf(model, wrong, config)


def test_sharded_index_is_read_and_checked(one_rank: None, tiny: Any, tmp_path: Path) -> None:
    config = tiny.tiny_config()
    tensors = tiny.tiny_tensors(config)
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in parts.items():
        save_file({n: tensors[n] for n in held}, tmp_path / file)
    index = {"weight_map": {n: file for file, held in parts.items() for n in held}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    model = build(tiny, config)
    load_hf(model, tmp_path)
    assert same(export_hf(model) or {}, tensors)
    index["weight_map"]["model.norm.weight2"] = "a.safetensors"
    index["weight_map"]["x"] = "c.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ContractError) as error:
        HfTensors(tmp_path)
    assert "model.norm.weight2" in str(error.value)
    assert "c.safetensors is not there" in str(error.value)


def test_every_defect_is_listed_and_nothing_is_written(one_rank: None, tiny: Any) -> None:
    config = tiny.tiny_config()
    tensors = tiny.tiny_tensors(config)
    model = build(tiny, config)
    del tensors["model.layers.0.mlp.up_proj.weight"]
    tensors["model.layers.7.mlp.up_proj.weight"] = torch.zeros(1)
    tensors["model.norm.weight"] = torch.ones(64, dtype=torch.bfloat16)
    tensors["lm_head.weight"][3, 5] = float("nan")
    tensors["model.layers.1.input_layernorm.weight"][0] = float("inf")
    tensors["model.layers.1.self_attn.q_proj.weight"] = tensors["model.layers.1.self_attn.q_proj.weight"].to(torch.int8)
    with pytest.raises(ContractError) as error:
        load_tensors(model, tensors)
    for part in (
        "missing model.layers.0.mlp.up_proj.weight",
        "unknown model.layers.7.mlp.up_proj.weight",
        "model.norm.weight has shape (64,)",
        "lm_head.weight has 1 NaN",
        "model.layers.1.input_layernorm.weight has 1 NaN or infinite",
        "torch.int8",
    ):
        assert part in str(error.value)
    assert all(torch.isnan(p).all() for p in model.parameters())


@pytest.mark.field_report("R43")
def test_padding_rows_of_the_vocabulary_are_zero(one_rank: None, tiny: Any) -> None:
    config = tiny.tiny_config()
    model = build(tiny, config)
    load_tensors(model, tiny.tiny_tensors(config))
    for weight in (model.embedding.word_embeddings.weight, model.output_layer.weight):
        assert weight.shape[0] == model.rl.padded_vocab > config["vocab_size"]
        assert not weight[config["vocab_size"] :].any()


def test_wider_checkpoint_is_rounded_once(one_rank: None, tiny: Any) -> None:
    config = tiny.tiny_config("LlamaForCausalLM")
    tensors = tiny.tiny_tensors(config, dtype=torch.float32)
    model = build(tiny, config)
    load_tensors(model, tensors)
    assert same(export_hf(model) or {}, {n: t.bfloat16() for n, t in tensors.items()})


def test_trainer_refuses_before_it_joins_a_world(tiny: Any, tmp_path: Path) -> None:
    config = tiny.tiny_config()
    folder = tiny.write_folder(tmp_path / "model", config, tiny.tiny_tensors(config))
    unreachable = "tcp://127.0.0.1:1"
    profile = tiny.tiny_profile(config)

    def trainer(**kwargs: Any) -> TrainerRank:
        return TrainerRank(**({"rank": 0, "init_method": unreachable, "hf_path": folder, "profile": profile} | kwargs))

    with pytest.raises(ContractError, match="leaves=4"):
        trainer(parallel=ParallelConfig(tp=8)).init()
    with pytest.raises(ContractError, match=r"config\.json can't be read"):
        trainer(hf_path=str(tmp_path / "nowhere")).init()
    with pytest.raises(ContractError, match="rank 3"):
        trainer(rank=3, parallel=ParallelConfig(tp=2)).init()
    with pytest.raises(ContractError, match="call init"):
        trainer().logprobs([([1], [2])])
    for wrong in (
        *({"token_budget": x} for x in (-5, 0, 2.5, True)),
        *({"threads": x} for x in (0, -1, 1.0, True)),
        *({"keep_logits": x} for x in (-1, None)),
        *({"mode": "fast"}, {"rank": -1}, {"rank": "0"}),
        *({"parallel": "tp=1"}, {"parallel": ""}, {"parallel": {"tp": 1}}, {"optimizer": "adam"}, {"loss": "x"}),
        *({"hf_path": x} for x in (None, "", 3)),
        *({"init_method": x} for x in ("foo", None, "", 3)),
        *({"profile": "p.json"}, {"share_gpu": 1}, {"share_gpu": True}, {"recompute_modules": "mlp"}),
    ):
        ((name, value),) = wrong.items()
        with pytest.raises(ContractError, match=re.escape(f"{name}={value!r}, supported")):
            trainer(**wrong)
    with pytest.raises(ContractError, match=r"token_budget=-5.*threads=0"):
        trainer(token_budget=-5, threads=0)
    trainer(token_budget=None, threads=None)


def test_a_file_that_is_cut_short_or_is_none_is_refused_with_the_others(tiny: Any, tmp_path: Path) -> None:
    config = tiny.tiny_config()
    whole = Path(tiny.write_folder(tmp_path, config, tiny.tiny_tensors(config))) / "model.safetensors"
    (tmp_path / "a.safetensors").write_bytes(whole.read_bytes()[:-1])
    (tmp_path / "b.safetensors").write_bytes(b"none")
    with pytest.raises(
        ContractError, match=r"a\.safetensors can't be read \(.*; b\.safetensors can't be read \(.*; give"
    ):
        HfTensors(tmp_path)


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("written", "words"),
    [
        (b"{}", r"weight_map=None, supported: a mapping of tensors to files"),
        (b"null", "it holds None, supported: a mapping"),
        (b"[1]", r"it holds \[1\], supported: a mapping"),
        (b'{"weight_map": {"a": "model.sa', "Unterminated string"),
        (b"", "Expecting value"),
        (b'{"weight_map": []}', r"weight_map=\[\], supported: a mapping"),
        (b'{"weight_map": {}}', "weight_map lists no tensor"),
        (b'{"weight_map": {"x": 7}}', r"weight_map has {'x': 7}, supported: names of files"),
        (b'{"weight_map": {"x": ""}}', r"weight_map has {'x': ''}"),
        (b'{"weight_map": {"x": ["model.safetensors"]}}', r"weight_map has {'x': \['model.safetensors'\]}"),
        (b"\xff\xfe\x00", "'utf-8' codec can't decode"),
        (b"[" * 100_000, "nested too deep"),
    ],
)
def test_an_index_that_is_none_is_refused_by_name(tiny: Any, tmp_path: Path, written: bytes, words: str) -> None:
    config = tiny.tiny_config()
    tiny.write_folder(tmp_path, config, {"x": torch.ones(2)})
    (tmp_path / INDEX).write_bytes(written)
    said = re.escape(f"checkpoint {tmp_path}: {INDEX} can't be read (")
    with pytest.raises(ContractError, match=rf"{said}.*{words}.*; give a complete Hugging Face folder"):
        HfTensors(tmp_path)


def test_an_index_that_is_no_file_or_names_another_file_is_refused(tiny: Any, tmp_path: Path) -> None:
    config = tiny.tiny_config()
    tiny.write_folder(tmp_path, config, {"x": torch.ones(2), "y": torch.ones(2)})
    save_file({"z": torch.ones(2)}, tmp_path / "b.safetensors")
    (tmp_path / INDEX).symlink_to(tmp_path / "blob")
    with pytest.raises(ContractError, match=r"index\.json can't be read \(.*No such file"):
        HfTensors(tmp_path)
    (tmp_path / INDEX).unlink()
    listed = {"x": "model.safetensors", "y": "b.safetensors", "z": "b.safetensors", "\0": "a\0b"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": listed}))
    with pytest.raises(ContractError) as error:
        HfTensors(tmp_path)
    assert f"{INDEX} lists y in b.safetensors, it is in model.safetensors" in str(error.value)
    assert "a\0b is not there" in str(error.value)
    (tmp_path / INDEX).unlink()
    (tmp_path / INDEX).mkdir()
    with pytest.raises(ContractError, match=r"index\.json can't be read \(.*Is a directory"):
        HfTensors(tmp_path)
    for wrong, words in (
        (tmp_path / "none", "none' is no folder; give a complete"),
        ("a" * 5000, "is no folder; give a complete"),
        ("a\0b", r"HfTensors: path='a\\x00b', supported: a path"),
        (tmp_path / "model.safetensors", "is no folder"),
        (None, "HfTensors: path=None, supported: a path"),
        ("", "HfTensors: path='', supported: a path"),
    ):
        with pytest.raises(ContractError, match=words):
            HfTensors(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("written", "words"),
    [
        (b"\xff\xfe\x00", "'utf-8' codec can't decode"),
        (b'{"hidden', "Unterminated string"),
        (b"", "Expecting value"),
        (b"null", "it holds None, supported: a mapping"),
        (b"[]", r"it holds \[\], supported: a mapping"),
        (b"[" * 100_000, "nested too deep"),
    ],
)
def test_a_config_that_is_none_is_refused_by_name(tmp_path: Path, written: bytes, words: str) -> None:
    (tmp_path / "config.json").write_bytes(written)
    said = re.escape(f"{tmp_path}/config.json can't be read (")
    with pytest.raises(ContractError, match=rf"{said}.*{words}.*; give a Hugging Face folder"):
        read_config(tmp_path)
    for wrong in (None, "", 3, "a\0b"):
        with pytest.raises(ContractError, match=r"read_config: path=.*, supported: a path"):
            read_config(wrong)  # type: ignore[arg-type]
    with pytest.raises(ContractError, match=r"config\.json can't be read \(.*File name too long"):
        read_config("a" * 5000)


def test_a_file_that_changes_while_it_is_loaded_is_refused_by_name(tiny: Any, tmp_path: Path) -> None:
    config = tiny.tiny_config()
    file = Path(tiny.write_folder(tmp_path, config, {"x": torch.ones(2)})) / "model.safetensors"
    tensors = HfTensors(tmp_path)
    assert torch.equal(tensors["x"], torch.ones(2))
    whole = file.read_bytes()
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    places: list[object] = [[0], [0, 9], [8, 0], [-1, 8], [0, 2**70], [False, True], ["0", "8"], [0.0, 8.0], "08", None]
    headers: list[object] = [[1, 2], 3, {"x": 3}, {"x": {}}, *({"x": entry | {"data_offsets": at}} for at in places)]
    written = [with_header(json.dumps(header).encode()) for header in headers]
    written += [with_header(junk) for junk in (b"\xff", b"[" * 100_000, b'{"x": ' + b"9" * 5000 + b"}")]
    written += [struct.pack("<Q", length) for length in (2**62, 2**64 - 1)]
    written += [whole[:-1], b"none", b""]
    changes: list[Callable[[], object]] = [partial(file.write_bytes, held) for held in written]
    for change in (*changes, lambda: huge(file), file.unlink):
        change()
        for read in (lambda: tensors["x"], tensors.fingerprints):
            with pytest.raises(
                ContractError, match=r"model\.safetensors can't be read any more \(.*; leave a checkpoint"
            ):
                read()


def with_header(header: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + bytes(8)


def huge(file: Path) -> None:
    """A header of more bytes than safetensors reads, in a file of as many: a hole, which takes no room."""
    file.write_bytes(struct.pack("<Q", 1 << 40))
    os.truncate(file, 8 + (1 << 40))


def test_a_type_that_torch_has_not_is_named_as_such(tiny: Any, one_rank: None, tmp_path: Path) -> None:
    config, tensors, model = tiny.tiny_model("Qwen3ForCausalLM", False)
    file = Path(tiny.write_folder(tmp_path, config, tensors)) / "model.safetensors"
    packed = {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}
    entries = {
        "a": packed,
        "b": packed | {"data_offsets": [3, 6]},
        "c": packed | {"data_offsets": [6, 8], "dtype": "I16", "shape": [1]},
    }
    file.write_bytes(with_header(json.dumps(entries).encode()))
    found = HfTensors(tmp_path)
    assert len(found.fingerprints()) == 1
    said = "{0} of {1} can't be read (Dtype not understood: F6_E2M3); supported: bfloat16, float16, float32"
    with pytest.raises(ContractError, match=re.escape(said.format("a", file))):
        found["a"]
    with pytest.raises(ContractError) as error:
        load_hf(model, tmp_path)
    for words in (said.format("a", file), said.format("b", file), "c is torch.int16", "no weight was loaded"):
        assert str(error.value).count(words) == 1
    assert "any more" not in str(error.value)


def test_a_save_that_can_not_be_is_refused_by_name_and_leaves_no_weights(
    one_rank: None, tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, _, model = tiny.tiny_model("Qwen3ForCausalLM", False)
    for wrong, words in (
        ("/proc/self", r"/proc/self cannot be written to \(.*; give a folder that can"),
        ("a\0b", r"save_hf: path='a\\x00b', supported: a path"),
        ("a" * 5000, r"File name too long.*; give a folder"),
    ):
        with pytest.raises(ContractError, match=words):
            save_hf(model, wrong, config)
    for odd, words in (
        (None, "hf_config=None, supported: a mapping"),
        ([], r"hf_config=\[\], supported: a mapping"),
        ({"dtype": torch.bfloat16}, "hf_config is no JSON"),
        ({(1, 2): 3}, "hf_config is no JSON"),
    ):
        with pytest.raises(ContractError, match=words):
            save_hf(model, tmp_path / "never", odd)  # type: ignore[arg-type]
    assert not (tmp_path / "never").exists()

    def full(*args: Any, **kwargs: Any) -> None:
        raise SafetensorError("No space left on device")

    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("of the caller")
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "save_file", full)
        with pytest.raises(ContractError, match=r"out cannot be written to \(No space left on device\)"):
            save_hf(model, tmp_path / "out", config)
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["config.json"]
    assert (tmp_path / "out" / "config.json").read_text() == "of the caller"
    (tmp_path / "out" / INDEX).touch()
    with pytest.raises(ContractError, match=rf"already holds weights \({INDEX}\); give an empty"):
        save_hf(model, tmp_path / "out", config)


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077, 0o002])
def test_a_saved_checkpoint_has_the_mode_of_new_files(one_rank: None, tiny: Any, tmp_path: Path, umask: int) -> None:
    config, _, model = tiny.tiny_model("Qwen3ForCausalLM", False)
    before = os.umask(umask)
    try:
        save_hf(model, tmp_path / "out", config)
    finally:
        os.umask(before)
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "out").iterdir()}
    assert modes == {"config.json": 0o666 & ~umask, "model.safetensors": 0o666 & ~umask}
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o777 & ~umask


def test_a_killed_save_says_what_it_is_and_may_be_made_again(
    one_rank: None, tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, tensors, model = tiny.tiny_model("Qwen3ForCausalLM", False)

    def killed(*args: Any, **kwargs: Any) -> None:
        os._exit(9)

    for name, spoiled in (("weights", "save_file"), ("config", "write_text"), ("first", "replace")):
        folder = tmp_path / name
        child = os.fork()
        if child == 0:
            # as a signal would, before anything is tidied up
            held = checkpoint if spoiled == "save_file" else Path
            monkeypatch.setattr(held, spoiled, killed)
            with suppress(BaseException):
                save_hf(model, folder, config)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
        assert [file.name for file in folder.iterdir()] == ["save.partial"]
        with pytest.raises(ContractError, match=r"no \*\.safetensors file \(save\.partial is what a save"):
            HfTensors(folder)
        save_hf(model, folder, config)
        assert sorted(file.name for file in folder.iterdir()) == ["config.json", "model.safetensors"]
        assert same(load_file(folder / "model.safetensors"), tensors)
    # between the two: a config, and weights that have not appeared
    folder = tmp_path / "second"
    child = os.fork()
    if child == 0:
        replace = Path.replace

        def second(self: Path, target: Path) -> Path:
            return replace(self, target) if self.name == "config.json" else os._exit(9)

        monkeypatch.setattr(Path, "replace", second)
        with suppress(BaseException):
            save_hf(model, folder, config)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "save.partial"]
    assert read_config(folder) == config
    save_hf(model, folder, config)
    assert same(load_file(folder / "model.safetensors"), tensors)
