"""What a packed call says about its sequences, checked.

On a GPU this is done once per tensor, since each look at a value stops the stream; tensors that come from the host are
looked at there and stop nothing.
"""

from typing import Any

import torch

from rl_attn.calls import ByTensor, Values, counted
from rl_attn.checks import require_cu_seqlens
from rl_contract import ContractError
from rl_contract.checks import require_tensor
from rl_contract.devices import to_device


class Batch:
    """Where the sequences of a packed batch lie.

    Attributes:
        cu_q, cu_k: int64 [sequences + 1]. positions: int64 [Tq], of each query inside its sequence. tokens: Tk.
    """

    def __init__(self, cu_q: torch.Tensor, cu_k: torch.Tensor, positions: torch.Tensor, tokens: int, own: bool) -> None:
        self.cu_q, self.cu_k, self.positions, self.tokens = cu_q, cu_k, positions, tokens
        # queries and keys are the same rows
        self._of_keys = positions if own else None
        self._narrow: tuple[torch.Tensor, torch.Tensor] | None = None

    def positions_of_keys(self) -> torch.Tensor:
        """int64 [Tk]: index of each key inside its sequence, found once."""
        if self._of_keys is None:
            with torch.inference_mode(False):
                self._of_keys = positions_of_all_keys(self.cu_k, self.tokens)
        return self._of_keys

    def narrow(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``cu_q`` and ``cu_k`` as int32, made once."""
        if self._narrow is None:
            with torch.inference_mode(False):
                self._narrow = self.cu_q.to(torch.int32), self.cu_k.to(torch.int32)
        return self._narrow


# by cu_seqlens_q; a training step hands the same tensors to every layer
_seen: ByTensor[tuple[Any, ...]] = ByTensor()


def positions_of_all_keys(cu_seqlens: torch.Tensor, tokens: int) -> torch.Tensor:
    """int64 [tokens]: index of each row inside its sequence."""
    cu = cu_seqlens.long()
    return torch.arange(tokens, device=cu.device) - torch.repeat_interleave(cu[:-1], cu.diff(), output_size=tokens)


def checked_positions(
    where: str, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, positions: torch.Tensor | None
) -> torch.Tensor:
    """int64 [Tq], each in [0, keys of its sequence)."""
    if positions is not None:
        require_tensor(where, "positions", positions)
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ContractError(
            f"{where} got {cu_seqlens_q.numel() - 1} sequences of queries and {cu_seqlens_k.numel() - 1} of keys; "
            "both cu_seqlens must describe the same sequences"
        )
    cu_q, cu_k = cu_seqlens_q.long(), cu_seqlens_k.long()
    q_lens, k_lens = cu_q.diff(), cu_k.diff()
    row_keys = torch.repeat_interleave(k_lens, q_lens)
    if positions is None:
        first = torch.repeat_interleave(k_lens - q_lens - cu_q[:-1], q_lens)
        positions = torch.arange(row_keys.numel(), device=cu_q.device) + first
    elif positions.shape != row_keys.shape or positions.dtype not in (torch.int32, torch.int64):
        raise ContractError(
            f"{where} got positions {tuple(positions.shape)} {positions.dtype}; supported: int64 [{row_keys.numel()}]"
        )
    bad = (positions < 0) | (positions >= row_keys)
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        raise ContractError(
            f"{where} got position {int(positions[row])} in row {row}, whose sequence has {int(row_keys[row])} keys; "
            "a query needs its own key: pass keys up to the last query"
        )
    return positions.long()


def on_device(
    where: str,
    q: torch.Tensor,
    k: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    positions: torch.Tensor | None,
) -> Batch:
    """What the call says about its sequences, on the device of ``q``, checked.

    Raises:
        ContractError: as on the CPU, and positions that fall inside a sequence.
    """
    given = (cu_seqlens_q, cu_seqlens_k) if positions is None else (cu_seqlens_q, cu_seqlens_k, positions)
    for name, x in zip(("cu_seqlens_q", "cu_seqlens_k", "positions"), given):
        require_tensor(where, name, x)
    # a tensor of inference mode does not count its changes, so nothing found in one is kept
    keeps = counted(*given)
    key = (q.device, q.shape[0], k.shape[0])
    known = _seen.get(cu_seqlens_q) if keeps else None
    if known is not None and known[0] == key and known[1].hold(*given):
        found: Batch = known[2]
        return found
    # a pass in inference mode may come first, and one that saves these tensors for a gradient after it
    with torch.inference_mode(False):
        found = _batch(where, q, k, *(x.clone() if x.is_inference() else x for x in given))
    if keeps:
        # ids may be used again once a tensor is gone, so the entry keeps what it was made from
        _seen.keep(cu_seqlens_q, (key, Values(*given), found, *(x for x in given if x is not cu_seqlens_q)))
    return found


def _batch(
    where: str,
    q: torch.Tensor,
    k: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    positions: torch.Tensor | None = None,
) -> Batch:
    given = (cu_seqlens_q, cu_seqlens_k) if positions is None else (cu_seqlens_q, cu_seqlens_k, positions)
    require_cu_seqlens(where, "cu_seqlens_q", cu_seqlens_q, q.shape[0])
    require_cu_seqlens(where, "cu_seqlens_k", cu_seqlens_k, k.shape[0])
    devices = {x.device for x in given}
    place = devices.pop() if len(devices) == 1 else q.device
    # kernels read their entries one behind the other; detached, since an entry that holds its own tensor never goes
    cu_q, cu_k = (x.to(place, torch.int64).contiguous().detach() for x in (cu_seqlens_q, cu_seqlens_k))
    explicit = None if positions is None else positions.to(place)
    rows = checked_positions(where, cu_q, cu_k, explicit)
    if explicit is not None:
        row = _first_fall(rows, cu_q)
        if row is not None:
            raise ContractError(
                f"{where} got position {int(rows[row])} in row {row}, below the row before it; supported on a GPU: "
                "ascending positions inside a sequence, sort the rows of each sequence"
            )
    cu_q, cu_k, rows = (to_device(x.contiguous(), q.device) for x in (cu_q, cu_k, rows))
    return Batch(cu_q, cu_k, rows, k.shape[0], cu_seqlens_q is cu_seqlens_k and positions is None)


def _first_fall(positions: torch.Tensor, cu: torch.Tensor) -> int | None:
    inner = torch.ones(max(0, positions.numel() - 1), dtype=torch.bool, device=cu.device)
    borders = cu[1:-1]
    borders = borders[(borders > 0) & (borders < positions.numel())]
    inner[borders - 1] = False
    falls = ((positions.diff() < 0) & inner).nonzero()
    return int(falls[0]) + 1 if falls.numel() else None
