"""Models, samples, cuts and optimizers that are refused, each by name and before anything is built."""

import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rl_contract import ContractError, MissingSupport
from rl_megatron import (
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    PackedBatch,
    ParallelConfig,
    TrainerRank,
    build_model,
    logprobs,
    micro_batches,
    topology,
)


def pack(samples: Any, vocab: int = 97, **kwargs: Any) -> PackedBatch:
    return PackedBatch.pack(samples, vocab_size=vocab, max_positions=512, **kwargs)


BAD_CONFIGS = [
    ({"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8}, "mixture of experts"),
    ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
    ({"use_sliding_window": True, "sliding_window": 128}, "sliding window"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding window"),
    ({"attention_bias": True}, "attention_bias"),
    ({"hidden_act": "gelu"}, "gelu"),
    ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
]


@pytest.mark.parametrize(("overrides", "named"), BAD_CONFIGS)
def test_unsupported_config_is_refused_by_name(tiny: Any, overrides: dict[str, Any], named: str) -> None:
    with pytest.raises(ContractError, match=named):
        ModelConfig.from_hf(tiny.tiny_config(**overrides))


def test_recomputation_is_refused_where_megatron_cannot(one_rank: None, tiny: Any) -> None:
    config = tiny.tiny_config()
    profile = tiny.tiny_profile(config)
    with pytest.raises(MissingSupport, match="recompute='full' on a CPU"):
        build_model(config, profile, ParallelConfig(), recompute="full")
    either: Any = np.array(["none", "full"])
    for recompute, modules in (
        ("selective", ("layernorm",)),
        ("half", ("mlp",)),
        ("selective", ()),
        (either, ("mlp",)),
    ):
        with pytest.raises(ContractError, match=r"'selective' of some of \('core_attn', 'mlp'\)"):
            build_model(config, profile, ParallelConfig(), recompute=recompute, recompute_modules=modules)


def test_a_trainer_refuses_what_its_device_has_not_before_it_joins_a_world(tiny: Any, tmp_path: Any) -> None:
    config = tiny.tiny_config()
    folder = tiny.write_folder(tmp_path / "model", config, tiny.tiny_tensors(config))
    rest: dict[str, Any] = {"rank": 0, "hf_path": folder, "profile": tiny.tiny_profile(config)}
    either: Any = np.array(["none", "full"])
    for wrong, words in (
        ({"recompute": "FULL"}, "recompute='FULL'"),
        ({"recompute": None}, "recompute=None"),
        ({"recompute": either}, r"recompute=array\("),
        ({"recompute_modules": []}, r"of \[\]; supported"),
        ({"recompute_modules": ["layernorm"]}, "layernorm.*supported"),
        ({"recompute_modules": torch.tensor([1.0])}, r"tensor\(1\.\).*supported"),
        ({"recompute_modules": "mlp"}, "recompute_modules='mlp', supported: a sequence of names"),
        ({"mode": either}, r"mode=array\("),
        ({"mode": np.array("strict"), "native_operators": "local"}, r"mode=array\("),
    ):
        with pytest.raises(ContractError, match=words):
            TrainerRank(init_method="file:///nowhere", **rest, **wrong)
    for kind, words in (
        ({"recompute": "full"}, "recompute='full' on a CPU"),
        ({"optimizer": OptimizerConfig(kind="megatron")}, "Megatron's optimizer needs CUDA tensors"),
    ):
        # a world is not asked for, which the address would hang in
        trainer = TrainerRank(init_method="tcp://192.0.2.1:1", **rest, **kind)
        with pytest.raises(MissingSupport, match=words):
            trainer.init()


@pytest.mark.parametrize("config", [None, "model", 7, ["hidden_size"]])
def test_a_config_that_is_no_mapping_is_refused(one_rank: None, tiny: Any, config: Any) -> None:
    profile = tiny.tiny_profile(tiny.tiny_config())
    for call in (lambda: build_model(config, profile, ParallelConfig()), lambda: ModelConfig.from_hf(config)):
        with pytest.raises(ContractError, match=r"hf_config=.*supported: a mapping, what json\.load makes"):
            call()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"rank": "0"}, "rank='0', supported: an integer"),
        ({"rank": math.nan}, "rank=nan, supported: an integer"),
        ({"rank": True}, "rank=True, supported: an integer"),
        ({"rank": 1}, "rank 1 with tp=1 and cp=1; supported: 0 to 0"),
        ({"init_method": None}, "init_method=None, supported: a URL"),
        ({"init_method": "nowhere"}, "init_method='nowhere', supported: a URL"),
        ({"share_gpu": "no"}, "share_gpu='no', supported: a bool"),
        ({"device": None}, "device=None; supported: 'cpu', 'cuda'"),
        ({"device": 7.0}, "device=7.0; supported: 'cpu', 'cuda'"),
    ],
)
def test_a_world_that_can_not_be_is_refused_before_it_is_joined(wrong: dict[str, Any], words: str) -> None:
    alive = torch.distributed.is_initialized()
    with pytest.raises(ContractError, match=words):
        topology.start(**({"rank": 0, "parallel": ParallelConfig(), "init_method": "tcp://192.0.2.1:1"} | wrong))
    assert torch.distributed.is_initialized() == alive


