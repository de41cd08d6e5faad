"""The loss against plain torch, AdamW against torch's, and both against layout; the CPU answers come and go."""

import math
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rl_contract import ContractError, MissingSupport
from rl_megatron import (
    LossConfig,
    OptimizerConfig,
    ParallelConfig,
    cpu_device,
    group_advantages,
    grpo_loss,
    topology,
)
from rl_megatron.imports import missing
from rl_megatron.loss import exp_f64, fixed_sum, tree_total
from rl_megatron.optimizer import _adamw, _Cut, _square_sums, _State, _tree


def plain_loss(
    logp: torch.Tensor, old: torch.Tensor, gain: torch.Tensor, ref: torch.Tensor, mask: torch.Tensor, config: LossConfig
) -> torch.Tensor:
    ratio = (logp - old).exp()
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    policy = -torch.minimum(ratio * gain, clipped * gain)
    kl = (ref - logp).exp() - (ref - logp) - 1
    return ((policy + config.kl_coef * kl) * mask).sum() / mask.sum()


def test_loss_and_gradient_match_plain_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    old, noise, ref, gain = (torch.randn(4001, generator=generator) for _ in range(4))
    mask = torch.rand(4001, generator=generator) > 0.3
    config = LossConfig(clip_low=0.2, clip_high=0.3, kl_coef=0.1)
    logp = (old + 0.5 * noise).requires_grad_(True)
    loss = grpo_loss(logp, old, gain, mask, denominator=int(mask.sum()), ref_logprob=ref, config=config)
    loss.value.backward()
    double = logp.detach().double().requires_grad_(True)
    want = plain_loss(double, old.double(), gain.double(), ref.double(), mask, config)
    want.backward()
    assert float(loss.value) == pytest.approx(float(want), rel=1e-12)
    torch.testing.assert_close(logp.grad, double.grad.float(), rtol=1e-6, atol=1e-10)
    assert 0 < loss.clipped_count < loss.valid_count == int(mask.sum())
    assert not logp.grad[~mask].any()


@pytest.mark.field_report("R10")
def test_on_policy_ratio_is_one_and_kl_zero() -> None:
    logp = torch.linspace(-30, -1e-6, 1001).requires_grad_(True)
    same = logp.detach()
    gain = torch.zeros_like(same)
    everything = torch.ones(1001, dtype=torch.bool)
    loss = grpo_loss(logp, same, gain, everything, denominator=1001, ref_logprob=same, config=LossConfig(kl_coef=0.001))
    loss.value.backward()
    assert (float(loss.value), loss.kl_sum, loss.clipped_count, loss.ratio_sum) == (0.0, 0.0, 0, 1001.0)
    assert not logp.grad.any()


def test_loss_does_not_depend_on_a_tokens_place() -> None:
    # a vectorised exp may round a vector's body and its tail differently
    logp, old = torch.full((37,), -1.2345), torch.full((37,), -1.3001)
    ones, everything = torch.ones(37), torch.ones(37, dtype=torch.bool)
    grads = []
    for n in range(1, 38):
        x = logp[:n].clone().requires_grad_(True)
        grpo_loss(x, old[:n], ones[:n], everything[:n], denominator=1).value.backward()
        grads.append(x.grad)
    assert all(bool((g == grads[0][0]).all()) for g in grads)


def test_loss_refuses_a_missing_reference_and_odd_shapes() -> None:
    x, mask = torch.zeros(3), torch.ones(3, dtype=torch.bool)
    with pytest.raises(ContractError, match="ref_logprob"):
        grpo_loss(x, x, x, mask, denominator=3, config=LossConfig(kl_coef=0.1))
    with pytest.raises(ContractError, match="shapes"):
        grpo_loss(x, torch.zeros(2), x, mask, denominator=3)


@pytest.mark.parametrize("denominator", [-2.0, 0.0, 0, math.inf, math.nan, True, "3", torch.tensor(3.0)])
def test_loss_refuses_a_denominator_that_is_none(denominator: Any) -> None:
    x, mask = torch.zeros(3), torch.ones(3, dtype=torch.bool)
    with pytest.raises(ContractError, match=r"denominator=.*3 valid tokens; supported: a finite number"):
        grpo_loss(x, x, x, mask, denominator=denominator)
    if denominator != 0:
        with pytest.raises(ContractError, match="0 valid tokens"):
            grpo_loss(x, x, x, ~mask, denominator=denominator)


