"""The trainer on one GPU: every way to score has one set of bits, a step repeats, and nothing waits for the device.

The model has layers of Qwen3-0.6B's size, so that the certified library serves its products; several ranks share the
GPU and move bytes through the host, so their order is proved here, NCCL's transport by ``tools/two_gpus``.
"""

import importlib.util
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rl_contract import ContractError, launches, reset_launches
from rl_megatron import (
    LossConfig,
    OptimizerConfig,
    ParallelConfig,
    StrictOptimizer,
    TrainerRank,
    build_model,
    grpo_loss,
    te,
    topology,
)
from rl_megatron.checkpoint import export_hf
from rl_megatron.optimizer import _adamw, _State, make_optimizer
from rl_megatron.scoring import token_logprobs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

_spec = importlib.util.spec_from_file_location("fp64_model", Path(__file__).with_name("fp64_model.py"))
assert _spec
assert _spec.loader
fp64 = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fp64)

RECOMPUTE = {
    "full": ("full", ("core_attn",)),
    "core_attn": ("selective", ("core_attn",)),
    "mlp": ("selective", ("mlp",)),
}


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Any:
    topology.start(0, ParallelConfig(), f"file://{tmp_path_factory.mktemp('world')}/init", device="cuda:0")
    yield
    topology.stop()


@pytest.fixture(scope="module")
def case(tiny: Any) -> Any:
    return tiny.load("gpu_case").Case(tiny)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.detach().contiguous().view(torch.int32 if x.element_size() == 4 else torch.int16)


def grads(optimizer: StrictOptimizer) -> dict[str, torch.Tensor]:
    return {name: state.grad.clone() for name, state in optimizer._states.items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in a if not torch.equal(bits(a[name]), bits(b[name]))]


def test_training_forward_scoring_and_every_split_have_the_same_bits(gpu: None, case: Any) -> None:
    model = case.model()
    with torch.no_grad():
        want = case.scores(model)
        for budget in (1, 700, 2000):
            assert torch.equal(bits(case.scores(model, budget)), bits(want)), budget
        alone = torch.cat([token_logprobs(model, b) for s in case.samples for b in case.batches(samples=[s])])
        assert torch.equal(bits(alone), bits(want))
    trained = case.step(model, StrictOptimizer(model))
    assert torch.equal(bits(trained), bits(want))
    assert torch.equal(bits(case.scores(model, keep_logits=1 << 30)), bits(want))
    assert want.isfinite().all()


@pytest.mark.parametrize("which", RECOMPUTE)
def test_recomputation_changes_no_bit(gpu: None, case: Any, which: str) -> None:
    plain, again = case.model(), case.model("strict", *RECOMPUTE[which])
    a, b = StrictOptimizer(plain), StrictOptimizer(again)
    reset_launches()
    want = case.step(plain, a)
    once = sum(r["count"] for r in launches() if "triton_hopper" in r["kernel"] or "triton_forward" in r["kernel"])
    reset_launches()
    got = case.step(again, b)
    twice = sum(r["count"] for r in launches() if "triton_hopper" in r["kernel"] or "triton_forward" in r["kernel"])
    assert twice == (once if which == "mlp" else 2 * once), "the path was not taken"
    assert torch.equal(bits(got), bits(want))
    assert not same(grads(a), grads(b))
    a.step()
    b.step()
    assert not same(dict(plain.named_parameters()), dict(again.named_parameters()))


def test_twenty_steps_from_one_state_have_the_same_weights(gpu: None, case: Any) -> None:
    model = case.model()
    optimizer = StrictOptimizer(model, OptimizerConfig(lr=1e-3, weight_decay=0.1))
    start = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in flat(optimizer.state_dict()).items()}
    want = None
    for _ in range(20):
        optimizer.load_state_dict(nested(start))
        case.step(model, optimizer, budget=1200)
        figures = optimizer.step()
        found = {name: p.detach().clone() for name, p in model.named_parameters()}
        found["norm"] = torch.tensor([figures["grad_norm"]])
        want = want or found
        assert not same(found, want)
    assert any(not torch.equal(bits(want[n]), bits(p)) for n, p in case.model().named_parameters()), "nothing moved"


def flat(state: dict[str, Any]) -> dict[str, Any]:
    return {"steps": state["steps"]} | {f"{n}/{k}": v for n, s in state["state"].items() for k, v in s.items()}


