"""What a training step is given: refused by name on every rank before anything is computed, else as it was given."""

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rl_contract import ContractError
from rl_megatron import ParallelConfig, group_advantages, grpo_loss
from rl_megatron.batch import PackedBatch, micro_batches
from rl_megatron.fingerprint import fingerprint
from rl_megatron.step_inputs import StepInputs

SIZES = {"vocab_size": 97, "max_positions": 64}
PAIRS = [([1, 2], [3, 4]), ([1], [5])]
OLD = [np.zeros(2, np.float32), np.zeros(1, np.float32)]
CPU = torch.device("cpu")
NAN, INF = float("nan"), float("inf")


def inputs(advantages: Any, old: Any, ref: Any = None, samples: Any = PAIRS, kl_coef: float = 0.0) -> StepInputs:
    return StepInputs.of([PackedBatch.pack(samples, **SIZES)], advantages, old, ref, kl_coef=kl_coef)


def test_numbers_of_any_kind_are_taken_as_fp32_in_packed_order() -> None:
    batches = micro_batches([*PAIRS, ([7], [8, 9, 10])], 7, **SIZES)
    assert [len(b.samples) for b in batches] == [2, 1]
    values = [[-0.5, -1.25], [-2.0], [-0.125, -4.0, -8.0]]
    for of in (list, np.array, np.float16, lambda x: torch.tensor(x, dtype=torch.bfloat16, requires_grad=True)):
        for gains in ([1.0, -2, 3], (np.float32(1), -2, 3), np.array([1, -2, 3]), torch.tensor([1.0, -2.0, 3.0])):
            given = StepInputs.of(batches, gains, [of(x) for x in values], [of(x) for x in values], kl_coef=0.1)
            old, packed, ref = given.packed(0, batches[0], CPU)
            assert old.dtype == packed.dtype == torch.float32
            assert old.tolist() == [-0.5, -1.25, -2.0]
            assert packed.tolist() == [1.0, 1.0, -2.0]
            assert ref is not None
            assert torch.equal(old, ref)
            assert given.packed(2, batches[1], CPU)[0].tolist() == [-0.125, -4.0, -8.0]
            assert given.packed(2, batches[1], CPU)[1].tolist() == [3.0, 3.0, 3.0]
    assert inputs([torch.tensor(1.0, requires_grad=True), 1], OLD).packed(0, batches[0], CPU)[2] is None


def test_what_is_no_step_is_refused_by_name() -> None:
    for advantages in (["a", 1.0], ["1.0", "2.0"], [None, 1.0], [True, 1.0], "ab", None, 3, np.ones((2, 1)), {0: 1.0}):
        with pytest.raises(ContractError, match=r"train_step: advantages.*supported: "):
            inputs(advantages, OLD)
    for given in (None, 3, "ab", [None, None], [["a", 0.0], [0.0]], [np.zeros((1, 2)), OLD[1]]):
        with pytest.raises(ContractError, match=r"train_step: old_logprobs.*supported: "):
            inputs([1.0, 2.0], given)
        if given is not None:
            with pytest.raises(ContractError, match=r"train_step: ref_logprobs.*supported: "):
                inputs([1.0, 2.0], OLD, given)
    with pytest.raises(
        ContractError, match=r"1 advantages for 2 samples; old_logprobs has lengths.*one number a sample in advantages"
    ):
        inputs([1.0], OLD[::-1])
    with pytest.raises(ContractError, match=r"kl_coef=0\.5 needs ref_logprobs"):
        inputs([1.0, 2.0], OLD, kl_coef=0.5)
    for samples in (None, 3, "ab", {"prompt": [1], "response": [2]}):
        with pytest.raises(ContractError, match=r"PackedBatch: samples=.*supported: a sequence of samples"):
            PackedBatch.pack(samples, **SIZES)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_tensors_without_numbers_of_their_own_are_refused_by_kind(tiny: Any) -> None:
    def refused(words: str, call: Any, *args: Any, **kwargs: Any) -> None:
        with pytest.raises(ContractError) as error:
            call(*args, **kwargs)
        assert words in str(error.value)
        assert "supported: a dense tensor" in str(error.value)

    zeros = torch.zeros(2)
    right: dict[str, Any] = {"logprob": zeros, "old_logprob": zeros, "advantages": zeros, "ref_logprob": zeros}
    right["mask"] = torch.ones(2, dtype=torch.bool)
    for odd, kind in tiny.tensors_without_numbers():
        refused(f"train_step: advantages is {kind}", inputs, odd, OLD)
        refused(f"train_step: old_logprobs[0] is {kind}", inputs, [1.0, 2.0], [odd, OLD[1]])
        refused(f"train_step: old_logprobs is {kind}", inputs, [1.0, 2.0], odd)
        refused(f"train_step: ref_logprobs[0] is {kind}", inputs, [1.0, 2.0], OLD, [odd, OLD[1]])
        refused(f"group_advantages: rewards is {kind}", group_advantages, odd, 2)
        for name in right:
            refused(f"grpo_loss: {name} is {kind}", grpo_loss, **(right | {name: odd}), denominator=2)
    for odd in (torch.tensor(1.0, device="meta"), torch.tensor(1.0).to_sparse()):
        refused("train_step: advantages[1] is a tensor o", inputs, [0.5, odd], OLD)
        refused("train_step: old_logprobs[0][1] is a tensor o", inputs, [1.0, 2.0], [[0.0, odd], OLD[1]])


