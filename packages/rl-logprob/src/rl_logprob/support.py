"""Which ids a token was drawn from: top-k, top-p and min-p as something a rollout stores and a trainer replays.

Definition. x = logit / temperature in fp32; ids stand in one total order, x descending, the lowest id first at a tie.
Filters act in vLLM's order: min-p keeps x - max >= log(min_p); top-k keeps the first k of those; top-p keeps the
shortest beginning of what is left whose weight reaches top_p times all of it, a product in fp64. A weight is
exp(x - max) as an integer in steps of 2**-42, whose sums have no order: a sort, a search, another device and any cut of
the vocabulary find the same ids.
So the kept ids of a row always are the ids above a value, and those that equal it up to one id.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_contract import ContractError
from rl_contract.checks import shown, whole_number
from rl_logprob import ops
from rl_logprob.checks import check_logits, check_tensor, check_vocab, number, row_temperature
from rl_logprob.contract import SUPPORT_MAX_VOCAB


@dataclass(frozen=True)
class SupportKey:
    """Kept ids of T rows in 12 bytes a row: those with x > threshold, and those with x == threshold up to ``last_id``.

    Exact where both engines have the same logits, bit for bit; where they have not, store ``SupportIds``.

    Attributes:
        threshold: fp32 [T], a value of x = logit / temperature; -inf keeps every id.
        last_id: int64 [T].
        temperature: that of x, without which a threshold says nothing: a number, fp32 [T] on the CPU where rows differ,
            None where it is not known, as for a tensor on a GPU, which is not looked at. Whoever uses the key at
            another one is refused. Pickling keeps a number only.
    """

    threshold: Tensor
    last_id: Tensor
    temperature: float | Tensor | None = None

    def __post_init__(self) -> None:
        for name, x, dtype in (
            ("threshold", self.threshold, torch.float32),
            ("last_id", self.last_id, torch.int64),
        ):
            check_tensor(name, x)
            if x.dim() != 1 or x.dtype != dtype or len(x) != len(self.threshold):
                raise ContractError(f"{name} is {x.dtype} {tuple(x.shape)}; needs {dtype} [T], one T for both")
        object.__setattr__(self, "temperature", _short_temperature(self.temperature, len(self.threshold)))

    def __reduce__(self) -> tuple[Any, ...]:
        held = None if isinstance(self.temperature, Tensor) else self.temperature
        return SupportKey, (self.threshold, self.last_id, held)

    def __len__(self) -> int:
        return len(self.threshold)

    def __getitem__(self, rows: slice | Tensor) -> "SupportKey":
        held = self.temperature
        if isinstance(held, Tensor):
            held = None if isinstance(rows, Tensor) and rows.is_cuda else held[rows]
        return SupportKey(self.threshold[rows], self.last_id[rows], held)

    def to(self, device: torch.device | str) -> "SupportKey":
        return SupportKey(self.threshold.to(device), self.last_id.to(device), self.temperature)

    @classmethod
    def cat(cls, parts: Sequence["SupportKey"]) -> "SupportKey":
        """The rows of all parts; the temperature is known where that of every part is."""
        held = [p.temperature if isinstance(p.temperature, Tensor) else [p.temperature] * len(p) for p in parts]
        known = all(p.temperature is not None for p in parts if len(p))
        temperature = torch.cat([torch.as_tensor(t, dtype=torch.float32) for t in held]) if known else None
        return cls(torch.cat([p.threshold for p in parts]), torch.cat([p.last_id for p in parts]), temperature)

    def outside(self, x: Tensor, targets: Tensor) -> Tensor:
        """bool [T]: whether each row's target, whose x fp32 [T] is given, is not kept."""
        return (x < self.threshold) | ((x == self.threshold) & (targets > self.last_id))

    def ids(self, logits: Tensor, *, vocab_size: int, temperature: float | Tensor = 1.0) -> "SupportIds":
        """The kept ids themselves, from logits fp32 [T, at least vocab_size]; waits for a GPU.

        Raises:
            ContractError: types, shapes, another temperature than the key's, or a row that would keep no id.
        """
        check_vocab(vocab_size, 1)
        check_logits(logits, vocab_size)
        check_support(self, len(logits), logits.device, temperature=temperature)
        temp = row_temperature(temperature, len(logits), logits.device)
        x = logits[:, :vocab_size] / temp[:, None] if temp.numel() else logits[:, :vocab_size]
        every = torch.arange(vocab_size, device=logits.device)
        outside = (x < self.threshold[:, None]) | ((x == self.threshold[:, None]) & (every > self.last_id[:, None]))
        rows, ids = (~outside).nonzero(as_tuple=True)
        counts = torch.bincount(rows, minlength=len(logits)).cpu()
        _raise_empty(counts == 0)
        return SupportIds(ids.to(torch.int32), _starts(counts))


