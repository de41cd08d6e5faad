"""AdamW on fp32 masters; gradients, norm and update depend on neither TP size nor thread count, bit for bit."""

import math
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from rl_contract import ContractError, MissingSupport
from rl_contract.devices import host_array
from rl_contract.shares import LaterShares
from rl_megatron import te, topology
from rl_megatron.checks import choice_problem, instance_problem, real
from rl_megatron.loss import fixed_sum
from rl_megatron.model import shard_dim


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW as in torch; ``weight_decay`` leaves vectors alone, ``clip_grad=0`` turns clipping off.

    ``kind`` is ``strict`` (``StrictOptimizer``) or ``megatron`` (``MegatronOptimizer``, GPUs only); ``distributed``
    is Megatron's distributed optimizer.
    """

    kind: Literal["strict", "megatron"] = "strict"
    distributed: bool = False
    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 1.0

    def __post_init__(self) -> None:
        pair = isinstance(self.betas, (tuple, list)) and len(self.betas) == 2
        b1, b2 = self.betas if pair else (None, None)
        numbers = (self.lr, b1, b2, self.eps, self.weight_decay, self.clip_grad)
        if not all(map(real, numbers)) or not (
            0 <= self.lr < math.inf
            and 0 <= self.betas[0] < 1
            and 0 <= self.betas[1] < 1
            and 0 < self.eps < math.inf
            and 0 <= self.weight_decay < math.inf
            and self.clip_grad >= 0
        ):
            raise ContractError(
                f"{self}; supported: finite lr and weight_decay >= 0, clip_grad >= 0, betas in [0, 1), finite eps > 0"
            )
        known = choice_problem("kind", self.kind, ("strict", "megatron")) is None and isinstance(self.distributed, bool)
        if not known or (self.distributed and self.kind != "megatron"):
            raise ContractError(
                f"{self}; supported: kind 'strict' or 'megatron', and distributed=True only with 'megatron'"
            )


class Optimizer(Protocol):
    """What a trainer asks of an optimizer."""

    steps: int

    def zero_grad(self) -> None: ...

    def collect(self) -> None:
        """Take over what a backward left; call after each."""
        ...

    def step(self) -> dict[str, Any]:
        """Reduce over ranks, clip, update; ``grad_norm`` before clipping, ``clip_coef`` and ``skipped``."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def ran(self) -> dict[str, str]:
        """What updates the weights, by module and name; ``class`` is the optimizer's own."""
        ...


def check_optimizer(config: OptimizerConfig, device_type: str) -> None:
    """Raise what ``make_optimizer`` would with a model on such a device, before there is one."""
    if problem := instance_problem("optimizer", config, OptimizerConfig):
        raise ContractError(problem)
    if config.kind == "megatron" and device_type != "cuda":
        raise MissingSupport("Megatron's optimizer needs CUDA tensors; use OptimizerConfig(kind='strict') on a CPU")


def make_optimizer(model: GPTModel, config: OptimizerConfig) -> Optimizer:
    """The optimizer that ``config.kind`` names.

    Raises:
        ContractError: no OptimizerConfig. MissingSupport: Megatron's own on a CPU.
    """
    if problem := instance_problem("optimizer", config, OptimizerConfig):
        raise ContractError(problem)
    if config.kind == "megatron":
        from rl_megatron.megatron_optimizer import MegatronOptimizer

        return MegatronOptimizer(model, config)
    return StrictOptimizer(model, config)


def is_head_norm(name: str) -> bool:
    """Whether a native backward leaves each tensor parallel rank with its heads' part of this gradient alone."""
    return name.endswith(("q_layernorm.weight", "k_layernorm.weight"))


@dataclass
class _State:
    parameter: torch.nn.Parameter
    # the parameter's main_grad: backward passes add into it in place
    grad: Tensor
    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