@pytest.mark.parametrize(("bad", "shown"), [(NAN, "nan"), (INF, "inf"), (-INF, "-inf"), (1e39, r"1e\+39")])
def test_numbers_that_are_not_finite_in_fp32_are_refused_with_their_sample(bad: float, shown: str) -> None:
    for of in (list, np.array, lambda x: torch.tensor(x, dtype=torch.float64)):
        with pytest.raises(ContractError, match=rf"the advantage of sample 1 is {shown}; supported: finite numbers"):
            inputs(of([1.0, bad]), OLD)
        for name, given in (("old", (of([0.0, bad]), of([0.0]))), ("reference", (of([0.0, bad]), of([0.0])))):
            both = (given, OLD) if name == "old" else (OLD, given)
            with pytest.raises(
                ContractError,
                match=rf"the {name} log-probability of response token 1 of sample 0 is {shown} \(1 such in",
            ):
                inputs([1.0, 2.0], *both)
    with pytest.raises(ContractError, match=r"sample 0 is .*; the old .* of sample 1 is .*nothing was computed"):
        inputs([bad, 0.0], [OLD[0], [bad]])
    many = [([1], [2])] * 11
    with pytest.raises(ContractError, match=r"sample 7 is .*; and 3 more; supported"):
        inputs([bad] * 11, [[0.0]] * 11, samples=many)


def test_a_masked_token_may_have_no_log_probability() -> None:
    masked = [([1, 2], [3, 4], [True, False]), ([1], [5], [False])]
    old = [[-0.5, NAN], [-INF]]
    given = inputs([1.0, 2.0], old, old, samples=masked)
    assert np.isnan(given.old[0][1])
    with pytest.raises(ContractError, match="the advantage of sample 1 is nan"):
        inputs([1.0, NAN], old, samples=masked)


def test_the_loss_refuses_what_is_not_finite_where_it_counts() -> None:
    x, mask = torch.zeros(3), torch.tensor([True, False, True])
    for bad in (NAN, INF, -INF):
        for name in ("old_logprob", "advantages", "ref_logprob"):
            given: dict[str, Any] = {"old_logprob": x, "advantages": x, "ref_logprob": x}
            for at in range(3):
                wrong = x.clone()
                wrong[at] = bad
                if at == 1:
                    assert float(grpo_loss(x, **(given | {name: wrong}), mask=mask, denominator=2).value) == 0.0
                else:
                    with pytest.raises(ContractError, match=rf"grpo_loss got {name}\[{at}\]={bad} \(1 such\)"):
                        grpo_loss(x, **(given | {name: wrong}), mask=mask, denominator=2)