@dataclass(frozen=True)
class SupportIds:
    """Kept ids of T rows, listed: row t keeps ``ids[starts[t]:starts[t + 1]]``, in any order.

    Attributes:
        ids: int32 [n], global ids.
        starts: int64 [T + 1] on the CPU, from 0 to n.
    """

    ids: Tensor
    starts: Tensor

    def __post_init__(self) -> None:
        check_tensor("ids", self.ids)
        check_tensor("starts", self.starts)
        if self.ids.dim() != 1 or self.ids.dtype != torch.int32:
            raise ContractError(f"ids are {self.ids.dtype} {tuple(self.ids.shape)}; needs int32 [n]")
        starts = self.starts
        if starts.dim() != 1 or starts.dtype != torch.int64 or starts.is_cuda or not len(starts):
            raise ContractError(f"starts are {starts.dtype} {tuple(starts.shape)}; needs int64 [T + 1] on the CPU")
        if int(starts[0]) != 0 or int(starts[-1]) != len(self.ids) or bool((starts.diff() < 0).any()):
            raise ContractError(f"starts must climb from 0 to the number of ids, {len(self.ids)}")

    @classmethod
    def from_lists(cls, kept: Sequence[Sequence[int]]) -> "SupportIds":
        """From one sequence of ids a row, as vLLM's ``return_sampling_mask`` gives them.

        Raises:
            ContractError: a row that is no sequence, or an id that is no integer of 0 to 2**31 - 1.
        """
        rows = [_listed(row, at) for at, row in enumerate(kept)]
        counts = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        return cls(torch.tensor([i for row in rows for i in row], dtype=torch.int32), _starts(counts))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, rows: slice) -> "SupportIds":
        first, last, step = rows.indices(len(self))
        if step != 1:
            raise ContractError(f"SupportIds[{rows}]; supported: slices of neighbouring rows")
        starts = self.starts[first : max(last, first) + 1]
        return SupportIds(self.ids[int(starts[0]) : int(starts[-1])], starts - starts[0])

    def to(self, device: torch.device | str) -> "SupportIds":
        return SupportIds(self.ids.to(device), self.starts)

    @classmethod
    def cat(cls, parts: Sequence["SupportIds"]) -> "SupportIds":
        return cls(torch.cat([p.ids for p in parts]), _starts(torch.cat([p.starts.diff() for p in parts])))

    def _rows(self) -> Tensor:
        """int64 [n]: the row of each id."""
        counts = self.starts.diff().to(self.ids.device, non_blocking=True)
        every = torch.arange(len(self), device=self.ids.device)
        return every.repeat_interleave(counts, output_size=len(self.ids))

    def outside(self, x: Tensor, targets: Tensor) -> Tensor:
        """bool [T]: whether each row's target is not listed."""
        rows = self._rows()
        hits = torch.zeros(len(self), dtype=torch.int32, device=self.ids.device)
        return hits.index_add_(0, rows, (self.ids == targets[rows]).to(torch.int32)) == 0

    def mask_(self, logits: Tensor, first_id: int, goal: Tensor | None) -> Tensor:
        """-inf into logits fp32 [T, C] of ids from ``first_id`` that are not listed and no goal int64 [T]; in place.

        A NaN or +inf stays, so that it shows.
        """
        columns = logits.shape[1]
        # what lies elsewhere goes to one more column, which is cut off: no look at the device
        keep = torch.zeros(logits.shape[0], columns + 1, dtype=torch.bool, device=logits.device)
        keep[self._rows(), _column(self.ids.to(torch.int64), first_id, columns)] = True
        if goal is not None:
            keep[torch.arange(len(goal), device=goal.device), _column(goal, first_id, columns)] = True
        return logits.masked_fill_(~keep[:, :columns] & (logits < torch.inf), -torch.inf)


Support = SupportKey | SupportIds


def _listed(row: Any, at: int) -> list[int]:
    ids = row.tolist() if isinstance(row, (Tensor, np.ndarray)) else row
    if not isinstance(ids, Sequence) or isinstance(ids, str):
        raise ContractError(f"row {at} of the kept ids is {shown(row)}; supported: a sequence of integers")
    for i in ids:
        if not whole_number(i) or not 0 <= i < 2**31:
            raise ContractError(f"row {at} lists the id {shown(i)}; supported: integers from 0 to 2**31 - 1")
    return list(ids)


