"""One rank: accuracy against fp64, packing, the training forward, native against strict."""

import copy
import importlib.util
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import rl_attn
import rl_gemm
from rl_contract import ContractError, SingleRank, TokenShards
from rl_contract.shares import LaterShares
from rl_megatron import (
    LossConfig,
    OptimizerConfig,
    PackedBatch,
    ParallelConfig,
    StrictOptimizer,
    build_model,
    grpo_loss,
    layers,
    logprobs,
    micro_batches,
    tokens,
    topology,
)
from rl_megatron.checkpoint import export_hf
from rl_megatron.model import module_classes

_spec = importlib.util.spec_from_file_location("fp64_model", Path(__file__).with_name("fp64_model.py"))
assert _spec is not None
assert _spec.loader is not None
fp64 = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fp64)

LENGTHS = ((3, 5), (17, 33), (1, 1), (30, 70))
MODELS = [
    ("Qwen3ForCausalLM", False),
    ("Qwen3ForCausalLM", True),
    ("LlamaForCausalLM", False),
    ("LlamaForCausalLM", True),
]


def pack(samples: Any, vocab: int = 97, **kwargs: Any) -> PackedBatch:
    return PackedBatch.pack(samples, vocab_size=vocab, max_positions=512, **kwargs)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.detach().contiguous().view(torch.int32)


@pytest.mark.field_report("R41")
@pytest.mark.parametrize(("arch", "tied"), MODELS)
def test_forward_and_gradients_match_fp64(one_rank: None, tiny: Any, arch: str, tied: bool) -> None:
    config, tensors, model = tiny.tiny_model(arch, tied, dtype="float32")
    samples = tiny.tiny_samples(97, LENGTHS)
    optimizer = StrictOptimizer(model)
    generator = torch.Generator().manual_seed(3)
    weights = [torch.randn(len(r), generator=generator) for _, r in samples]
    values = logprobs(model, pack(samples), temperature=0.8)
    torch.stack([(v * g).sum() for v, g in zip(values, weights)]).sum().backward()
    assert all(p.grad is None for p in model.parameters()), "strict operators add into main_grad themselves"

    oracle = fp64.parameters(tensors)
    expected = [fp64.logprobs(config, oracle, p, r, 0.8) for p, r in samples]
    torch.stack([(v * g.double()).sum() for v, g in zip(expected, weights)]).sum().backward()
    for got, want in zip(values, expected):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=2e-5)

    # the permutation that names weights names gradients as well
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.data.copy_(optimizer._states[name].grad)
    grads = export_hf(model)
    assert grads is not None
    for name, parameter in oracle.items():
        error = (grads[name].double() - parameter.grad).norm() / parameter.grad.norm()
        assert error < 2e-5, f"{name}: relative error {error:.1e}"


@pytest.mark.parametrize("arch", ["Qwen3ForCausalLM", "LlamaForCausalLM"])
def test_bf16_forward_is_near_fp64(one_rank: None, tiny: Any, arch: str) -> None:
    config, tensors, model = tiny.tiny_model(arch, False)
    samples = tiny.tiny_samples(97, LENGTHS)
    got = torch.cat(list(logprobs(model, pack(samples))))
    oracle = fp64.parameters(tensors)
    want = torch.cat([fp64.logprobs(config, oracle, p, r) for p, r in samples])
    assert (got.double() - want).abs().mean() < 0.03


@pytest.mark.field_report("R09", "R15", "R86")
@pytest.mark.parametrize("arch", ["Qwen3ForCausalLM", "LlamaForCausalLM"])
def test_batch_alone_equals_packed_in_any_order_and_budget(one_rank: None, tiny: Any, arch: str) -> None:
    _, _, model = tiny.tiny_model(arch, False)
    samples = tiny.tiny_samples(97, (*LENGTHS, (64, 65), (2, 62)))
    with torch.no_grad():
        packed = logprobs(model, pack(samples))
        for sample, want in zip(samples, packed):
            assert torch.equal(bits(logprobs(model, pack([sample]))[0]), bits(want))
        turned = logprobs(model, pack(samples[::-1]))
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(turned[::-1], packed))
        for budget in (1, 64, 129, 10_000):
            batches = micro_batches(samples, budget, vocab_size=97, max_positions=512)
            assert sum(len(b.samples) for b in batches) == len(samples)
            parts = [v for b in batches for v in logprobs(model, b)]
            assert all(torch.equal(bits(a), bits(b)) for a, b in zip(parts, packed))


