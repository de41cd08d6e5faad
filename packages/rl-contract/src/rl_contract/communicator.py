"""What an operator may ask of its peers. rl-comm implements it; ``SingleRank`` is the world of one."""

import zlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch._guards import detect_fake_mode

from rl_contract import checks
from rl_contract.devices import host_array, row_major_bytes
from rl_contract.errors import ContractError


@runtime_checkable
class Communicator(Protocol):
    """Peers in a fixed order. Every reduction is the balanced tree over ranks, lower rank on the left, in fp32."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def all_reduce(self, partial: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """Sum fp32 ``partial`` by the tree, round once to ``out_dtype`` of ``OUT_DTYPES`` (default fp32).

        Same bits on every rank.
        """
        ...

    def reduce_scatter(
        self, partial: torch.Tensor, *, dim: int = 0, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """This rank's equal slice along ``dim`` of what ``all_reduce`` would give."""
        ...

    def all_gather(self, x: torch.Tensor, *, dim: int = 0) -> torch.Tensor:
        """Concatenate equal-shaped ``x`` of every rank along ``dim``, rank 0 first. Moves bytes."""
        ...


def gather_each(comm: Communicator, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """``comm.all_gather(x, dim=0)`` of each tensor; one call where ``comm`` has ``all_gather_each``. No gradient."""
    each: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]] | None = getattr(comm, "all_gather_each", None)
    if each is None or len(tensors) == 1:
        return [comm.all_gather(x.detach(), dim=0) for x in tensors]
    return each(tensors)


def gather_said(comm: Communicator, x: torch.Tensor, said: str, *, dim: int = 0) -> torch.Tensor:
    """``comm.all_gather``; where ``comm`` has ``all_gather_said``, ranks that say something else are refused by it.

    Args:
        said: what the operator was given that all ranks must be given alike, as far as it is known without waiting for
            a device; empty to compare nothing.
    """
    gather: Callable[..., torch.Tensor] | None = getattr(comm, "all_gather_said", None)
    return comm.all_gather(x, dim=dim) if gather is None else gather(x, said, dim=dim)


def said_of(operator: str, **given: Any) -> str:
    """What an operator was given, for ``gather_said``: numbers by their value, whatever type holds it, truth values,
    texts and types as they are, tensors on the CPU as a check over their bytes, others as where they are; empty where a
    compiler looks on, or a tensor on the CPU has no bytes of its own, as inside ``torch.func``.
    """
    if torch.compiler.is_compiling():
        return ""
    read = [x for x in given.values() if isinstance(x, torch.Tensor) and x.device.type == "cpu"]
    if read and (detect_fake_mode(read) is not None or not all(map(_has_bytes, read))):
        return ""
    return f"{operator}({', '.join(f'{name}={_said(x)}' for name, x in given.items())})"


def _has_bytes(x: torch.Tensor) -> bool:
    own = type(x).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return own and not torch._C._functorch.is_functorch_wrapped_tensor(x)


def _said(x: Any) -> str:
    if not isinstance(x, torch.Tensor):
        if not isinstance(x, (int, float, np.integer, np.floating)) or isinstance(x, bool):
            return str(x)
        # 1, 1.0 and NumPy's are one number, and so are 0.0 and -0.0
        whole = int(x) if isinstance(x, (int, np.integer)) or float(x).is_integer() else None
        if whole is None:
            return repr(float(x))
        # Python writes no long integer in decimal
        return str(whole) if abs(whole) < 1 << 64 else hex(whole)
    if x.device.type != "cpu":
        return f"a tensor on {x.device.type}"
    check = zlib.crc32(host_array(row_major_bytes(x)).data)
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)} (check {check:08x})"


def refuse(problem: Exception, *peers: Any, given: Sequence[Any] = ()) -> None:
    """Tell each of ``peers`` of ``problem``, which ends an operator on this rank, before the operator raises it.

    Peers would wait for this rank in the operator's collectives. Each one's next call of the communicator raises
    ContractError naming this rank instead, and calls after that are in step; when they learn of it is the
    communicator's affair (``TreeCommunicator.refuse``). Nobody is waited for, and nothing is exchanged where a compiler
    looks on, with peers of a communicator that has raised ``problem``, or in a world of one.

    Args:
        peers: communicators and TokenShards the operator was given; what has no ``refuse`` is passed over.
        given: the operator's tensors; the first one says on which device peers make their call.
    """
    tensors = [x for x in given if isinstance(x, torch.Tensor)]
    if not torch.compiler.is_compiling() and detect_fake_mode(tensors) is None:
        for comm in peers:
            tell(comm, problem, next((x.device.type for x in tensors), ""))