def test_loss_is_the_sum_over_the_denominator_also_below_one() -> None:
    x, mask = torch.zeros(3, requires_grad=True), torch.tensor([True, False, True])
    gains = torch.tensor([1.0, 7.0, 2.0])
    for denominator in (2, 0.5, np.float64(4.0), np.int64(8)):
        loss = grpo_loss(x, x.detach(), gains, mask, denominator=denominator)
        assert float(loss.value) == -3.0 / denominator
        x.grad = None
        loss.value.backward()
        assert x.grad is not None
        assert x.grad.tolist() == [-1.0 / denominator, 0.0, -2.0 / denominator]
    assert float(grpo_loss(x, x.detach(), gains, mask & False, denominator=0).value) == 0.0


@pytest.mark.parametrize("mask", [torch.tensor([2, 0, 1]), torch.tensor([1.0, 0.0, 1.0]), torch.tensor([1, 0, 1])])
def test_loss_refuses_a_mask_that_is_no_bool(mask: torch.Tensor) -> None:
    x = torch.zeros(3)
    with pytest.raises(ContractError, match=rf"mask of {mask.dtype}, supported: torch.bool"):
        grpo_loss(x, x, x, mask, denominator=2)


def test_loss_of_what_is_no_tensor_is_refused_by_name() -> None:
    x, mask = torch.zeros(3), torch.ones(3, dtype=torch.bool)
    for name in ("logprob", "old_logprob", "advantages", "mask", "ref_logprob", "config"):
        given: dict[str, Any] = {"logprob": x, "old_logprob": x, "advantages": x, "mask": mask, name: [0.0, 0.0, 0.0]}
        with pytest.raises(ContractError, match=rf"{name}=\[0.0, 0.0, 0.0\], supported: a"):
            grpo_loss(**given, denominator=1)


def test_group_advantages_are_centred_and_zero_for_equal_rewards() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.1, 0.1, 0.1, 0.1])
    got = group_advantages(rewards, 4)
    torch.testing.assert_close(got[:4], torch.tensor([1.0, -1.0, -1.0, 1.0]), rtol=1e-5, atol=0)
    assert not got[4:].any()
    with pytest.raises(ContractError, match="whole groups"):
        group_advantages(rewards, 3)
    for size in (0, -4, 4.0, True):
        with pytest.raises(ContractError, match=f"group_size={size}, supported: an integer"):
            group_advantages(rewards, size)  # type: ignore[arg-type]
    for wrong in ([1.0, 0.0], None, 3, torch.zeros(4, dtype=torch.complex64)):
        with pytest.raises(ContractError, match=r"rewards=.*supported: a tensor"):
            group_advantages(wrong, 4)  # type: ignore[arg-type]
    for number in (math.nan, math.inf, -math.inf):
        with pytest.raises(ContractError, match=f"the reward of sample 5 is {number}, supported: finite"):
            group_advantages(torch.cat([rewards[:5], torch.tensor([number, number, 1.0])]), 4)
    assert torch.equal(group_advantages(torch.tensor([2, 0]), np.int64(2)), group_advantages(torch.tensor([2.0, 0]), 2))
    for eps in (-1.0, math.nan, "x", None):
        with pytest.raises(ContractError, match=f"eps={eps!r}, supported"):
            group_advantages(rewards, 4, eps=eps)  # type: ignore[arg-type]