RANK = """
import copy, json, os, pickle, sys
import numpy as np
import torch
from rl_contract import ContractError
from rl_megatron import LossConfig, OptimizerConfig, TrainerRank, load_hf

rank, folder = int(sys.argv[1]), sys.argv[2]
arguments = pickle.load(open(folder + "/job.pkl", "rb"))
other_profile = arguments.pop("other profile")
trainer = TrainerRank(rank=rank, init_method=f"file://{folder}/init", optimizer=OptimizerConfig(lr=1e-2), **arguments)
refused = []
for number, wrong in enumerate(
    (
        {"hf_path": folder + "/nowhere"},
        {"recompute": "full"},
        {"optimizer": OptimizerConfig(kind="megatron")},
        {"mode": "native", "native_operators": "te"},
        {"optimizer": OptimizerConfig(lr=1.0)},
        {"mode": "native"},
        {"hf_path": folder + "/other"},
        {"hf_path": folder + "/shards"},
        {"hf_path": folder + "/cut"},
        {"hf_path": folder + "/none"},
        {"hf_path": folder + "/nan"},
        {"hf_path": folder + "/foreign"},
        {"profile": other_profile},
    )
):
    rest = {**arguments, **(wrong if rank else {})}
    try:
        TrainerRank(rank=rank, init_method=f"file://{folder}/init{number}", **rest).init()
    except Exception as error:
        refused.append([type(error).__name__, str(error)])
trainer.init()
if rank == 0:
    trainer.keep_reference()
samples = [([5, 6, 7], [8, 9]), ([1], [2])]
old = trainer.logprobs(samples)
before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
nan, said = float("nan"), []
alone = rank == 1
for call in (
    lambda: trainer.train_step(samples, [1.0, nan if alone else 2.0], old),
    lambda: trainer.train_step(samples, [1.0, 2.0], [old[0] * (nan if alone else 1.0), old[1]]),
    lambda: trainer.train_step(samples, [1.0, 2.0], old, temperature=nan if alone else 1.0),
    lambda: trainer.logprobs(samples, temperature=nan if alone else 1.0),
    lambda: trainer.logprobs([([5], [999 if alone else 3])]),
    lambda: trainer.reference_logprobs(samples),
    lambda: trainer.train_step(samples, [1.0, 2.0 + alone], old),
    lambda: trainer.train_step(samples, [1.0, 2.0 + alone], [old[0] - alone, old[1]]),
    lambda: trainer.train_step(samples, [1.0, 2.0], old, ref_logprobs=old if alone else None),
    lambda: trainer.train_step(samples, [1.0, 2.0], old, temperature=1.0 + alone),
    lambda: trainer.logprobs(samples, temperature=1.0 + alone),
    lambda: trainer.logprobs([([5], [4 if alone else 3])]),
    lambda: trainer.logprobs([([5], [3, 4], [True, not alone])]),
    lambda: trainer.logprobs([([5, 6], [3]) if alone else ([5], [6, 3])]),
    lambda: trainer.logprobs(samples, with_entropy=alone),
    lambda: trainer.logprobs(samples) if alone else trainer.train_step(samples, [1.0, 2.0], old),
    lambda: trainer.export_weights() if alone else trainer.logprobs(samples),
    lambda: trainer.save(folder + "/saved") if alone else trainer.export_weights(),
    lambda: trainer.save(None if alone else folder + "/saved"),
    lambda: trainer.train_step(samples, [1.0, nan], old),
):
    try:
        call()
        said.append(None)
    except ContractError as error:
        said.append(str(error))
whole = all(bool((p == before[n]).all()) for n, p in trainer.model.named_parameters()) and not trainer.optimizer.steps
# what a masked token has counts nowhere
masked = [(*samples[0], [True, False]), samples[1]]
first = copy.deepcopy(trainer.optimizer.state_dict())
step = trainer.train_step(masked, [1.0, 2.0], [np.array([old[0][0], nan if alone else 7.0]), old[1]])


def told(*calls):
    out = []
    for call in calls:
        try:
            call()
            out.append(None)
        except ContractError as error:
            out.append(str(error))
    return out


def bits(arrays):
    return [a.tobytes() for a in arrays]


trained = [5.0, np.float64(5.0)][rank]
calls = {
    "train_step": lambda: trainer.train_step(samples, [1.0, 2.0], old),
    "logprobs": lambda: trainer.logprobs(samples),
    "reference_logprobs": lambda: trainer.reference_logprobs(samples),
    "export_weights": lambda: trainer.export_weights(),
    "save": lambda: trainer.save(folder + "/saved"),
}
mixed = {}
# rank 0 has kept its reference before the step, rank 1 after it
if alone:
    trainer.keep_reference()
mixed["reference"] = told(calls["reference_logprobs"])
trainer.keep_reference()
new = bits(trainer.logprobs(samples))
right = [bits(trainer.reference_logprobs(samples)) == new != bits(old)]
last = copy.deepcopy(trainer.optimizer.state_dict())
if alone:
    trainer.optimizer.load_state_dict(first)
mixed["steps"] = told(*calls.values())
if not alone:
    trainer.optimizer.load_state_dict(first)
right.append(bits(trainer.logprobs(samples)) == bits(old))
trainer.optimizer.load_state_dict(last)
if alone:
    trainer.loss_config = LossConfig(kl_coef=0.5)
mixed["loss"] = told(lambda: trainer.train_step(samples, [1.0, 2.0], old, ref_logprobs=old))
# the same number of another type is no difference
trainer.loss_config = LossConfig(clip_high=trained)
mixed["entropy"] = told(lambda: trainer.logprobs(samples, with_entropy=torch.ones(2) if alone else False))
mixed["load"] = told(lambda: load_hf(trainer.model, folder + ("/other" if alone else "/model")))
right.append(bits(trainer.logprobs(samples)) == new)
held = trainer._model
if alone:
    trainer._model = None
mixed["gone"] = told(*calls.values())
trainer._model = held
mixed["writer"] = told(lambda: trainer.save(folder + ("/saved" if alone else "/job.pkl/saved")))
none = not os.path.exists(folder + "/saved")
trainer.save(folder + "/saved")
# a rank may read what another has written
right += [none, os.path.exists(folder + "/saved/config.json"), bits(trainer.logprobs(samples)) == new]
mixed["twice"] = told(lambda: trainer.save(folder + ("/saved" if alone else "/fresh")))
right.append(trainer.train_step(samples, [1.0, 2.0], trainer.logprobs(samples))["ratio_mean"] == 1.0)
outcome = [refused, said, whole, step["skipped"], step["ratio_mean"], mixed, right]
json.dump(outcome, open(f"{folder}/said{rank}.json", "w"))
trainer.close()
"""