def _starts(counts: Tensor) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int64), counts.to(torch.int64).cumsum(0)])


def _column(ids: Tensor, first_id: int, columns: int) -> Tensor:
    at = ids - first_id
    return torch.where((at >= 0) & (at < columns), at, columns)


def check_support(
    support: Support | None,
    rows: int,
    device: torch.device,
    vocab_size: int | None = None,
    temperature: float | Tensor = 1.0,
) -> None:
    """One row of support for each row of logits, on their device and at their temperature; on the CPU also every id and
    threshold.
    """
    if support is None:
        return
    if not isinstance(support, (SupportKey, SupportIds)):
        raise ContractError(f"support is a {type(support).__name__}; supported: SupportKey, SupportIds")
    held, other = (
        (support.threshold, support.last_id) if isinstance(support, SupportKey) else (support.ids, support.starts)
    )
    if not held.is_cuda:
        check_tensor("support", held)
        check_tensor("support", other)
    if len(support) != rows or held.device != device:
        raise ContractError(
            f"support has {len(support)} rows on {held.device}; needs {rows} on {device}; slice it, or use .to()"
        )
    if isinstance(support, SupportKey):
        _check_temperature(support.temperature, temperature, rows)
    if held.is_cuda:
        return
    if isinstance(support, SupportKey):
        if bool(torch.isnan(held).any()):
            raise ContractError(f"threshold of row {int(torch.isnan(held).nonzero()[0])} is NaN; supported: any number")
    elif vocab_size is not None and len(held) and not 0 <= int(held.min()) <= int(held.max()) < vocab_size:
        raise ContractError(f"support lists ids {int(held.min())}..{int(held.max())}; supported: 0..{vocab_size - 1}")


def said_support(support: Support | None) -> dict[str, Any]:
    """What ranks compare of a support: which kind it is, and on a CPU what it holds."""
    if isinstance(support, SupportKey):
        return {"threshold": support.threshold, "last_id": support.last_id}
    return {"support": None} if support is None else {"ids": support.ids, "starts": support.starts}


def _short_temperature(temperature: float | Tensor | None, rows: int) -> float | Tensor | None:
    """As a key holds it: a copy on the CPU, one number where all rows have the same."""
    if isinstance(temperature, Tensor):
        check_tensor("temperature", temperature)
    if temperature is None or (isinstance(temperature, Tensor) and temperature.is_cuda):
        return None
    by_row = isinstance(temperature, Tensor) and temperature.dim() > 0
    held = row_temperature(temperature, rows if by_row else 1)
    if not len(held):
        return None
    return float(held[0]) if bool((held == held[0]).all()) else held.detach().clone()


def _check_temperature(held: float | Tensor | None, given: float | Tensor, rows: int) -> None:
    if held is None or (isinstance(given, Tensor) and given.is_cuda):
        return
    here = row_temperature(given, rows if isinstance(given, Tensor) and given.dim() > 0 else 1)
    there = held if isinstance(held, Tensor) else torch.tensor([held], dtype=torch.float32)
    here, there = torch.broadcast_tensors(here, there)
    if bool((here != there).any()):
        row = int((here != there).nonzero()[0])
        raise ContractError(
            f"support was made at temperature {float(there[row]):g} and is used at {float(here[row]):g}, in row {row}; "
            "supported: one temperature, since a threshold is a logit divided by it; give the same to both, or, where "
            "one of them got logits that were divided already, dataclasses.replace(support, temperature=...)"
        )


def refuse_empty(support: Support, x: Tensor, targets: Tensor, state: Tensor) -> None:
    """Raise if a row has no kept id: its target, x fp32 [T], is outside, and yet is all that ``state`` [T, 3] sums."""
    _raise_empty(support.outside(x, targets) & (state[:, 0] == x) & (state[:, 1] == 0))


def refuse_undrawn(support: Support, logits: Tensor, temperature: Tensor, row: int) -> None:
    """Raise if ``row``, from which nothing was drawn, has finite logits, so that it is its support that is empty."""
    x = logits[row] / temperature[row] if temperature.numel() else logits[row]
    if bool((x < torch.inf).all()) and bool((x > -torch.inf).any()):
        _raise_empty(torch.arange(len(support)) == row)


def _raise_empty(empty: Tensor) -> None:
    if bool(empty.any()):
        raise ContractError(
            f"support of row {int(empty.nonzero()[0])} keeps no id ({int(empty.sum())} such rows); a sampler keeps at "
            "least one, so these are other logits or another temperature than those it was made from; give the same, "
            "store SupportIds where two engines' logits differ, and list any id for a masked position"
        )


