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
    PackedBatch,
    ParallelConfig,
    StrictOptimizer,
    TrainerRank,
    build_model,
    grpo_loss,
    micro_batches,
    topology,
)
from rl_megatron.checkpoint import export_hf, load_tensors
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

LENGTHS = ((3, 5), (170, 440), (1, 1), (9, 0), (600, 911), (40, 25), (1, 300))
RECOMPUTE = {
    "full": ("full", ("core_attn",)),
    "core_attn": ("selective", ("core_attn",)),
    "layernorm, mlp": ("selective", ("layernorm", "mlp")),
}


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Any:
    topology.start(0, ParallelConfig(), f"file://{tmp_path_factory.mktemp('world')}/init", device="cuda:0")
    yield
    topology.stop()


@pytest.fixture(scope="module")
def case(tiny: Any) -> "Case":
    return Case(tiny)


class Case:
    """One checkpoint, its profile and samples."""

    def __init__(self, tiny: Any, **overrides: Any) -> None:
        sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8}
        rest = {"head_dim": 128, "num_hidden_layers": 3, "vocab_size": 5000, "max_position_embeddings": 4096}
        self.config = tiny.tiny_config(**(sizes | rest | overrides))
        self.tensors = tiny.tiny_tensors(self.config)
        self.profile = tiny.tiny_profile(self.config, arch="sm90", leaves=2, vocab_tile=512)
        self.samples = tiny.tiny_samples(self.config["vocab_size"], LENGTHS)

    def model(self, mode: Any = "strict", recompute: Any = "none", modules: Any = ("core_attn",)) -> Any:
        model = build_model(
            self.config, self.profile, ParallelConfig(), mode=mode, recompute=recompute, recompute_modules=modules
        )
        load_tensors(model, self.tensors)
        return model.train()

    def batches(self, budget: int | None = None, samples: Any = None) -> list[PackedBatch]:
        limits = {"vocab_size": self.config["vocab_size"], "max_positions": 4096}
        return micro_batches(self.samples if samples is None else samples, budget, **limits)

    def scores(self, model: Any, budget: int | None = None, **kw: Any) -> torch.Tensor:
        return torch.cat([token_logprobs(model, b, **kw) for b in self.batches(budget)])

    def step(self, model: Any, optimizer: Any, budget: int | None = None, seed: int = 0) -> torch.Tensor:
        """Forward, loss and backward over all micro-batches; the log-probabilities."""
        generator = torch.Generator().manual_seed(seed)
        found = []
        total = sum(len(r) for _, r in self.samples)
        optimizer.zero_grad()
        for batch in self.batches(budget):
            logp = token_logprobs(model, batch, nonfinite="nan")
            gains = torch.randn(logp.numel(), generator=generator).cuda()
            loss = grpo_loss(logp, logp.detach(), gains, batch.loss_mask, denominator=total)
            loss.value.backward()
            optimizer.collect()
            found.append(logp.detach())
        return torch.cat(found)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.detach().contiguous().view(torch.int32 if x.element_size() == 4 else torch.int16)


def grads(optimizer: StrictOptimizer) -> dict[str, torch.Tensor]:
    return {name: state.grad.clone() for name, state in optimizer._states.items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in a if not torch.equal(bits(a[name]), bits(b[name]))]


def test_training_forward_scoring_and_every_split_have_the_same_bits(gpu: None, case: Case) -> None:
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
def test_recomputation_changes_no_bit(gpu: None, case: Case, which: str) -> None:
    plain, again = case.model(), case.model("strict", *RECOMPUTE[which])
    a, b = StrictOptimizer(plain), StrictOptimizer(again)
    reset_launches()
    want = case.step(plain, a)
    once = sum(r["count"] for r in launches() if "triton_hopper" in r["kernel"] or "triton_forward" in r["kernel"])
    reset_launches()
    got = case.step(again, b)
    twice = sum(r["count"] for r in launches() if "triton_hopper" in r["kernel"] or "triton_forward" in r["kernel"])
    assert twice == (once if which == "layernorm, mlp" else 2 * once), "the path was not taken"
    assert torch.equal(bits(got), bits(want))
    assert not same(grads(a), grads(b))
    a.step()
    b.step()
    assert not same(dict(plain.named_parameters()), dict(again.named_parameters()))


def test_twenty_steps_from_one_state_have_the_same_weights(gpu: None, case: Case) -> None:
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
def test_nothing_waits_for_the_device(gpu: None, case: Case, recompute: str) -> None:
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


def test_gradients_are_as_near_to_fp64_as_native_ones(gpu: None, case: Case) -> None:
    oracle = {n: t.double().cuda().requires_grad_() for n, t in case.tensors.items()}
    with torch.device("cuda"):
        exact = torch.cat([fp64.logprobs(case.config, oracle, p, r) for p, r in case.samples])
    weights = torch.randn(exact.numel(), generator=torch.Generator().manual_seed(3)).cuda()
    (exact * weights.double()).sum().backward()
    errors: dict[str, dict[str, float]] = {}
    for mode in ("strict", "native"):
        model = case.model(mode)
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
    assert max(worst.values()) < 1.5, worst
    assert max(errors["strict"].values()) < 0.1, errors["strict"]


def test_native_runs_torch_attention_and_no_strict_kernel(gpu: None, case: Case) -> None:
    model = case.model("native")
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


