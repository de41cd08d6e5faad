"""Random models: dimensions of the real ones, the same bits however drawn, realistic scale, runs without text."""

from concurrent.futures import ThreadPoolExecutor

import parity_workers
import pytest
import torch

from rl_contract import ContractError
from rl_parity import checkpoint, cli, models, preflight, random_models
from rl_parity.models import hf_config, spec_of, weight_bytes, write_model
from rl_parity.random_models import RANDOM, random_tensors
from rl_parity.rundir import RunDirectory, StepSamples
from vime_sync.layout import ModelShape

SMALL = RANDOM["random:qwen3-small"]


@pytest.fixture(scope="module")
def small():
    return random_tensors(SMALL, 7)


@pytest.mark.parametrize(("name", "millions"), [("0.6b", 596), ("1.7b", 1720), ("8b", 8190), ("8b-8layers", 2787)])
def test_dimensions_are_those_of_the_real_model(name, millions):
    spec = spec_of(f"random:qwen3-{name}")
    shapes = dict(ModelShape.from_hf_config(hf_config(spec)).hf_shapes())
    count = sum(torch.Size(shape).numel() for shape in shapes.values())
    assert abs(count / 1e6 - millions) < 1.5
    assert weight_bytes(spec) == 2 * count
    assert hf_config(spec)["vocab_size"] == 151936
    assert hf_config(spec)["tie_word_embeddings"] == (name in ("0.6b", "1.7b"))


def test_the_bits_do_not_depend_on_threads_or_other_draws(small, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(random_models, "ThreadPoolExecutor", lambda max_workers: ThreadPoolExecutor(1))
    again = random_tensors(SMALL, 7)
    assert list(again) == list(small)
    assert all(torch.equal(again[n].view(torch.int16), small[n].view(torch.int16)) for n in small)
    other = random_tensors(SMALL, -7)
    assert not any(torch.equal(other[n], small[n]) for n in small)
    # no two tensors, nor two blocks of one, are drawn alike
    table = small["model.embed_tokens.weight"].view(-1)
    assert not torch.equal(table[: 1 << 20], table[1 << 20 : 1 << 21])
    gate, up = (small[f"model.layers.0.mlp.{n}_proj.weight"] for n in ("gate", "up"))
    assert not torch.equal(gate, up)


def test_the_scale_is_realistic_with_outlier_channels(small):
    down = small["model.layers.1.mlp.down_proj.weight"].float()
    assert abs(down.std() * SMALL.intermediate_size**0.5 - 1) < 0.01
    norm = small["model.layers.1.input_layernorm.weight"].float()
    assert int((norm > 3).sum()) == SMALL.outlier_channels
    final = small["model.norm.weight"].float()
    hidden = torch.nn.functional.rms_norm(torch.randn(64, SMALL.hidden_size), (SMALL.hidden_size,), final)
    logits = hidden @ small["model.embed_tokens.weight"].float().T
    assert 1.5 < logits.std() < 2.5


def test_a_random_model_is_a_whole_checkpoint(tmp_path):
    folder = write_model("random:qwen3-small", tmp_path / "model", seed=1)
    assert checkpoint.problems(folder, checkpoint.read_config(folder)) == []
    assert checkpoint.size_in_bytes(folder) > weight_bytes(SMALL)
    assert not list(folder.glob("*.partial"))
    config = checkpoint.read_config(folder)
    # the word "false" is true to Python
    for flag in ("false", "true", 1, 0, [], {"x": 1}):
        with pytest.raises(ContractError, match=r"tie_word_embeddings=.*, supported: true or false") as refusal:
            checkpoint.problems(folder, {**config, "tie_word_embeddings": flag})
        assert repr(flag) in str(refusal.value)


@pytest.fixture
def workers(monkeypatch):
    pytest.importorskip("vllm")
    pytest.importorskip("megatron.core")
    monkeypatch.setattr("rl_parity.fleet.make_launcher", lambda kind, logs: parity_workers.InlineLauncher())
    memory = preflight.psutil.virtual_memory()
    monkeypatch.setattr(preflight.psutil, "virtual_memory", lambda: memory._replace(available=64 * preflight.GIB))
    parity_workers.FAULTS.clear()


@pytest.mark.parametrize("prompts", ["arithmetic", "random:4-9"])
def test_a_run_of_a_random_model_earns_rewards_that_differ(tmp_path, workers, monkeypatch, prompts):
    monkeypatch.setitem(RANDOM, "random:qwen3-small", models.replace(SMALL, hidden_size=128, vocab_size=512))
    out = tmp_path / "out"
    options = ["--model", "random:qwen3-small", "--prompts", prompts, "--device", "cpu", "--steps", "1"]
    assert cli.main(["run", "--out", str(out), *options, "--batch", "3", "--max-new-tokens", "8"]) == 0
    directory = RunDirectory(out)
    assert directory.manifest()["config"]["reward"] == "even"
    rewards = StepSamples.load(directory.samples_path("strict", 0)).reward.reshape(3, -1)
    assert (rewards.std(axis=1) > 0).all()


def test_rewards_of_text_are_refused_where_there_is_none(tmp_path, workers, capsys):
    for options in (["--model", "random:qwen3-small"], ["--prompts", "random:8"]):
        assert cli.main(["run", "--out", str(tmp_path / "out"), *options, "--reward", "exact", "--device", "cpu"]) == 2
        assert "every reward and gradient would be zero" in capsys.readouterr().err
    assert cli.main(["run", "--out", str(tmp_path / "out"), "--model", "random:qwen4", "--device", "cpu"]) == 2
    assert "random:qwen3-0.6b" in capsys.readouterr().err