def test_micro_batches_are_those_of_one_rank_whatever_context_parallelism_pads() -> None:
    samples = [(list(range(1, n + 1)), [7] * m) for n, m in ((3, 6), (9, 8), (1, 2), (12, 1), (4, 5))]
    for budget in (1, 12, 17, 20, 29, 1000):
        groups = {
            cp: [b.response_lengths for b in micro_batches(samples, budget, vocab_size=97, max_positions=64, cp=cp)]
            for cp in (1, 2, 4)
        }
        assert groups[1] == groups[2] == groups[4], budget
    assert groups[1] == [[6, 8, 2, 1, 5]]
    # nine tokens of 29, padded to twelve: seven that are padding push no sample out
    assert len(micro_batches(samples, 29, vocab_size=97, max_positions=64, cp=2)[0].samples) == 3


@pytest.mark.field_report("R86")
def test_batch_appended_tokens_leave_earlier_ones(one_rank: None, tiny: Any) -> None:
    # right padding is nothing but tokens behind; causality keeps them out
    _, _, model = tiny.tiny_model("Qwen3ForCausalLM", False)
    prompt, response = tiny.tiny_samples(97, ((9, 40),))[0]
    with torch.no_grad():
        long = logprobs(model, pack([(prompt, response)]))[0]
        short = logprobs(model, pack([(prompt, response[:13])]))[0]
    assert torch.equal(bits(long[:13]), bits(short))


@pytest.mark.field_report("R02", "R10")
@pytest.mark.parametrize("temperature", [0.6, 0.7, 1.0, 1.5])
def test_training_forward_equals_scoring_at_any_temperature(one_rank: None, tiny: Any, temperature: float) -> None:
    _, _, model = tiny.tiny_model("Qwen3ForCausalLM", True)
    batch = pack(tiny.tiny_samples(97, LENGTHS))
    with torch.no_grad():
        scored = torch.cat(list(logprobs(model, batch, temperature=temperature)))
    trained = torch.cat(list(logprobs(model, batch, temperature=temperature)))
    assert trained.requires_grad
    assert torch.equal(bits(scored), bits(trained))
    ones = torch.ones_like(scored)
    loss = grpo_loss(trained, scored, ones, batch.loss_mask, denominator=len(scored), ref_logprob=scored)
    assert (loss.clipped_count, loss.kl_sum, loss.ratio_sum) == (0, 0.0, float(len(scored)))


@pytest.mark.field_report("R25")
def test_rotary_table_survives_conversion_of_the_module(one_rank: None, tiny: Any) -> None:
    _, _, model = tiny.tiny_model("Qwen3ForCausalLM", False)
    batch = pack(tiny.tiny_samples(97, ((250, 30), (300, 12))))
    with torch.no_grad():
        before = torch.cat(list(logprobs(model, batch)))
        model.to(torch.bfloat16)
        model.load_state_dict(model.state_dict())
        after = torch.cat(list(logprobs(model, batch)))
    table = model.decoder.layers[0].self_attention.core_attention.table
    assert table.cos.dtype == torch.float32
    assert torch.equal(bits(before), bits(after))
    # a table that went through bf16 would show: the check can fail
    table.cos.copy_(table.cos.bfloat16().float())
    with torch.no_grad():
        spoiled = torch.cat(list(logprobs(model, batch)))
    layers._rope_table.cache_clear()
    assert not torch.equal(bits(before), bits(spoiled))