def nested(state: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {"steps": state["steps"], "state": {}}
    for name, value in state.items():
        if "/" in name:
            parameter, kind = name.rsplit("/", 1)
            out["state"].setdefault(parameter, {})[kind] = value
    return out


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_nothing_waits_for_the_device(gpu: None, case: Any, recompute: str) -> None:
    model = case.model("strict", recompute)
    optimizer = StrictOptimizer(model)
    case.step(model, optimizer)
    # batches are made anew, so their way to the device is looked at too
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in case.batches(1500):
            logp = token_logprobs(model, batch, nonfinite="nan", keep_logits=1 << 30)
            loss = grpo_loss(logp, logp.detach(), torch.zeros_like(logp), batch.loss_mask, denominator=9.0)
            loss.value.backward()
            optimizer.collect()
        with torch.no_grad():
            token_logprobs(model, case.batches()[0], nonfinite="nan")
    finally:
        torch.cuda.set_sync_debug_mode("default")


OPERATORS = [
    "local", pytest.param("te", marks=pytest.mark.skipif(te.missing_part() is not None, reason="no TransformerEngine"))
]  # fmt: skip


@pytest.mark.parametrize("operators", OPERATORS)
def test_gradients_are_as_near_to_fp64_as_native_ones(gpu: None, case: Any, operators: str) -> None:
    oracle = {n: t.double().cuda().requires_grad_() for n, t in case.tensors.items()}
    with torch.device("cuda"):
        exact = torch.cat([fp64.logprobs(case.config, oracle, p, r) for p, r in case.samples if r])
    weights = torch.randn(exact.numel(), generator=torch.Generator().manual_seed(3)).cuda()
    (exact * weights.double()).sum().backward()
    errors: dict[str, dict[str, float]] = {}
    for mode in ("strict", "native"):
        model = case.model(mode, operators=operators if mode == "native" else "auto")
        optimizer = StrictOptimizer(model)
        logp = case.scores(model)
        (logp * weights).sum().backward()
        optimizer.collect()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.data.copy_(optimizer._states[name].grad)
        found = export_hf(model)
        assert found is not None
        errors[mode] = {n: float((found[n].double() - p.grad).norm() / p.grad.norm()) for n, p in oracle.items()} | {
            "logp": float((logp.double() - exact).abs().mean())
        }
    worst = {n: errors["strict"][n] / errors["native"][n] for n in errors["strict"]}
    print({n: round(v, 3) for n, v in sorted(worst.items(), key=lambda x: -x[1])[:5]}, errors["strict"]["logp"])
    # a norm's weight has few elements, so one draw of roundings is no measure
    assert max(worst.values()) < 2.5, worst
    assert np.median(list(worst.values())) < 1.1, worst
    assert max(errors["strict"].values()) < 0.1, errors["strict"]


@pytest.mark.parametrize("operators", OPERATORS)
def test_native_runs_no_strict_kernel(gpu: None, case: Any, operators: str) -> None:
    model = case.model("native", operators=operators)
    reset_launches()
    with torch.no_grad():
        packed, strict = case.scores(model), case.scores(case.model())
        reset_launches()
        split = case.scores(model, 1)
    assert not launches()
    assert (packed - strict).abs().mean() < 0.02
    assert (packed - split).abs().mean() < 0.02
    assert not torch.equal(bits(packed), bits(strict))


def test_adamw_kernel_is_the_cpu_sequence(gpu: None) -> None:
    from rl_megatron import triton_optimizer

    generator = torch.Generator().manual_seed(0)
    for n, coef, decay in ((1, 1.0, 0.0), (1_000_003, 1.0, 0.1), (4096 * 300, 0.31, 0.0)):
        master = torch.randn(n, generator=generator)
        # from subnormal to large
        spread = 10.0 ** torch.randint(-42, 3, (n,), generator=generator).double()
        sizes = (torch.rand(n, generator=generator).double() * spread).float()
        moments = [torch.randn(n, generator=generator) * 1e-3, sizes]
        grad = torch.randn(n, generator=generator) * sizes.sqrt()
        want = _State(torch.nn.Parameter(master.bfloat16()), *[x.clone() for x in (grad, master, *moments)])
        got = _State(torch.nn.Parameter(master.bfloat16().cuda()), *[x.cuda() for x in (grad, master, *moments)])
        numbers = {"b1": 0.9, "b2": 0.95, "size": 1e-3 / 0.1, "root2": math.sqrt(0.05), "eps": 1e-8}
        keep = 1.0 - 1e-3 * decay
        if coef < 1.0:
            want.grad.mul_(coef)
        _adamw(want, want.grad, 0.9, 0.95, numbers["size"], numbers["root2"], 1e-8, keep)
        step = triton_optimizer.Step(coef=coef, **numbers)
        triton_optimizer.adamw(got.master, got.exp_avg, got.exp_avg_sq, got.grad, got.parameter.data, step, keep)
        for name in ("exp_avg", "exp_avg_sq", "master"):
            assert torch.equal(bits(getattr(want, name)), bits(getattr(got, name).cpu())), (n, name)
        assert torch.equal(bits(want.master.bfloat16()), bits(got.parameter.cpu()))


@pytest.mark.parametrize("offset", [0, 1])
def test_layout_a_leaf_has_one_sum_of_squares_in_every_shard(gpu: None, tiny: Any, offset: int) -> None:
    from rl_megatron import triton_optimizer

    order = tiny.load("square_order")
    # leaves of one block and of a thousand, of sizes that 16 divides and odd ones: a load's width follows from them
    sizes = ((48, 1024), (176, 3 * 16), (1040, 8 * 13), (272, 8 * 1001), (4096, 3072))
    for name, grad in order.gradients(sizes, 3, "cuda", offset):
        order.check(triton_optimizer.square_sums, name, grad, 8)
    # of this many, the sums of both directions differ
    many = next(order.gradients(((1, 9_000_001),), 1, "cuda"))[1][:, :5_000_001]
    out = torch.empty(1, dtype=torch.float64, device="cuda")
    triton_optimizer.square_sums(many, out, None, 1)
    assert torch.equal(out[0], order.written_out(many))
    assert not torch.equal(out[0], order.written_out(many.flip(1))), "another order must show"


def test_token_rows_are_added_in_packed_order(gpu: None) -> None:
    from rl_megatron import triton_rows

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 40, (3000,), generator=generator)
    ids[torch.rand(3000, generator=generator) < 0.5] = 7
    grad = (torch.randn(3000, 1025, generator=generator) * 100).bfloat16()
    start = torch.randn(33, 1025, generator=generator)
    want = torch.cat([start, torch.zeros(7, 1025)]).index_add_(0, ids, grad.float())[:33]
    got = start.cuda()
    triton_rows.add_rows(got, ids.clamp(max=33).cuda(), grad.cuda())
    assert torch.equal(bits(want), bits(got.cpu()))
    backwards = start.cuda()
    triton_rows.add_rows(backwards, ids.clamp(max=33).flip(0).cuda(), grad.flip(0).cuda())
    assert not torch.equal(backwards, got), "another order must show"