class StrictOptimizer:
    """Holds an fp32 master and two moments for every parameter and gives it an fp32 ``main_grad``.

    Backward passes add into ``main_grad``: the strict operators by themselves, other operators through ``collect``.
    With context parallelism it is whole, and the same on every rank, after ``reduce``: call that before you read or
    change it, and ``zero_grad`` after a backward that has failed.
    """

    def __init__(self, model: GPTModel, config: OptimizerConfig | None = None) -> None:
        self.config = config or OptimizerConfig()
        self.leaves = model.rl.profile.settings.leaves
        self.native = model.rl.mode == "native"
        self.steps = 0
        self._reduced = False
        comm = topology.context_parallel()
        # every backward adds to this rank's rows of a weight's gradient; peers want them once a step
        self._later = None if self.native or comm.world_size == 1 else LaterShares(comm)
        model.rl_later = self._later
        self._states: dict[str, _State] = {}
        for name, parameter in model.named_parameters():
            master = parameter.detach().float().clone()
            zeros = [torch.zeros_like(master) for _ in range(3)]
            self._states[name] = _State(parameter, zeros[0], master, zeros[1], zeros[2])
            setattr(parameter, "main_grad", zeros[0])  # noqa: B010 - Parameter declares no such attribute
        if model.rl.native_operators == "te":
            te.add_to_main_grads(model)

    def zero_grad(self) -> None:
        self._reduced = False
        torch._foreach_zero_([state.grad for state in self._states.values()])
        for state in self._states.values():
            state.parameter.grad = None
        if self._later is not None:
            self._later.clear()

    def collect(self) -> None:
        """Add gradients that autograd left in ``.grad`` to ``main_grad``; call after each backward.

        Raises:
            ContractError: a native backward after ``reduce``, whose share would be joined with sums.
        """
        for state in self._states.values():
            if state.parameter.grad is not None:
                if self._reduced and self.native:
                    raise ContractError("native gradients are reduced already; zero_grad() before another backward")
                state.grad.add_(state.parameter.grad)
                state.parameter.grad = None

    def reduce(self) -> None:
        """Make ``main_grad`` whole on every context parallel rank.

        Strict operators have taken all ranks' tokens in packed order, each rank for its rows of a weight; the rows of
        peers are taken over. The native arm's are summed in fp32, by NCCL or else the rank tree: each rank's loss is
        already a share of the whole, so the sum is the gradient. To call it again changes nothing.

        Raises:
            ContractError: a part of the gradients is lost since a backward or a call of this has failed.
        """
        self._settle()
        if not self.native or self._reduced:
            return
        self._reduced = True
        cp, tp = parallel_state.get_context_parallel_group(), parallel_state.get_tensor_model_parallel_group()
        for name, state in self._states.items():
            topology.native_sum_(state.grad, cp)
            if is_head_norm(name):
                topology.native_sum_(state.grad, tp)

    def _settle(self) -> None:
        if self._later is not None:
            self._later.settle()

    def grad_norm(self) -> float:
        """Euclidean norm over the whole model. Strict gradients are made whole first, as by ``reduce``.

        A sharded gradient is cut in the profile's leaves along its sharded dimension; squares of a leaf are summed in
        fp64 by a tree its size alone decides, leaves and parameters likewise, so the bits are those of one rank.
        """
        self._settle()
        comm = topology.tensor_parallel()
        cuts = [_Cut.of(name, state.grad, self.leaves, comm.world_size) for name, state in self._states.items()]
        sums = self._square_sums(cuts)
        joined = comm.all_gather(torch.cat([x for cut, x in zip(cuts, sums) if cut.shared] or [sums[0][:0]])[None])
        # a few numbers a parameter: Python's floats are fp64, and it adds them sooner than a tensor is made
        everyone, mine = joined.cpu().tolist(), iter(torch.cat(sums).cpu().tolist())
        totals, at = [], 0
        for cut in cuts:
            leaves = [next(mine) for _ in range(cut.mine)]
            if cut.shared:
                leaves = [x for row in everyone for x in row[at : at + cut.mine]]
                at += cut.mine
            totals.append(_tree(leaves))
        return math.sqrt(_tree(totals))

    def _square_sums(self, cuts: list["_Cut"]) -> list[Tensor]:
        """fp64 [this rank's leaves] of every parameter, on its device."""
        grads = [state.grad for state in self._states.values()]
        if not grads[0].is_cuda:
            return [_square_sums(grad, cut) for cut, grad in zip(cuts, grads)]
        from rl_megatron import triton_optimizer

        out = torch.empty(sum(cut.mine for cut in cuts), dtype=torch.float64, device=grads[0].device)
        sums = list(out.split([cut.mine for cut in cuts]))
        for cut, grad, target in zip(cuts, grads, sums):
            triton_optimizer.square_sums(grad, target, cut.dim, cut.fused)
        return sums

    def step(self) -> dict[str, Any]:
        """Reduce, clip and update; masters are rounded once to the model's type. Frozen parameters stay as they are.

        Returns:
            ``grad_norm`` before clipping, ``clip_coef``, ``skipped`` (a gradient that is not finite changes nothing).
        """
        self.reduce()
        norm = self.grad_norm()
        if not math.isfinite(norm):
            return {"grad_norm": norm, "clip_coef": 0.0, "skipped": True}
        c = self.config
        coef = min(1.0, c.clip_grad / (norm + 1e-6)) if c.clip_grad > 0 else 1.0
        self.steps += 1
        b1, b2 = c.betas
        size = c.lr / (1 - b1**self.steps)
        root2 = math.sqrt(1 - b2**self.steps)
        with torch.no_grad():
            for state in self._states.values():
                if not state.parameter.requires_grad:
                    continue
                decay = c.weight_decay if state.grad.dim() > 1 else 0.0
                _update(state, coef, b1, b2, size, root2, c.eps, 1.0 - c.lr * decay)
        return {"grad_norm": norm, "clip_coef": coef, "skipped": False}

    def state_dict(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "state": {
                n: {"master": s.master, "exp_avg": s.exp_avg, "exp_avg_sq": s.exp_avg_sq}
                for n, s in self._states.items()
            },
        }

    def ran(self) -> dict[str, str]:
        """See ``Optimizer.ran``."""
        return {"class": f"{type(self).__module__}.{type(self).__qualname__}"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ContractError where names or shapes differ, before anything is written."""
        mine = {n: tuple(s.master.shape) for n, s in self._states.items()}
        theirs = {n: tuple(s["master"].shape) for n, s in state["state"].items()}
        if mine != theirs:
            differing = sorted(n for n in mine.keys() | theirs.keys() if mine.get(n) != theirs.get(n))
            raise ContractError(f"optimizer state differs in {differing[:8]}; load the state of the same model and tp")
        self.steps = int(state["steps"])
        with torch.no_grad():
            for name, s in self._states.items():
                saved = state["state"][name]
                s.master.copy_(saved["master"])
                s.exp_avg.copy_(saved["exp_avg"])
                s.exp_avg_sq.copy_(saved["exp_avg_sq"])
                s.parameter.copy_(s.master)


def _tree(x: list[float]) -> float:
    """``loss.tree_total`` of a few numbers on the host."""
    while len(x) > 1:
        joined = [a + b for a, b in zip(x[::2], x[1::2])]
        x = joined if len(x) % 2 == 0 else [*joined, x[-1]]
    return x[0] if x else 0.0


def _update(
    state: _State, coef: float, b1: float, b2: float, size: float, root2: float, eps: float, keep: float
) -> None:
    if state.grad.is_cuda:
        from rl_megatron import triton_optimizer

        step = triton_optimizer.Step(coef=coef, b1=b1, b2=b2, size=size, root2=root2, eps=eps)
        triton_optimizer.adamw(
            state.master, state.exp_avg, state.exp_avg_sq, state.grad, state.parameter.data, step, keep
        )
        return
    if coef < 1.0:
        state.grad.mul_(coef)
    _adamw(state, state.grad, b1, b2, size, root2, eps, keep)
    state.parameter.copy_(state.master)


def _adamw(
    state: _State, grad: Tensor, b1: float, b2: float, size: float, root2: float, eps: float, keep: float
) -> None:
    # one rounded operation a line: a fused multiply-add would round differently in a vector's body and in its tail,
    # and where an element lies in a vector depends on how the tensor is sharded
    m, v = state.exp_avg, state.exp_avg_sq
    m.mul_(b1).add_(grad * (1 - b1))
    v.mul_(b2).add_((grad * grad).mul_(1 - b2))
    # torch takes a CPU's square root from a vector library that rounds one in seven otherwise; NumPy's is IEEE's
    root = torch.from_numpy(np.sqrt(host_array(v)))
    denominator = root.div_(root2).add_(eps)
    if keep != 1.0:
        state.master.mul_(keep)
    state.master.sub_((m / denominator).mul_(size))


@dataclass(frozen=True)
class _Cut:
    """How the gradient norm cuts a parameter: ``mine`` leaves on this rank along ``dim``; ``shared`` with the TP peers.

    Of [gate; up], ``fused`` 2, a leaf is the same slice of both halves.
    """

    dim: int | None
    mine: int
    fused: int
    shared: bool

    @classmethod
    def of(cls, name: str, grad: Tensor, leaves: int, world_size: int) -> "_Cut":
        dim = shard_dim(name)
        total = 1 if dim is None else math.gcd(leaves, grad.shape[dim] * world_size)
        if dim is None or total % world_size:
            return cls(None, 1, 1, False)
        return cls(dim, total // world_size, 2 if name.endswith("linear_fc1.weight") else 1, True)


def _leaf_parts(grad: Tensor, dim: int, count: int, fused: int) -> list[Tensor]:
    halves = grad.chunk(fused, dim)
    return [torch.cat(parts, dim) for parts in zip(*(h.chunk(count, dim) for h in halves))]


def _square_sums(grad: Tensor, cut: _Cut) -> Tensor:
    parts = [grad] if cut.dim is None else _leaf_parts(grad, cut.dim, cut.mine, cut.fused)
    return torch.tensor([fixed_sum(part.flatten().double().square()) for part in parts], dtype=torch.float64)