def _reversed_row(x: torch.Tensor, weight: torch.Tensor, bias: Any, *, leaves: int, **_: Any) -> torch.Tensor:
    return rl_gemm.linear(x.flip(-1).contiguous(), weight.flip(-1).contiguous(), bias, leaves=leaves)


def _other_tiles(*args: Any, key_tile: int, segment: int, **kwargs: Any) -> Any:
    return rl_attn.attention_packed(*args, key_tile=16, segment=16, **kwargs)


def _norm_of_reversed(x: torch.Tensor, weight: torch.Tensor, eps: float, **kwargs: Any) -> Any:
    rows = x.float()
    scale = torch.rsqrt(rows.flip(-1).square().cumsum(-1)[..., -1:] / x.shape[-1] + eps)
    return (rows * scale * weight.float()).to(x.dtype)


PLANTED = [
    ("rl_gemm.row_parallel_linear", _reversed_row),
    ("rl_attn.attention_packed", _other_tiles),
    ("rl_norm.rms_norm", _norm_of_reversed),
]


@pytest.mark.parametrize(("boundary", "kernel"), PLANTED)
def test_a_misordered_kernel_shows_in_the_log_probabilities(
    one_rank: None, tiny: Any, monkeypatch: pytest.MonkeyPatch, boundary: str, kernel: Any
) -> None:
    # in fp32, because one ulp of a sum of squares seldom survives the rounding to bf16
    _, _, model = tiny.tiny_model("Qwen3ForCausalLM", False, dtype="float32")
    batch = pack(tiny.tiny_samples(97, ((40, 60), (5, 90))))
    with torch.no_grad():
        right = torch.cat(list(logprobs(model, batch)))
        # the module's own view of its operators, so that the planted kernel may call the right one
        package, name = boundary.split(".")
        namespace = SimpleNamespace(**vars(getattr(layers, package)))
        setattr(namespace, name, kernel)
        monkeypatch.setattr(layers, package, namespace)
        wrong = torch.cat(list(logprobs(model, batch)))
    assert (right != wrong).any()
    assert (right - wrong).abs().max() < 1e-3, "the planted kernel must be a plausible one"


def test_native_runs_stock_modules_and_other_bits(one_rank: None, tiny: Any) -> None:
    samples = tiny.tiny_samples(97, LENGTHS)
    for arch, tied in MODELS:
        _, _, strict = tiny.tiny_model(arch, tied)
        _, _, native = tiny.tiny_model(arch, tied, mode="native")
        classes = module_classes(native)
        assert classes["qkv"].endswith("layers.ColumnParallelLinear")
        assert classes["input_norm"].endswith("RMSNorm")
        with torch.no_grad():
            a = torch.cat(list(logprobs(strict, pack(samples))))
            b = torch.cat(list(logprobs(native, pack(samples))))
        assert (a != b).float().mean() > 0.9
        assert (a - b).abs().mean() < 0.05


def test_native_entropy_matches_its_logits(one_rank: None, tiny: Any) -> None:
    _, _, native = tiny.tiny_model("LlamaForCausalLM", False, dtype="float32", mode="native")
    _, _, strict = tiny.tiny_model("LlamaForCausalLM", False, dtype="float32")
    batch = pack(tiny.tiny_samples(97, LENGTHS))
    with torch.no_grad():
        a, b = (logprobs(m, batch, with_entropy=True) for m in (native, strict))
    for x, y in zip((*a[0], *a[1]), (*b[0], *b[1])):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


@pytest.mark.field_report("R81")
def test_all_masked_batch_gives_zero_loss_and_gradient(one_rank: None, tiny: Any) -> None:
    _, _, model = tiny.tiny_model("Qwen3ForCausalLM", False)
    optimizer = StrictOptimizer(model)
    samples = [(p, r, [False] * len(r)) for p, r in tiny.tiny_samples(97, LENGTHS)]
    batch = pack(samples)
    values = torch.cat(list(logprobs(model, batch)))
    nan = torch.full_like(values, math.nan)
    loss = grpo_loss(values, nan, nan, batch.loss_mask, denominator=0, ref_logprob=nan, config=LossConfig(kl_coef=0.1))
    loss.value.backward()
    assert float(loss.value) == 0.0
    assert optimizer.grad_norm() == 0.0
    assert all(not s.grad.any() for s in optimizer._states.values())