def write_folders(folder: Path, tiny: Any, config: dict[str, Any]) -> None:
    """One model, and the same config with other weights, other files, a file cut short, none, and a NaN."""
    tensors = tiny.tiny_tensors(config)
    tiny.write_folder(folder / "model", config, tensors)
    tiny.write_folder(folder / "other", config, tiny.tiny_tensors(config, seed=1))
    for name, part in (("a", sorted(tensors)[::2]), ("b", sorted(tensors)[1::2])):
        tiny.write_folder(folder / "shards", config, {n: tensors[n] for n in part})
        (folder / "shards" / "model.safetensors").rename(folder / "shards" / f"{name}.safetensors")
    cut = Path(tiny.write_folder(folder / "cut", config, tensors)) / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-1])
    (Path(tiny.write_folder(folder / "none", config, tensors)) / "model.safetensors").unlink()
    tiny.write_folder(folder / "foreign", config | {"architectures": ["MixtralForCausalLM"]}, tensors)
    # at a place that no block of the fingerprint holds
    at = (folder / "model" / "model.safetensors").read_bytes()
    name = "model.layers.0.mlp.gate_proj.weight"
    tensors[name].view(-1)[tensors[name].numel() // 14] = NAN
    path = Path(tiny.write_folder(folder / "nan", config, tensors)) / "model.safetensors"
    assert path.read_bytes() != at
    assert fingerprint(path) == fingerprint(folder / "model" / "model.safetensors")


@pytest.mark.engine
def test_what_one_rank_refuses_is_refused_on_every_rank_and_nothing_is_computed(tiny: Any, tmp_path: Path) -> None:
    config = tiny.tiny_config()
    write_folders(tmp_path, tiny, config)
    job = {"hf_path": tmp_path / "model", "profile": tiny.tiny_profile(config), "parallel": ParallelConfig(tp=2)}
    job["other profile"] = tiny.tiny_profile(config, vocab_size=1000)
    (tmp_path / "job.pkl").write_bytes(pickle.dumps(job))
    command = [sys.executable, "-W", "ignore", "-c", RANK]
    ranks = [subprocess.Popen([*command, str(rank), str(tmp_path)]) for rank in range(2)]
    try:
        assert [process.wait(timeout=200) for process in ranks] == [0, 0]
    finally:
        for process in ranks:
            process.kill()
    for rank in range(2):
        refused, said, whole, skipped, ratio, mixed, right = json.loads((tmp_path / f"said{rank}.json").read_text())
        *one, both = said
        prefix = "" if rank else "rank 1 refuses this call, which all ranks make together: ContractError: "
        for words, told in zip(
            (
                "train_step: the advantage of sample 1 is nan",
                "train_step: the old log-probability of response token 0 of sample 0 is nan (2 such",
                "temperature=nan, supported: a finite number above 0",
                "temperature=nan, supported: a finite number above 0",
                "PackedBatch: sample 0 has token id 999",
                "no reference is kept",
            ),
            one[:6],
            strict=True,
        ):
            assert told.startswith(prefix + words)
        for words, told in zip(
            (
                *("advantages", "advantages, old_logprobs", "ref_logprobs", "temperature", "temperature"),
                *("samples", "samples", "samples", "call", "call", "call", "call"),
            ),
            one[6:-1],
            strict=True,
        ):
            assert told.startswith(f"rank 1 has other {words} than rank 0; every rank makes the same calls")
        assert one[-1].startswith(prefix + "save: path=None, supported: a path")
        alone = "" if rank else "rank 1 refuses this call, which all ranks make together: "
        for (kind, words), told in zip(
            (
                ("ContractError", f"{tmp_path}/nowhere/config.json can't be read"),
                ("MissingSupport", "recompute='full' on a CPU"),
                ("MissingSupport", "Megatron's optimizer needs CUDA tensors"),
                ("ContractError", "native_operators='te' with device='cpu'"),
            ),
            refused[:4],
            strict=True,
        ):
            assert told[0] == (kind if rank else "ContractError")
            assert told[1].startswith(alone + (words if rank else f"{kind}: {words}"))
        differ = "ranks of one trainer differ: rank 1 has "
        assert [told[1].partition("=")[0] for told in refused[4:8]] == [
            *(differ + "optimizer", differ + "mode"),
            *(differ + "checkpoint file model.safetensors", differ + "checkpoint file a.safetensors"),
        ]
        assert "rank 1 has checkpoint file model.safetensors=None" in refused[7][1]
        for words, told in zip(
            (
                f"checkpoint {tmp_path}/cut: model.safetensors can't be read",
                f"checkpoint {tmp_path}/none: no *.safetensors file",
                "model.layers.0.mlp.gate_proj.weight has 1 NaN",
                "config.json is not supported: architectures=['MixtralForCausalLM']",
                "rl-megatron: the checkpoint has vocab_size=",
            ),
            refused[8:],
            strict=True,
        ):
            assert told[1].startswith(alone + words if rank else f"{alone}ContractError: {words}")
        other = "rank 1 has other {} than rank 0; every rank makes the same calls"
        for name, words in (
            ("reference", [other.format("reference")]),
            ("steps", [other.format("optimizer steps")] * 5),
            ("loss", [other.format("loss")]),
            ("entropy", [prefix + "logprobs: with_entropy=tensor([1., 1.]), supported: a bool"]),
            ("load", [differ + "checkpoint file model.safetensors='"]),
            ("gone", [prefix + "this TrainerRank is not initialised; call init() first"] * 5),
        ):
            assert len(mixed[name]) == len(words)
            assert all(told.startswith(said) for told, said in zip(mixed[name], words)), (name, mixed[name])
        assert mixed["writer"][0].startswith(
            "rank 0 refuses this call, which all ranks make together: ContractError: " * rank
            + f"{tmp_path}/job.pkl/saved cannot be made"
        )
        assert mixed["twice"][0].startswith(prefix + f"{tmp_path}/saved already holds weights")
        assert all(right), right
        assert not (tmp_path / "fresh").exists()
        assert both.startswith("train_step: the advantage of sample 1 is nan")
        assert (whole, skipped, ratio) == (True, False, 1.0)