def test_a_profile_of_a_gpu_is_refused_on_a_cpu(one_rank: None, tiny: Any) -> None:
    config = tiny.tiny_config()
    with pytest.raises(ContractError, match=r"arch='sm90', the trainer runs on cpu \(cpu\)"):
        build_model(config, tiny.tiny_profile(config, arch="sm90", vocab_tile=512), ParallelConfig())


def test_every_bad_cut_is_listed_at_once(tiny: Any) -> None:
    config = tiny.tiny_config(num_key_value_heads=2, intermediate_size=258)
    profile = tiny.tiny_profile(config, leaves=4, norm_eps=1e-5)
    with pytest.raises(ContractError) as error:
        build_model(config, profile, ParallelConfig(tp=8, cp=3))
    for part in ("norm_eps", "leaves=4", "num_key_value_heads=2", "intermediate_size=258", "cp=3"):
        assert part in str(error.value)


def test_samples_out_of_range_are_listed_at_once() -> None:
    bad = [([1, 97], [2]), ([], [1]), ([1] * 500, [1] * 20), ([1], [-1]), ([1], [2, 3], [True])]
    with pytest.raises(ContractError) as error:
        pack(bad)
    for part in ("token id 97", "empty prompt", "520 tokens", "token id -1", "mask of 1 for 2"):
        assert part in str(error.value)
    with pytest.raises(ContractError, match="no samples"):
        pack([])


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        (([5.9], [6.7]), "token id 5.9, supported: integers"),
        (([5], [6.0]), "token id 6.0"),
        (([5, True], [6]), "token id True"),
        (([5], [None]), "token id None"),
        (("ab", [6]), "prompt='ab', supported: a sequence"),
        (([5], 6), "response=6, supported: a sequence"),
        ((torch.tensor([5.0]), [6]), "token id tensor(5.)"),
        ((torch.tensor([True]), [6]), "token id tensor(True)"),
        ((np.array([5.0]), [6]), "5.0"),
        ((np.array([True]), [6]), "True"),
        (({7, 5}, [6]), "prompt={5, 7}, supported: a sequence"),
        (([5], {6: 7}), "response={6: 7}, supported: a sequence"),
        (([5], [6], {True}), "mask={True}, supported: a sequence"),
        ((torch.tensor(5), [6]), "prompt=tensor(5), supported: a sequence"),
        ((np.array(5), [6]), "prompt=array(5), supported: a sequence"),
        (([5], [6, 7], [2, 0]), "2 in its mask, supported: True and False"),
        (([5], [6, 7], [1.0, 0.0]), "1.0 in its mask"),
        (([5], [6], [None]), "None in its mask"),
        ({"prompt": [5]}, "a sample is"),
        (([5],), "a sample is"),
        ("abc", "a sample is"),
        (7, "a sample is"),
    ],
)
def test_samples_of_anything_but_whole_ids_are_refused(sample: Any, words: str) -> None:
    with pytest.raises(ContractError) as error:
        pack([([1], [2]), sample])
    assert words in str(error.value)
    if words.startswith("token"):
        assert "sample 1 has" in str(error.value)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_ids_and_masks_without_numbers_of_their_own_are_refused_by_kind(tiny: Any) -> None:
    for odd, kind in tiny.tensors_without_numbers(torch.int64):
        for sample, part in ((odd, [6]), "prompt"), (([5], odd), "response"), (([5], [6, 7], odd), "mask"):
            with pytest.raises(ContractError) as error:
                pack([([1], [2]), sample])
            assert f"the {part} of sample 1 is {kind}" in str(error.value)
            assert "supported: a dense tensor" in str(error.value)
        with pytest.raises(ContractError, match="supported: a sequence of samples"):
            pack(odd)
    for dtype in (torch.int64, torch.bool):
        for one in (torch.ones((), dtype=dtype, device="meta"), torch.ones((), dtype=dtype).to_sparse()):
            with pytest.raises(ContractError, match=r"(?s)sample 0 has token id tensor\(.*supported: integers"):
                pack([([5, one], [6])])
            with pytest.raises(
                ContractError, match=r"(?s)sample 0 has tensor\(.*in its mask, supported: True and False"
            ):
                pack([([5], [6, 7], [True, one])])