def key_of(support: Support | None) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """threshold and last_id for the kernels, which read a list of ids nowhere: see ``masked_logits``."""
    return (
        (support.threshold.contiguous(), support.last_id.contiguous())
        if isinstance(support, SupportKey)
        else (None, None)
    )


def masked_logits(
    logits: Tensor,
    support: Support | None,
    vocab_size: int,
    goal: Tensor | None = None,
    temperature: float | Tensor = 1.0,
) -> tuple[Tensor, tuple[Tensor, Tensor] | tuple[None, None]]:
    """What kernels take: logits (a masked copy for a list of ids), and the threshold and last id, or None twice."""
    check_support(support, len(logits), logits.device, vocab_size, temperature)
    if isinstance(support, SupportIds):
        logits = support.mask_(logits[:, :vocab_size].clone(), 0, goal)
    return logits, key_of(support)


def _rows_of(name: str, value: float | Tensor, rows: int, logits: Tensor, dtype: torch.dtype) -> Tensor:
    whole = dtype == torch.int64
    if isinstance(value, Tensor):
        check_tensor(name, value)
        if value.shape != (rows,) or value.is_floating_point() == whole or value.dtype == torch.bool:
            raise ContractError(
                f"{name} is {value.dtype} {tuple(value.shape)}; needs {'integers' if whole else 'floats'} [{rows}]"
            )
        if not value.is_cuda:
            _refuse(name, value)
        return value.to(logits.device, dtype).contiguous()
    if not (whole_number(value) and -(1 << 63) <= int(value) < 1 << 63 if whole else number(value)):
        needed = "an integer of 64 bits" if whole else "a number"
        raise ContractError(f"{name}={shown(value)}; needs {needed}, or a tensor [{rows}]")
    one = torch.tensor([value], dtype=dtype)
    _refuse(name, one)
    return torch.full((rows,), one.item(), dtype=dtype, device=logits.device)


def _refuse(name: str, value: Tensor) -> None:
    if name == "top_k":
        good, wanted = value >= -1, "positive, 0 or -1 for off"
    elif name == "top_p":
        good, wanted = (value > 0) & (value <= 1), "above 0 and up to 1, 1 for off"
    else:
        good, wanted = (value >= 0) & (value <= 1), "0..1, 0 for off"
    if not bool(good.all()):
        row = int((~good).nonzero()[0])
        raise ContractError(f"{name}={value[row].item()} in row {row}; supported: {wanted}")


def sampling_support(
    logits: Tensor,
    *,
    vocab_size: int,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor = 0,
    top_p: float | Tensor = 1.0,
    min_p: float | Tensor = 0.0,
) -> SupportKey:
    """The ids that temperature, min-p, top-k and top-p keep, in this order; the likeliest id always is one of them.

    Args:
        logits: fp32 [T, at least vocab_size], all of the real vocabulary: a shard does not decide.
        vocab_size: up to 2**20.
        temperature: positive number, or fp32 [T]; 1.0 where the caller has divided already, who then names what by:
            ``dataclasses.replace(key, temperature=...)``.
        top_k: integer, or integers [T]; 0 and -1 are off.
        top_p: number in (0, 1], or floats [T]; 1 is off. Compared in fp64, as given.
        min_p: number in [0, 1], or floats [T]; 0 is off.

    Returns:
        SupportKey of T rows. A row with a NaN or +inf keeps every id, so that what scores it sees it; so does, on a GPU
        and without being looked at, a row whose tensor parameters there are out of range.

    Raises:
        ContractError: types, shapes, or a parameter out of range.
        MissingSupport: a device without kernels.
    """
    check_vocab(vocab_size, 1)
    check_logits(logits, vocab_size)
    if vocab_size > SUPPORT_MAX_VOCAB:
        raise ContractError(f"sampling_support got vocab_size={vocab_size}; supported: up to {SUPPORT_MAX_VOCAB}")
    rows = len(logits)
    temp = row_temperature(temperature, rows, logits.device)
    k = _rows_of("top_k", top_k, rows, logits, torch.int64)
    p = _rows_of("top_p", top_p, rows, logits, torch.float64)
    least = _rows_of("min_p", min_p, rows, logits, torch.float64)
    threshold, last_id = ops.support(logits.detach(), temp, k, p, least, vocab_size)
    return SupportKey(threshold, last_id, temperature)