def test_loss_has_the_bits_of_the_cpu(gpu: None) -> None:
    generator = torch.Generator().manual_seed(0)
    logp, old, gains, ref = (torch.randn(4097, generator=generator) for _ in range(4))
    mask = torch.rand(4097, generator=generator) < 0.7
    config = LossConfig(kl_coef=0.1)
    found = []
    for place in ("cpu", "cuda"):
        leaf = logp.detach().clone().to(place).requires_grad_()
        args = [x.to(place) for x in (old, gains)]
        loss = grpo_loss(leaf, *args, mask, denominator=100.0, ref_logprob=ref.to(place), config=config)
        loss.value.backward()
        found.append((loss.value.detach().cpu(), loss.sums.cpu(), leaf.grad.cpu()))
    for a, b in zip(*found):
        assert torch.equal(a, b)


@pytest.mark.parametrize("distributed", [False, True])
def test_megatrons_own_optimizer(gpu: None, case: Any, distributed: bool) -> None:
    config = OptimizerConfig(kind="megatron", distributed=distributed, lr=1e-3, clip_grad=1.0)
    weights, figures, scores = [], [], []
    for _ in range(2):
        model = case.model()
        optimizer = make_optimizer(model, config)
        assert all(p.main_grad.dtype == torch.float32 for p in model.parameters())
        for seed in range(2):
            scores.append(case.step(model, optimizer, budget=1200, seed=seed))
            figures.append(optimizer.step())
        weights.append({n: p.detach().clone() for n, p in model.named_parameters()})
    assert not same(*weights)
    assert torch.equal(bits(scores[0]), bits(scores[2]))
    assert optimizer.steps == 2
    ours = case.model()
    strict = StrictOptimizer(ours, OptimizerConfig(lr=1e-3, clip_grad=1.0))
    for seed in range(2):
        assert torch.equal(bits(case.step(ours, strict, budget=1200, seed=seed)), bits(scores[seed])) or seed
        norm = strict.step()["grad_norm"]
        assert figures[seed]["grad_norm"] == pytest.approx(norm, rel=1e-2)
    moved = torch.cat([(p - weights[0][n]).abs().flatten().float() for n, p in ours.named_parameters()])
    assert moved.mean() < 1e-4, "two Adams of one gradient"


def test_a_profile_of_another_device_is_refused(gpu: None, case: Any, tiny: Any) -> None:
    profile = tiny.tiny_profile(case.config, leaves=2)
    with pytest.raises(ContractError, match="arch='cpu', the trainer runs on cuda:0"):
        build_model(case.config, profile, ParallelConfig())


def test_a_nan_weight_is_refused_before_the_step(case: Any, tiny: Any, tmp_path: Path) -> None:
    topology.stop()
    path = tiny.write_folder(tmp_path / "model", case.config, case.tensors)
    trainer = TrainerRank(
        rank=0, init_method=f"file://{tmp_path}/init", hf_path=path, profile=case.profile, device="cuda:0"
    )
    trainer.init()
    old = trainer.logprobs(case.samples)
    step = trainer.train_step(case.samples, [1.0] * len(case.samples), old)
    assert step["ratio_mean"] == 1.0
    assert all(np.array_equal(a, b) for a, b in zip(step["logprobs"], old))
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.model.decoder.final_layernorm.weight.data[5] = float("nan")
    with pytest.raises(ContractError, match="of sample 0 is NaN"):
        trainer.logprobs(case.samples)
    with pytest.raises(ContractError, match="of sample 0 is NaN"):
        trainer.train_step(case.samples, [1.0] * len(case.samples), old)
    changed = [n for (n, p), b in zip(trainer.model.named_parameters(), before) if not torch.equal(p, b)]
    assert changed == ["decoder.final_layernorm.weight"]
    trainer.close()