def tell(comm: Any, problem: Exception, device: str = "") -> None:
    """Tell the peers of ``comm`` that this rank ends with ``problem``, if they do not know, and it can."""
    say: Callable[..., None] | None = getattr(comm, "refuse", None)
    # how activation checkpointing ends a recomputation is no refusal, and may be one rank's own affair
    if say is None or is_known(problem, comm) or type(problem).__name__ == "_StopRecomputationError":
        return
    know(problem, comm)
    try:
        say(problem, device=device)
    except Exception as error:
        problem.add_note(f"peers could not be told: {type(error).__name__}: {error}")


def know(problem: BaseException, comm: Any) -> None:
    """Note that the peers of ``comm`` know of ``problem``, or have met it themselves."""
    problem._rl_known_by = (*getattr(problem, "_rl_known_by", ()), id(comm))  # type: ignore[attr-defined]


def is_known(problem: BaseException, comm: Any) -> bool:
    return id(comm) in getattr(problem, "_rl_known_by", ())


OUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What a sum may be rounded to, the floating types of models; an fp16 result beyond 65504 is infinite."""


def tensor_problem(op: str, x: object) -> ContractError | None:
    """The refusal of an argument that is no dense tensor, or holds no values."""
    if (problem := checks.tensor_problem("it", x)) is None:
        return None
    given = f"a {type(x).__name__}"
    if isinstance(x, torch.Tensor):
        if x.layout == torch.strided and not x.is_nested:
            return ContractError(f"{op} got {problem}")
        given = f"a {'nested ' if x.is_nested else ''}tensor of layout {x.layout}"
    return ContractError(f"{op} got {given}, supported: a dense torch.Tensor; convert it first")


def dim_problem(x: torch.Tensor, dim: int) -> ContractError | None:
    """The refusal of a ``dim`` that names no dimension of ``x``."""
    if (problem := tensor_problem("a collective", x)) is not None:
        return problem
    if isinstance(dim, int) and not isinstance(dim, bool) and -x.dim() <= dim < x.dim():
        return None
    return ContractError(
        f"got dim={checks.shown(dim)} for a tensor of shape {tuple(x.shape)}; it must name one of its dimensions"
    )


def sum_problem(op: str, partial: torch.Tensor, out_dtype: torch.dtype | None) -> ContractError | None:
    """The refusal of a sum that is not fp32, or whose result a type would truncate."""
    if (problem := tensor_problem(op, partial)) is not None:
        return problem
    if partial.dtype != torch.float32:
        return ContractError(
            f"{op} got a partial of {partial.dtype}, supported: torch.float32; "
            "keep the partial sum in fp32, the result is rounded once to out_dtype"
        )
    if out_dtype is not None and (said := checks.dtype_problem("out_dtype", out_dtype, OUT_DTYPES)):
        return ContractError(f"{op} got {said}")
    return None


class SingleRank:
    """A world of one rank: every collective is the identity, with the same rounding and the same refusals."""

    rank = 0
    world_size = 1

    def all_reduce(self, partial: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        _raise(sum_problem("all_reduce", partial, out_dtype))
        return partial if out_dtype is None else partial.to(out_dtype)

    def reduce_scatter(
        self, partial: torch.Tensor, *, dim: int = 0, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        _raise(sum_problem("reduce_scatter", partial, out_dtype) or dim_problem(partial, dim))
        return partial if out_dtype is None else partial.to(out_dtype)

    def refuse(self, problem: Exception, *, device: str = "") -> None:
        """Nobody waits."""

    def all_gather(self, x: torch.Tensor, *, dim: int = 0) -> torch.Tensor:
        _raise(dim_problem(x, dim))
        return x


def _raise(problem: ContractError | None) -> None:
    if problem is not None:
        raise problem