@pytest.mark.field_report("R82")
def test_masked_tokens_hold_anything_without_effect(one_rank: None, tiny: Any) -> None:
    _, _, model = tiny.tiny_model("LlamaForCausalLM", True)
    (prompt, response), other = tiny.tiny_samples(97, ((9, 40), (5, 12)))
    mask = [i % 3 != 0 for i in range(40)]
    norms = []
    for poison in (0.0, math.nan):
        optimizer = StrictOptimizer(model)
        batch = pack([(prompt, response, mask), other])
        values = torch.cat(list(logprobs(model, batch)))
        old = torch.where(batch.loss_mask, values.detach() - 0.1, poison)
        loss = grpo_loss(values, old, torch.ones_like(old), batch.loss_mask, denominator=int(batch.loss_mask.sum()))
        loss.value.backward()
        norms.append((float(loss.value), optimizer.grad_norm()))
    assert norms[0] == norms[1]
    assert math.isfinite(norms[0][1])


@pytest.mark.parametrize("arch", ["Qwen3ForCausalLM", "LlamaForCausalLM"])
def test_gradients_without_main_grad_are_main_grad_rounded(one_rank: None, tiny: Any, arch: str) -> None:
    _, _, model = tiny.tiny_model(arch, False)
    batch = pack(tiny.tiny_samples(97, LENGTHS))
    torch.cat(list(logprobs(model, batch))).sum().backward()
    plain = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    optimizer = StrictOptimizer(model)
    torch.cat(list(logprobs(model, batch))).sum().backward()
    for name, state in optimizer._states.items():
        assert plain[name].any(), name
        assert torch.equal(plain[name].view(torch.int16), state.grad.bfloat16().view(torch.int16)), name


def test_repeat_and_threads_leave_every_bit(one_rank: None, tiny: Any) -> None:
    _, _, model = tiny.tiny_model("Qwen3ForCausalLM", True)
    batch = pack(tiny.tiny_samples(97, (*LENGTHS, (100, 200))))
    runs = []
    try:
        for threads in (1, 2, 2):
            torch.set_num_threads(threads)
            optimizer = StrictOptimizer(model)
            values = torch.cat(list(logprobs(model, batch)))
            values.sum().backward()
            runs.append((bits(values), optimizer.grad_norm(), [bits(s.grad) for s in optimizer._states.values()]))
    finally:
        torch.set_num_threads(1)
    for other in runs[1:]:
        assert torch.equal(runs[0][0], other[0])
        assert runs[0][1] == other[1]
        assert all(torch.equal(a, b) for a, b in zip(runs[0][2], other[2]))


def test_gradient_that_is_not_finite_changes_nothing(one_rank: None, tiny: Any) -> None:
    _, tensors, model = tiny.tiny_model("LlamaForCausalLM", False)
    optimizer = StrictOptimizer(model, OptimizerConfig(lr=1e-2))
    for state in optimizer._states.values():
        state.grad.fill_(1.0)
    next(iter(optimizer._states.values())).grad[3, 3] = math.inf
    assert optimizer.step()["skipped"]
    exported = export_hf(model) or {}
    assert optimizer.steps == 0
    assert all(torch.equal(exported[n], tensors[n]) for n in tensors)


def test_frozen_parameters_stay_as_they_are(one_rank: None, tiny: Any) -> None:
    _, _, model = tiny.tiny_model("Qwen3ForCausalLM", False)
    optimizer = StrictOptimizer(model, OptimizerConfig(lr=1e-2, weight_decay=0.1))
    frozen = {name: p for name, p in model.named_parameters() if "fc1" in name or "embedding" in name}
    assert len(frozen) == 3
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in frozen.values():
        p.requires_grad_(False)
    torch.cat(list(logprobs(model, pack(tiny.tiny_samples(97, LENGTHS))))).mean().backward()
    assert not optimizer.step()["skipped"]
    for name, p in model.named_parameters():
        state = optimizer._states[name]
        assert torch.equal(p, before[name]) == (name in frozen), name
        assert torch.equal(state.master, before[name].float()) == (name in frozen), name


