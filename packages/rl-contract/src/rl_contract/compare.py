"""Bit comparison: integer verdicts first, then distances.

Two values are equal when their bit patterns are. Hence -0.0 differs from +0.0, a NaN equals a NaN with the same
payload, and a NaN with another payload is a mismatch.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch

from rl_contract.checks import tensor_problem
from rl_contract.errors import ContractError

_INT_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FLOAT8 = (
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
)  # fmt: skip
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, *_FLOAT8)
_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True)
class Mismatch:
    """The first element, in row-major order, whose bits differ."""

    index: tuple[int, ...]
    a: float
    b: float
    a_bits: str
    b_bits: str


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Counts over the valid elements.

    ``max_abs_diff`` and ``max_ulp`` are taken over pairs of finite values; a pair with a nonfinite value is counted in
    ``nonfinite_count`` and, if its bits differ, in ``mismatch_count``.
    """

    valid_count: int
    mismatch_count: int
    nonfinite_count: int
    max_abs_diff: float
    max_ulp: int
    first_mismatch: Mismatch | None

    @property
    def bitwise_equal(self) -> bool:
        """At least one element was compared, and no bits differ: what was never compared is not equal."""
        return self.valid_count > 0 and self.mismatch_count == 0

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "bitwise_equal": self.bitwise_equal}


def bits(x: torch.Tensor) -> torch.Tensor:
    """The integer view of ``x``: same shape, same bytes."""
    if x.dtype not in _FLOATS:
        return x
    return x.contiguous().view(_INT_OF_SIZE[x.element_size()])


def _ordered(x: torch.Tensor) -> torch.Tensor:
    # maps the bit pattern to an int64 whose order and spacing are those of the floats, -0 and +0 both at zero
    i = bits(x).to(torch.int64)
    if x.dtype == torch.float8_e8m0fnu:
        # an exponent alone, without a sign
        return i & 255
    sign = -(2 ** (8 * x.element_size() - 1))
    return torch.where(i < 0, sign - i, i)


def compare(a: torch.Tensor, b: torch.Tensor, mask: torch.Tensor | None = None) -> Verdict:
    """Compare two tensors bit by bit.

    Args:
        a, b: same shape and dtype: a float of 8 to 64 bits, bool, uint8 or a signed integer.
        mask: bool, same shape; only elements where it is true are compared.

    Raises:
        ContractError: shapes, dtypes or mask do not match, or a type or layout that has no bits to compare.
    """
    for name, x in (("a", a), ("b", b), *([] if mask is None else [("mask", mask)])):
        if problem := tensor_problem(name, x):
            raise ContractError(f"compare got {name} as {problem}")
        if x.dtype not in (*_FLOATS, *_INTEGERS) or x.is_meta:
            given = f"{name} as {x.dtype} on {x.device}"
            raise ContractError(
                f"compare got {given}; supported: dense tensors with bytes, of {(*_FLOATS, *_INTEGERS)}; "
                "compare complex numbers as torch.view_as_real gives them"
            )
    if a.shape != b.shape or a.dtype != b.dtype:
        raise ContractError(
            f"compare got {tuple(a.shape)} {a.dtype} and {tuple(b.shape)} {b.dtype}; "
            "both must have one shape and dtype, convert before comparing"
        )
    if mask is not None and (mask.shape != a.shape or mask.dtype != torch.bool):
        raise ContractError(
            f"compare got a mask {tuple(mask.shape)} {mask.dtype}; it must be bool of shape {tuple(a.shape)}"
        )
    a, b = a.detach().cpu(), b.detach().cpu()
    valid = torch.ones(a.shape, dtype=torch.bool) if mask is None else mask.detach().cpu()
    differs = (bits(a) != bits(b)) & valid
    mismatch_count = int(differs.sum())

    nonfinite_count, max_abs_diff, max_ulp = 0, 0.0, 0
    if a.is_floating_point():
        # exact, and a type that every operation has
        wide_a, wide_b = (x.float() if x.dtype in _FLOAT8 else x for x in (a, b))
        finite = torch.isfinite(wide_a) & torch.isfinite(wide_b)
        nonfinite_count = int((~finite & valid).sum())
        at = differs & finite
        if bool(at.any()):
            max_abs_diff = float((wide_a[at].double() - wide_b[at].double()).abs().max())
            if a.dtype != torch.float64:
                max_ulp = int((_ordered(a[at]) - _ordered(b[at])).abs().max())
            else:
                max_ulp = max(abs(x - y) for x, y in zip(_ordered(a[at]).tolist(), _ordered(b[at]).tolist()))
    elif mismatch_count:
        max_abs_diff = float((a[differs].double() - b[differs].double()).abs().max())

    first = None
    if mismatch_count:
        index = tuple(int(i) for i in differs.nonzero()[0])
        first = Mismatch(index, float(a[index]), float(b[index]), _hex(a[index]), _hex(b[index]))
    return Verdict(
        valid_count=int(valid.sum()),
        mismatch_count=mismatch_count,
        nonfinite_count=nonfinite_count,
        max_abs_diff=max_abs_diff,
        max_ulp=max_ulp,
        first_mismatch=first,
    )


def _hex(x: torch.Tensor) -> str:
    width = 8 * x.element_size()
    return f"0x{int(bits(x)) & (2**width - 1):0{width // 4}x}"