def test_gradient_norm_is_near_fp64_and_its_leaves_do_not_see_the_shard(gpu: None) -> None:
    from rl_megatron import triton_optimizer

    grad = torch.randn(4096, 3072, device="cuda") * 10.0 ** torch.randint(-6, 3, (4096, 1), device="cuda")
    for dim, fused in ((0, 1), (0, 2), (1, 1)):
        whole = torch.empty(8, dtype=torch.float64, device="cuda")
        triton_optimizer.square_sums(grad, whole, dim, fused)
        torch.testing.assert_close(whole.sum(), grad.double().square().sum(), rtol=1e-12, atol=0)
        for t in (1, 2, 4, 8):
            halves = [h.chunk(t, dim) for h in grad.chunk(fused, dim)]
            shards = [torch.cat(parts, dim).contiguous() for parts in zip(*halves)]
            mine = torch.empty(t, 8 // t, dtype=torch.float64, device="cuda")
            for shard, out in zip(shards, mine):
                triton_optimizer.square_sums(shard, out, dim, fused)
            assert torch.equal(mine.flatten(), whole), (dim, fused, t)


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
        leaf = logp.to(place).requires_grad_()
        args = [x.to(place) for x in (old, gains)]
        loss = grpo_loss(leaf, *args, mask, denominator=100.0, ref_logprob=ref.to(place), config=config)
        loss.value.backward()
        found.append((loss.value.detach().cpu(), loss.sums.cpu(), leaf.grad.cpu()))
    for a, b in zip(*found):
        assert torch.equal(a, b)


@pytest.mark.parametrize("distributed", [False, True])
def test_megatrons_own_optimizer(gpu: None, case: Case, distributed: bool) -> None:
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


def test_a_profile_of_another_device_is_refused(gpu: None, case: Case, tiny: Any) -> None:
    profile = tiny.tiny_profile(case.config, leaves=2)
    with pytest.raises(ContractError, match="arch='cpu', the trainer runs on cuda:0"):
        build_model(case.config, profile, ParallelConfig())


def test_a_nan_weight_is_refused_before_the_step(case: Case, tiny: Any, tmp_path: Path) -> None:
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


WORLDS = [(2, 1), (1, 2), (2, 2)]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory, tiny: Any) -> dict[tuple[int, int], list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("worlds")
    case = Case(tiny, num_hidden_layers=2)
    path = tiny.write_folder(folder / "model", case.config, case.tensors)
    job: dict[str, Any] = {
        "trainer": {
            "hf_path": path,
            "profile": case.profile,
            "optimizer": OptimizerConfig(lr=1e-3, weight_decay=0.1, clip_grad=1.0),
            "loss": LossConfig(kl_coef=0.05),
            "device": "cuda:0",
            "share_gpu": True,
        },
        "samples": case.samples,
        "advantages": [1.0, -0.5, 2.0, 0.3, -1.25, 0.7, -0.1],
        "budgets": (1000,),
        "steps": 2,
        "export": True,
    }
    found = {}
    for tp, cp in [(1, 1), *WORLDS]:
        cut = job | {"trainer": job["trainer"] | {"parallel": ParallelConfig(tp=tp, cp=cp)}}
        cases = {"strict": cut}
        if (tp, cp) in ((1, 1), (2, 2)):
            cases["native"] = cut | {"trainer": cut["trainer"] | {"mode": "native"}}
        found[tp, cp] = tiny.run_world(folder / f"tp{tp}cp{cp}", tp * cp, cases)
    return found


def equal(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    return len(a) == len(b) and all(np.array_equal(x.view(np.int32), y.view(np.int32)) for x, y in zip(a, b))


@pytest.mark.parametrize(("tp", "cp"), WORLDS)
def test_layout_every_world_scores_as_one_rank(worlds: Any, tp: int, cp: int) -> None:
    one = worlds[1, 1][0]["strict"]
    for rank in worlds[tp, cp]:
        got = rank["strict"]
        assert got["report"]["device"] == "cuda:0"
        assert set(got["report"]["transports"].values()) == {"staged-shared_memory"}
        assert equal(got["scores"], one["scores"])
        assert equal(got["warm"], one["warm"])
        assert equal(got["budgets"][1000], one["scores"])
        assert equal(got["steps"][0]["logprobs"], one["scores"])
        assert got["steps"][0]["ratio_mean"] == 1.0


@pytest.mark.parametrize(("tp", "cp"), WORLDS)
def test_layout_every_world_trains_the_weights_of_one_rank(worlds: Any, tp: int, cp: int) -> None:
    one, world = worlds[1, 1][0]["strict"], worlds[tp, cp]
    for rank in world:
        for a, b in zip(one["steps"], rank["strict"]["steps"]):
            assert (a["loss"], a["grad_norm"]) == (b["loss"], b["grad_norm"])
            assert equal(a["logprobs"], b["logprobs"])
    assert all(torch.equal(t, world[0]["strict"]["weights"][n]) for n, t in one["weights"].items())


def test_native_world_is_near_one_rank(worlds: Any) -> None:
    one, four = worlds[1, 1][0]["native"], worlds[2, 2][0]["native"]
    gap = np.concatenate(one["scores"]) - np.concatenate(four["scores"])
    assert 0 < np.abs(gap).mean() < 0.02
    assert four["steps"][0]["grad_norm"] == pytest.approx(one["steps"][0]["grad_norm"], rel=0.05)