def test_a_norm_is_of_whole_gradients(one_rank: None, tiny: Any) -> None:
    _, _, model = tiny.tiny_model("LlamaForCausalLM", False)
    optimizer = StrictOptimizer(model)
    later = optimizer._later = LaterShares(SingleRank())
    weight = model.decoder.final_layernorm.weight

    def add(x: torch.Tensor) -> None:
        weight.main_grad.add_(x[0])

    TokenShards(later.comm, [torch.arange(1)], later=later).with_all([torch.full((1, len(weight)), 3.0)], add)
    assert not weight.main_grad.any()
    assert optimizer.grad_norm() == math.sqrt(9 * len(weight))
    assert optimizer.step()["grad_norm"] == math.sqrt(9 * len(weight))


def test_native_gradients_are_reduced_once(one_rank: None, tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, model = tiny.tiny_model("LlamaForCausalLM", False, mode="native")
    optimizer = StrictOptimizer(model)
    # as if a peer's share were this rank's
    monkeypatch.setattr(topology, "native_sum_", lambda x, group: x.mul_(2.0))

    def backward() -> None:
        torch.cat(list(logprobs(model, pack(tiny.tiny_samples(97, LENGTHS))))).mean().backward()
        optimizer.collect()

    backward()
    share = optimizer.grad_norm()
    optimizer.reduce()
    optimizer.reduce()
    whole = optimizer.grad_norm()
    assert math.isclose(whole, 2 * share, rel_tol=1e-6)
    with pytest.raises(ContractError, match="reduced already"):
        backward()
    assert optimizer.step()["grad_norm"] == whole
    optimizer.zero_grad()
    backward()
    assert optimizer.step()["grad_norm"] > 0


def test_a_world_that_is_left_keeps_no_batch(one_rank: None, tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = TokenShards(SingleRank(), [torch.arange(1)])
    tokens.enter(shards)
    for name in ("destroy_process_group", "is_initialized"):
        monkeypatch.setattr(topology.dist, name, lambda: False)
    monkeypatch.setattr(topology.parallel_state, "model_parallel_is_initialized", lambda: False)
    held, made = dict(topology._communicators), list(topology._made)
    topology.stop()
    # the world is one still, which others go on with and leave
    topology._communicators.update(held)
    topology._made[:] = made
    assert tokens.current() is None


def test_optimizer_state_resumes_bit_for_bit(one_rank: None, tiny: Any) -> None:
    batch = pack(tiny.tiny_samples(97, LENGTHS))

    def step(model: Any, optimizer: StrictOptimizer) -> None:
        optimizer.zero_grad()
        torch.cat(list(logprobs(model, batch))).mean().backward()
        optimizer.step()

    _, _, model = tiny.tiny_model("Qwen3ForCausalLM", False)
    optimizer = StrictOptimizer(model, OptimizerConfig(lr=1e-3))
    step(model, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    step(model, optimizer)
    _, _, resumed = tiny.tiny_model("Qwen3ForCausalLM", False)
    other = StrictOptimizer(resumed, OptimizerConfig(lr=1e-3))
    other.load_state_dict(saved)
    step(resumed, other)
    want, got = export_hf(model) or {}, export_hf(resumed) or {}
    assert all(torch.equal(want[n].view(torch.int16), got[n].view(torch.int16)) for n in want)
    del saved["state"]["decoder.final_layernorm.weight"]
    with pytest.raises(ContractError, match="final_layernorm"):
        other.load_state_dict(saved)


def test_unloaded_model_is_nan_everywhere(one_rank: None, tiny: Any) -> None:
    config = tiny.tiny_config()
    model = build_model(config, tiny.tiny_profile(config), ParallelConfig())
    assert all(torch.isnan(p).all() for p in model.parameters())
