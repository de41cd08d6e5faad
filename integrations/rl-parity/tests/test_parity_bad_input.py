"""Damaged or senseless input ends as a listed violation and exit status 2, before anything starts or is written."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl_contract import ContractError
from rl_parity import cli, data, preflight
from rl_parity.config import RunConfig, TrainLayout
from rl_parity.models import TINY, hf_config, write_model

pytest.importorskip("vllm")
pytest.importorskip("megatron.core")

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.fixture(autouse=True)
def roomy(monkeypatch):
    memory = preflight.psutil.virtual_memory()
    monkeypatch.setattr(preflight.psutil, "virtual_memory", lambda: memory._replace(available=64 * preflight.GIB))


@pytest.fixture
def checkpoint(tmp_path):
    return write_model("tiny-qwen3", tmp_path / "model")


@pytest.fixture
def tied(tmp_path):
    return write_model("tiny-llama", tmp_path / "tied")


def check(tmp_path, **changes):
    return preflight.check(dataclasses.replace(RunConfig(out=str(tmp_path / "out")), **changes))


def edit(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


def rewrite(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"timeout": 0.0}, ["--timeout 0.0", "above 0"]),
        ({"timeout": -1.0}, ["--timeout -1.0"]),
        ({"timeout": float("nan")}, ["--timeout nan"]),
        ({"timeout": 1e300}, ["--timeout 1e+300", "at most"]),
        ({"steps": 10**20}, ["--steps 100000000000000000000", "at most 2147483647"]),
        ({"save_every": 2**31}, ["--save-every 2147483648", "at most"]),
        ({"prompts": "random:16-"}, ["--prompts random:16-:", "random:16-512"]),
        ({"prompts": "random:٨"}, ["--prompts random:٨:", "random:512"]),
        ({"prompts": "random:" + "9" * 5000}, ["--prompts random:9"]),
        ({"clip": 1.5}, ["--clip 1.5", "below 1"]),
        ({"clip": 1.0}, ["--clip 1.0", "below 1"]),
        ({"temperature": 1e-50}, ["--temperature 1e-50", "0.01"]),
        ({"temperature": 0.0099}, ["--temperature 0.0099", "0.01"]),
        ({"temperature": 1e39}, ["--temperature 1e+39"]),
        ({"seed": 2**63}, ["--seed 9223372036854775808", "64 bits"]),
        ({"seed": -(2**63) - 1}, ["--seed -9223372036854775809"]),
        ({"batch": 10**9}, ["--batch 1000000000", "GiB of memory", "lower them"]),
        ({"group": 10**8}, ["--group 100000000", "GiB of memory"]),
        ({"leaves": 256}, ["--leaves 256", "power of two up to 8"]),
        ({"train": TrainLayout(cp=3)}, ["cp=3", "use one of these"]),
        ({"train": TrainLayout(cp=8), "leaves": 256}, ["cp=8", "use one of these", "--leaves 256"]),
        ({"max_new_tokens": 512}, ["--max-new-tokens 512", "at most 511 can be new"]),
        ({"max_model_len": 3}, ["--max-model-len is 3 tokens", "at most 2 can be new"]),
    ],
)
def test_each_senseless_option_is_one_violation_with_its_remedy(tmp_path, changes, words):
    found = "\n".join(check(tmp_path, **changes))
    for word in words:
        assert word in found
    assert "leaves -" not in found
    assert "check of" not in found


@pytest.mark.parametrize("changes", [{"temperature": 0.01}, {"clip": 0.99}, {"seed": 2**63 - 1}, {"seed": -(2**63)}])
def test_values_at_the_limit_pass(tmp_path, changes):
    from rl_megatron.loss import LossConfig

    assert check(tmp_path, **changes) == []
    LossConfig(clip_low=RunConfig(**changes).clip)
    torch.Generator().manual_seed(RunConfig(**changes).seed)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_attention_heads": "eight"}, ["num_attention_heads='eight'", "positive integer"]),
        ({"num_attention_heads": None}, ["num_attention_heads"]),
        ({"hidden_size": 128.0}, ["hidden_size=128.0"]),
        ({"max_position_embeddings": None}, ["max_position_embeddings=None", "positive integer"]),
        ({"rms_norm_eps": None}, ["rms_norm_eps=None", "positive number"]),
        ({"rms_norm_eps": "small"}, ["rms_norm_eps='small'"]),
        ({"architectures": "Qwen3ForCausalLM"}, ["architectures='Qwen3ForCausalLM'", "a list of one name"]),
        ({"architectures": 5}, ["architectures=5"]),
        ({"head_dim": None}, ["head_dim=None", "128"]),
        ({"rope_parameters": "default"}, ["rope_parameters='default'"]),
        ({"rope_theta": -5, "rope_parameters": None}, ["rope_theta=-5", "above 1"]),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, ["rope_theta=0"]),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, ["llama3", "low_freq_factor"]),
        ({"rope_parameters": {**LLAMA3, "factor": 0}}, ["factor=0", "positive"]),
        ({"rope_parameters": {**LLAMA3, "factor": "x"}}, ["factor='x'"]),
        ({"eos_token_id": 5000}, ["eos_token_id=5000", "0 to 76"]),
        ({"eos_token_id": "<eos>"}, ["eos_token_id='<eos>'"]),
        ({"eos_token_id": [1, 77]}, ["[77]"]),
        ({"layer_types": 5}, ["layer_types=5", "correct"]),
        ({"torch_dtype": "float32"}, ["tensors are bfloat16", "config.json is float32"]),
    ],
)
def test_each_damaged_config_entry_is_named(tmp_path, checkpoint, changes, words):
    rewrite(checkpoint, **changes)
    found = "\n".join(check(tmp_path, model=str(checkpoint)))
    for word in words:
        assert word in found


def test_rotary_rules_that_a_run_supports_are_the_ones_named(tmp_path, checkpoint):
    for kind in ("yarn", "linear"):
        rewrite(checkpoint, rope_parameters={"rope_type": kind, "rope_theta": 1e4, "factor": 4.0})
        (found,) = check(tmp_path, model=str(checkpoint))
        assert f"{kind!r} is not supported; supported: ('default', 'llama3')" in found
    rewrite(checkpoint, rope_parameters=LLAMA3)
    assert check(tmp_path, model=str(checkpoint)) == []


def test_a_qwen3_without_head_dim_has_the_same_width_everywhere():
    from transformers import AutoConfig

    from rl_megatron.config import ModelConfig
    from rl_vllm.settings import settings_from_hf
    from vime_sync import ModelShape

    for name in TINY:
        config = {k: v for k, v in hf_config(TINY[name]).items() if k != "head_dim"}
        wanted = AutoConfig.for_model(**config).head_dim
        assert wanted == (128 if name == "tiny-qwen3" else 16)
        assert ModelConfig.from_hf(config).head_dim == wanted
        assert ModelShape.from_hf_config(config).head_dim == wanted
        assert settings_from_hf(config, leaves=1).rope["rotary_dim"] == wanted


def test_mixed_or_foreign_weight_types_are_listed(tmp_path, checkpoint):
    edit(checkpoint, lambda w: w.update({"model.norm.weight": w["model.norm.weight"].float()}))
    (found,) = check(tmp_path, model=str(checkpoint))
    assert "1 of 25 tensors are float32 (model.norm.weight)" in found
    edit(checkpoint, lambda w: w.update({n: t.float() for n, t in w.items()}))
    (found,) = check(tmp_path, model=str(checkpoint))
    assert "25 of 25 tensors are float32" in found
    rewrite(checkpoint, torch_dtype="float32")
    assert check(tmp_path, model=str(checkpoint)) == []


def test_a_tied_models_head_must_be_its_embedding(tmp_path, tied):
    edit(tied, lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()}))
    assert check(tmp_path, model=str(tied)) == []
    edit(tied, lambda w: w["lm_head.weight"].view(torch.int16).view(-1)[5].bitwise_xor_(1))
    (found,) = check(tmp_path, model=str(tied))
    assert "lm_head.weight differs from model.embed_tokens.weight" in found
    edit(tied, lambda w: w.update({"lm_head.weight": w["lm_head.weight"][:40].clone()}))
    (found,) = check(tmp_path, model=str(tied))
    assert "lm_head.weight has shape (40, 128)" in found


def test_an_index_and_its_shards_must_agree(tmp_path, checkpoint):
    names = list(load_file(checkpoint / "model.safetensors"))
    index = checkpoint / "model.safetensors.index.json"
    weight_map = dict.fromkeys(names, "model.safetensors")
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert check(tmp_path, model=str(checkpoint)) == []
    index.write_text(json.dumps({"weight_map": {**weight_map, "lm_head.weight": "model-00002.safetensors"}}))
    found = "\n".join(check(tmp_path, model=str(checkpoint)))
    assert "names model-00002.safetensors, which is missing" in found
    index.write_text(json.dumps({"weight_map": {**weight_map, "other": "model.safetensors"}}))
    assert "places other in model.safetensors" in "\n".join(check(tmp_path, model=str(checkpoint)))
    index.write_text(json.dumps({"weight_map": {n: f for n, f in weight_map.items() if n != "lm_head.weight"}}))
    assert "lm_head.weight in model.safetensors is not in" in "\n".join(check(tmp_path, model=str(checkpoint)))
    index.write_text("[]")
    assert "can't be read" in "\n".join(check(tmp_path, model=str(checkpoint)))


@pytest.mark.parametrize("text", ["{", "[]", '{"model": 5}'])
def test_a_broken_tokenizer_is_named(tmp_path, checkpoint, text):
    (checkpoint / "tokenizer.json").write_text(text)
    found = "\n".join(check(tmp_path, model=str(checkpoint)))
    assert "tokenizer.json can't be read" in found


def test_prompts_that_are_not_utf8_text_are_named(tmp_path, checkpoint):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes('{"prompt": "é", "answer": "1"}\n'.encode("latin-1"))
    with pytest.raises(ContractError, match="UTF-8"):
        data.read_examples(str(path))
    path.write_text('{"prompt": "\\ud800", "answer": "1"}\n')
    assert "example 1" in "\n".join(check(tmp_path, model=str(checkpoint), prompts=str(path)))
    path.write_text("[" * 100000 + "\n")
    assert "line 1" in "\n".join(check(tmp_path, prompts=str(path)))


def test_a_run_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("x")
    for out, word in (
        (f"{tmp_path}/file/x", "is a file"),
        (f"{tmp_path}/file/x/y", "is a file"),
        ("/proc/nope/x", "can't be made"),
        (f"{tmp_path}/{'n' * 300}", "can't be made"),
    ):
        (found,) = check(tmp_path, out=out)
        assert found.startswith(f"--out {out}")
        assert word in found
    assert check(tmp_path, out=f"{tmp_path}/a/b/c") == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file"]


def test_refused_commands_exit_2_and_leave_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("rl_parity.loop.Arm.run", lambda self: pytest.fail("started"))
    for option in (["--seed", str(2**64)], ["--timeout", "nan"], ["--clip", "1.5"], ["--batch", "1000000000"]):
        assert cli.main(["run", "--out", str(tmp_path / "out"), *option]) == 2
        assert option[0] in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_what_no_check_foresaw_is_a_violation_and_never_reads_as_a_mismatch(tmp_path, capsys, monkeypatch):
    def broken(config):
        yield "first"
        raise ZeroDivisionError("unforeseen")

    monkeypatch.setattr(preflight, "_machine", broken)
    found = check(tmp_path)
    assert found[0] == "first"
    assert "ZeroDivisionError: unforeseen" in found[1]
    monkeypatch.setattr(preflight, "check", lambda config, **_: 1 // 0)
    assert cli.main(["run", "--out", str(tmp_path / "out")]) == 3
    assert "ZeroDivisionError" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--gpus", ""),
        ("--resume", ""),
        ("--resume", " "),
        ("--steps", "٨"),
        ("--steps", "1_0"),
        ("--steps", "9" * 5000),
        ("--lr", "٨"),
        ("--lr", "1_0.0"),
    ],
)
def test_an_option_that_says_nothing_or_is_no_plain_number_is_refused_by_name(option, value, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", option, value])
    assert ended.value.code == 2
    assert f"argument {option}: " in capsys.readouterr().err


def test_a_layout_takes_plain_digits_only(capsys):
    assert cli.main(["doctor", "--train", "tp=٢"]) == 2
    assert "tp must be a positive integer" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["out", "model", "prompts"])
def test_a_null_byte_in_a_path_is_named(option, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", f"--{option}", "a\0b", "--device", "cpu"]) == 2
    assert f"--{option} 'a\\x00b' holds a null byte, which no path can" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words", [["report", "a\0b"], ["compare", "a\0b", "a"], ["compare", "a", "a\0b"], ["run", "--resume", "a\0b"]]
)
def test_a_directory_of_a_null_byte_is_named(words, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2
    assert "'a\\x00b' holds a null byte, which no path can" in capsys.readouterr().err


def test_a_model_is_written_where_a_string_says_or_the_place_is_named(tmp_path):
    folder = write_model("tiny-qwen3", f"{tmp_path}/a/b")
    assert folder == tmp_path / "a" / "b"
    assert (
        load_file(folder / "model.safetensors").keys()
        == load_file(write_model("tiny-qwen3", tmp_path / "c") / "model.safetensors").keys()
    )
    (tmp_path / "file").write_text("x")
    for place in (tmp_path / "file", f"{tmp_path}/file/x", "/proc/nope/x", "a\0b"):
        with pytest.raises(ContractError, match="cannot be made"):
            write_model("tiny-qwen3", place)