def test_samples_may_hold_any_integers_and_bools() -> None:
    wanted = pack([([5, 6], [7, 8], [True, False])])
    for of in (list, tuple, np.array, torch.tensor, lambda x: np.array(x, dtype=np.uint16 if x[0] > 1 else bool)):
        for mask in ([True, False], [1, 0]):
            got = pack([{"prompt": of([5, 6]), "response": of([7, 8]), "mask": of(mask), "id": "a"}])
            assert all(torch.equal(a, b) for a, b in zip(got._packed, wanted._packed))
            assert torch.equal(got.loss_mask, wanted.loss_mask)


@pytest.mark.parametrize("size", [{"vocab": 97.0}, {"vocab": None}, {"cp": 0}, {"cp": True}, {"cp": "2"}, {"cp": -2}])
def test_sizes_of_a_batch_that_are_no_counts_are_refused(size: dict[str, Any]) -> None:
    with pytest.raises(ContractError, match=r"(vocab_size|cp)=.*, supported: an integer of 1 and above"):
        pack([([1], [2])], **size)


@pytest.mark.parametrize("budget", [0, -5, 1.5, True, "8"])
def test_a_token_budget_that_is_none_is_refused(budget: Any) -> None:
    with pytest.raises(ContractError, match=r"token_budget=.*, supported: an integer of 1 and above"):
        micro_batches([([1], [2])], budget, vocab_size=97, max_positions=64)


def test_batch_for_another_cp_or_temperature_zero_is_refused(one_rank: None, tiny: Any) -> None:
    _, _, model = tiny.tiny_model("Qwen3ForCausalLM", False)
    samples = tiny.tiny_samples(97, ((3, 5), (17, 33)))
    with pytest.raises(ContractError, match="cp=2"):
        logprobs(model, pack(samples, cp=2))
    for temperature in (0.0, -1.0, 1e-39, 1e300, math.inf, math.nan, True, "1"):
        with pytest.raises(
            ContractError, match=re.escape(f"temperature={temperature!r}, supported: a finite number ab")
        ):
            logprobs(model, pack(samples), temperature=temperature)  # type: ignore[arg-type]
    for long, said in ((10**5000, "an integer of 16610 bits"), (10**400, "1" + "0" * 79)):
        with pytest.raises(ContractError, match=f"temperature={said}, supported: a finite number above 0"):
            logprobs(model, pack(samples), temperature=long)