@pytest.mark.parametrize("n", [0, 1, 2, 3, 7, 64, 1001])
def test_fixed_sum_is_a_balanced_tree(n: int) -> None:
    x = torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) * 1e8
    assert fixed_sum(x) == pytest.approx(math.fsum(x.tolist()), rel=1e-12, abs=1e-6)
    if n == 64:
        assert tree_total(x) == tree_total(x[:32]) + tree_total(x[32:])
        assert fixed_sum(x) != sum(x.tolist()), "a left fold must show, or the order is not tested"
    level = x.tolist()
    while len(level) > 1:
        level = [a + b for a, b in zip(level[::2], level[1::2])] + level[len(level) // 2 * 2 :]
    # rows side by side, sums of signed zeros, and the host's form
    rows = torch.stack([x, -x, torch.full((n,), -0.0, dtype=torch.float64)])
    want = torch.tensor([*level, *(-v for v in level), -0.0] if n else [0.0] * 3, dtype=torch.float64)
    assert torch.equal(tree_total(rows).view(torch.int64), want.view(torch.int64))
    assert _tree(x.tolist()) == fixed_sum(x)


def state_of(master: torch.Tensor) -> _State:
    zeros = [torch.zeros_like(master) for _ in range(3)]
    return _State(torch.nn.Parameter(master.bfloat16()), zeros[0], master.clone(), zeros[1], zeros[2])


def test_adamw_matches_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    master = torch.randn(33, 65, generator=generator)
    reference = torch.nn.Parameter(master.double())
    torch_adamw = torch.optim.AdamW([reference], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    state = state_of(master)
    for step in range(1, 6):
        grad = torch.randn(33, 65, generator=generator)
        reference.grad = grad.double()
        torch_adamw.step()
        _adamw(state, grad, 0.9, 0.95, 1e-2 / (1 - 0.9**step), math.sqrt(1 - 0.95**step), 1e-8, 1 - 1e-2 * 0.1)
    torch.testing.assert_close(state.master.double(), reference.detach(), rtol=1e-5, atol=1e-6)


def test_layout_adamw_of_a_shard_is_the_shard_of_adamw() -> None:
    generator = torch.Generator().manual_seed(0)
    master, grad = (torch.randn(64, 67, generator=generator) for _ in range(2))
    whole = state_of(master)
    shards = [state_of(part.contiguous()) for part in master.chunk(4, 1)]
    for step in range(1, 4):
        args = (0.9, 0.95, 1e-3 / (1 - 0.9**step), math.sqrt(1 - 0.95**step), 1e-8, 0.9999)
        _adamw(whole, grad * step, *args)
        for shard, part in zip(shards, grad.chunk(4, 1)):
            _adamw(shard, (part * step).contiguous(), *args)
    assert torch.equal(whole.master, torch.cat([s.master for s in shards], 1))


@pytest.mark.parametrize("fused", [1, 2])
def test_layout_leaves_of_a_gradient_norm(fused: int) -> None:
    # rank r of t holds leaves [rG/t, (r+1)G/t); of [gate; up] each rank holds both halves' parts
    grad = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    whole = _square_sums(grad, _Cut(0, 8, fused, True))
    for t in (2, 4, 8):
        shards = [torch.cat(parts) for parts in zip(*(h.chunk(t) for h in grad.chunk(fused)))]
        assert torch.equal(torch.cat([_square_sums(s, _Cut(0, 8 // t, fused, True)) for s in shards]), whole)


def test_exponential_is_the_named_primitive() -> None:
    """The bits of rl_contract's exp2 at x log2(e), which the loss had before it could run on a GPU."""
    from rl_contract.primitives import LOG2E, exp2_f64

    generator = torch.Generator().manual_seed(0)
    x = torch.cat([torch.randn(2001, dtype=torch.float64, generator=generator) * s for s in (1e-6, 1.0, 30.0)])
    want = [exp2_f64(v * LOG2E) for v in x.tolist()]
    assert exp_f64(x).tolist() == want
    assert exp_f64(torch.tensor([0.0, float("nan")], dtype=torch.float64)).isnan().tolist() == [False, True]
    torch.testing.assert_close(exp_f64(x), x.exp(), rtol=1e-14, atol=0)


def test_cpu_answers_are_undone_also_after_an_error() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is CUDA to ask")
    before = torch.cuda.current_device

    def failing() -> None:
        with cpu_device() as installed:
            assert installed
            with cpu_device():
                assert torch.cuda.current_device() == torch.device("cpu")
            assert torch.zeros(1, device=torch.cuda.current_device()).device.type == "cpu"
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        failing()
    assert torch.cuda.current_device is before


@pytest.mark.parametrize(
    ("device", "error", "words"),
    [
        ("tpu", ContractError, "device='tpu'; supported: 'cpu', 'cuda', 'cuda:N'"),
        ("mps", ContractError, "device='mps'; supported"),
        ("cuda:99", MissingSupport, "cuda:99"),
    ],
)
def test_a_device_that_is_not_there_is_refused(tmp_path: Path, device: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=re.escape(words)):
        topology.start(0, ParallelConfig(), f"file://{tmp_path}/init", device=device)
    assert not (tmp_path / "init").exists()


def test_optimizer_kinds_are_named() -> None:
    with pytest.raises(ContractError, match="kind 'strict' or 'megatron'"):
        OptimizerConfig(kind="apex")  # type: ignore[arg-type]
    with pytest.raises(ContractError, match="kind 'strict' or 'megatron'"):
        OptimizerConfig(kind=np.array(["strict", "megatron"]))  # type: ignore[arg-type]
    with pytest.raises(ContractError, match="distributed=True only with 'megatron'"):
        OptimizerConfig(distributed=True)


DIFFERING = """
import sys
from rl_contract import ContractError
from rl_megatron import ParallelConfig, topology

rank = int(sys.argv[1])
topology.start(rank, ParallelConfig(tp=2), "file://" + sys.argv[2])
topology.agree({"profile": "a", "parallel": ParallelConfig(tp=2)})
try:
    topology.agree({"profile": "ab"[rank], "dtype": "bfloat16"})
except ContractError as error:
    print(error)
topology.stop()
"""


@pytest.mark.engine
def test_a_rank_of_another_profile_is_named_on_every_rank(tiny: Any, tmp_path: Path) -> None:
    for said in tiny.said_by_two(DIFFERING, tmp_path):
        assert "rank 1 has profile='b', rank 0 'a'" in said


def test_the_hint_asks_for_what_the_extra_asks_for() -> None:
    error = ModuleNotFoundError("No module named 'megatron'", name="megatron.core")
    about = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    (wanted,) = about["project"]["optional-dependencies"]["megatron"]
    assert str(missing("rl_megatron.x", error)).endswith(f"; pip install '{wanted}'")
    assert missing("rl_megatron.x", ModuleNotFoundError("No module named 'triton'", name="triton")) is None


def test_without_megatron_every_name_that_needs_it_names_it() -> None:
    script = """
import sys
sys.modules["megatron"] = None
import rl_megatron
from rl_contract import MissingSupport
free = {"ModelConfig", "ParallelConfig", "cpu_device", "LossConfig", "group_advantages", "grpo_loss"}
assert free < set(rl_megatron.__all__)
for name in free:
    getattr(rl_megatron, name)
for name in [*(set(rl_megatron.__all__) - free), "topology", "trainer"]:
    try:
        exec(f"from rl_megatron import {name}")
    except MissingSupport as error:
        assert f"rl_megatron.{name} needs megatron-core, which is not installed" in str(error), error
        assert "pip install 'megatron-core>=0.16.1'" in str(error), error
    else:
        sys.exit(f"{name} came without megatron")
for name in ("native", "megatron_optimizer", "step_inputs", "trainer"):
    try:
        exec(f"import rl_megatron.{name}")
    except MissingSupport as error:
        assert f"rl_megatron.{name} needs megatron-core, which is not installed" in str(error), error
    else:
        sys.exit(f"{name} came without megatron")
assert not hasattr(rl_megatron, "nothing")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("moved_by", ["nccl", "staged-gloo"])
def test_native_gradients_are_summed_by_nccl_only_where_it_moves_bytes(
    monkeypatch: pytest.MonkeyPatch, moved_by: str
) -> None:
    from types import SimpleNamespace

    from rl_comm import TreeCommunicator

    class OnGpu(SimpleNamespace):
        is_cuda = True

        def copy_(self, other: Any) -> None:
            called.append(other)

    called: list[Any] = []
    comm = TreeCommunicator.over({"cuda": SimpleNamespace(name=moved_by)}, 0, 2)  # type: ignore[dict-item]
    monkeypatch.setattr(comm, "all_reduce", lambda x: "tree")
    monkeypatch.setattr(topology, "communicator", lambda group: comm)
    monkeypatch.setattr(topology.dist, "all_reduce", lambda x, group: called.append((x, group)))
    x = OnGpu()
    topology.native_sum_(x, "peers")  # type: ignore[arg-type]
    assert called == ([(x, "peers")] if moved_by == "nccl" else ["tree"])


@pytest.mark.parametrize(("mode", "count"), [("native", 4), ("strict", 0)])
def test_megatrons_optimizer_joins_the_head_norm_gradients_of_native_ranks(
    one_rank: None, tiny: Any, monkeypatch: pytest.MonkeyPatch, mode: str, count: int
) -> None:
    from types import SimpleNamespace

    from rl_megatron.megatron_optimizer import MegatronOptimizer

    model = tiny.tiny_model("Qwen3ForCausalLM", False, mode=mode)[2]
    for parameter in model.parameters():
        parameter.main_grad = torch.ones(parameter.shape)
    # as it is on a GPU, but for what Megatron does there
    optimizer: Any = object.__new__(MegatronOptimizer)
    optimizer.config, optimizer.steps = OptimizerConfig(kind="megatron"), 0
    optimizer._wrapped = SimpleNamespace(module=model, finish_grad_sync=lambda: None)
    optimizer._optimizer = SimpleNamespace(step=lambda: (True, 1.0, None))
    monkeypatch.setattr(topology, "native_sum_", lambda x, group: x.mul_(2.0))
    optimizer.step()
    joined = [name for name, parameter in model.named_parameters() if bool((parameter.main_grad == 2).all())]
    assert len(joined) == count
    assert all("_layernorm" in name and "self_attention" in name for name in joined)
