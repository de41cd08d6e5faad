"""Hugging Face folders in and out: every defect at once, nothing half-written, the round trip bit for bit."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl_contract import ContractError
from rl_megatron import ParallelConfig, TrainerRank, build_model, load_hf, save_hf
from rl_megatron.checkpoint import HfTensors, export_hf, load_tensors

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