def test_optimizer_settings_out_of_range_are_refused() -> None:
    with pytest.raises(ContractError, match="betas"):
        OptimizerConfig(betas=(0.9, 1.0))
    for wrong in ({"lr": math.inf}, {"lr": math.nan}, {"weight_decay": math.inf}, {"eps": math.inf}, {"eps": 0.0}):
        with pytest.raises(ContractError, match="supported: finite lr"):
            OptimizerConfig(**wrong)
    for wrong in ({"clip_low": 1.5}, {"kl_coef": math.inf}, {"kl_coef": math.nan}, {"clip_high": math.nan}):
        with pytest.raises(ContractError, match="supported: 0 <= clip_low"):
            LossConfig(**wrong)
    for wrong in (
        {"lr": "x"},
        {"lr": 10**400},
        {"betas": 5},
        {"betas": (0.9,)},
        {"betas": ("0.9", 0.95)},
        {"eps": True},
        {"clip_grad": None},
    ):
        with pytest.raises(ContractError, match="supported: finite lr"):
            OptimizerConfig(**wrong)
    for wrong in ({"kind": "adam"}, {"kind": None}, {"kind": "megatron", "distributed": 1}):
        with pytest.raises(ContractError, match="supported: kind 'strict' or 'megatron'"):
            OptimizerConfig(**wrong)
    for wrong in ({"kl_coef": "x"}, {"clip_high": 10**400}, {"clip_low": None}, {"clip_high": True}):
        with pytest.raises(ContractError, match="supported: 0 <= clip_low"):
            LossConfig(**wrong)


@pytest.mark.parametrize(
    "parallel", [{"tp": 2.0}, {"cp": 1.0}, {"tp": True}, {"cp": "2"}, {"tp": 0}, {"cp": -1}, {"tp": None}]
)
def test_cuts_that_are_no_integers_are_refused(tiny: Any, parallel: dict[str, Any]) -> None:
    config = tiny.tiny_config()
    ((name, value),) = parallel.items()
    with pytest.raises(ContractError, match=f"{name}={value!r}, supported: integers of 1 and above"):
        ParallelConfig(**parallel)
    with pytest.raises(ContractError, match="supported: a ParallelConfig"):
        ModelConfig.from_hf(config).check(tiny.tiny_profile(config), parallel)  # type: ignore[arg-type]


def test_both_spellings_of_rope_are_one(tiny: Any) -> None:
    rule = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rule["original_max_position_embeddings"] = 8192
    old = tiny.tiny_config(rope_theta=5e5, rope_scaling=rule)
    new = tiny.tiny_config(rope_parameters={"rope_theta": 5e5, **rule})
    del new["rope_theta"]
    assert ModelConfig.from_hf(old).rope == ModelConfig.from_hf(new).rope == {"theta": 5e5, "rotary_dim": 32, **rule}


def test_native_refuses_a_rope_rule_that_megatron_has_fixed(one_rank: None, tiny: Any) -> None:
    config = tiny.tiny_config(
        rope_scaling={
            **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
            "original_max_position_embeddings": 256,
        }
    )
    profile = tiny.tiny_profile(config, rope=dict(ModelConfig.from_hf(config).rope))
    build_model(config, profile, ParallelConfig())
    with pytest.raises(ContractError, match="supported natively: llama3"):
        build_model(config, profile, ParallelConfig(), mode="native")


def test_a_profile_edited_by_hand_is_refused(tiny: Any) -> None:
    config = tiny.tiny_config()
    whole = tiny.tiny_profile(config)
    ModelConfig.from_hf(config).check(whole, ParallelConfig())
    edited = replace(whole, contracts={k: c for k, c in whole.contracts.items() if k != "norm"})
    with pytest.raises(ContractError, match="norm: present on one side only"):
        ModelConfig.from_hf(config).check(edited, ParallelConfig())
