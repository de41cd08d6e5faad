"""GPU SwiGLU: contract swiglu. Element-wise, nothing is summed across elements.

In fp32, without contraction: e = exp(-g) by the named polynomial, 1 + e, g / (1 + e), times u, each rounded; then
once to bf16. The polynomial: n = nearest integer to x*log2(e) by one fma with 1.5*2^23; r = x - n*ln2 in two fmas
(ln2 in two parts); degree 6 with explicit fmas; scaling by 2^n is exact. x is clamped to [-87, 89], where 1 + e is 1
and infinity anyway.
"""

from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_contract.triton_launch import Prepared


@triton.jit
def exp_f32(x):
    """e**x; within 1.1 ulp for results that are normal."""
    x = tl.minimum(tl.maximum(x, -87.0), 89.0)
    shifted = tl.fma(x, 1.4426950408889634, 12582912.0)
    n = shifted - 12582912.0
    r = tl.fma(n, -0.693359375, x)
    r = tl.fma(n, 2.12194440e-4, r)
    p = tl.fma(r, 1.9875691500e-4, 1.3981999507e-3)
    p = tl.fma(p, r, 8.3334519073e-3)
    p = tl.fma(p, r, 4.1665795894e-2)
    p = tl.fma(p, r, 1.6666665459e-1)
    p = tl.fma(p, r, 5.0000001201e-1)
    p = tl.fma(p, r * r, r) + 1.0
    # 2**(n-1), then doubled: n = 128 must overflow to infinity instead of wrapping the exponent
    scale = ((shifted.to(tl.int32, bitcast=True) + (126 - 0x4B400000)) << 23).to(tl.float32, bitcast=True)
    return p * scale * 2.0


@triton.jit
def silu_times(g, u):
    """g / (1 + exp(-g)) * u in fp32; the caller forbids contraction."""
    return tl.div_rn(g, 1.0 + exp_f32(-g)) * u


@triton.jit
def swiglu_fwd_kernel(gate_up, out, F, stride_row, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < F
    g = tl.load(gate_up + row * stride_row + at, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(gate_up + row * stride_row + F + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * F + at, silu_times(g, u).to(out.dtype.element_ty), mask=mask)


@triton.jit
def swiglu_bwd_kernel(dy, gate_up, out, F, stride_dy, stride_row, BLOCK: tl.constexpr):
    """dup = dy * (g / (1 + e)); dgate = (dy * u) * (s * (1 + g * (1 - s))) with s = 1 / (1 + e)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < F
    d = tl.load(dy + row * stride_dy + at, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(gate_up + row * stride_row + at, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(gate_up + row * stride_row + F + at, mask=mask, other=0.0).to(tl.float32)
    below = 1.0 + exp_f32(-g)
    s = tl.div_rn(1.0, below)
    dgate = (d * u) * (s * (1.0 + g * (1.0 - s)))
    dup = d * tl.div_rn(g, below)
    tl.store(out + row * (2 * F) + at, dgate.to(out.dtype.element_ty), mask=mask)
    tl.store(out + row * (2 * F) + F + at, dup.to(out.dtype.element_ty), mask=mask)


def _block(width: int, most: int) -> int:
    return min(most, max(128, triton.next_power_of_2(width)))


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def prepared_forward(gate_up: Tensor) -> Callable[[Tensor], Tensor]:
    """``forward`` of any tensor of this shape, type and device, with these strides and as many bytes off 16."""
    m, f = gate_up.shape[0], gate_up.shape[1] // 2
    empty = partial(torch.empty, (m, f), dtype=gate_up.dtype, device=gate_up.device)
    if not m * f:
        return lambda _: empty()
    if gate_up.stride(1) != 1:
        return lambda given: forward(given.contiguous())
    block = _block(f, 2048)
    go = Prepared(
        swiglu_fwd_kernel, (m, triton.cdiv(f, block)), {"F": f, "stride_row": gate_up.stride(0), "BLOCK": block},
        num_warps=max(1, block // 512), enable_fp_fusion=False,
    )  # fmt: skip

    def run(gate_up: Tensor) -> Tensor:
        out = empty()
        go(gate_up, out)
        return out

    return run


def forward(gate_up: Tensor) -> Tensor:
    """[M, 2F] = [gate, up] -> [M, F], bf16."""
    return prepared_forward(gate_up)(gate_up)


def prepared_backward(dy: Tensor, gate_up: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """``backward`` of any tensors of these shapes, types and device, with these strides and as many bytes off 16."""
    m, f = dy.shape
    empty = partial(torch.empty, (m, 2 * f), dtype=gate_up.dtype, device=gate_up.device)
    if not m * f:
        return lambda *_: empty()
    if dy.stride(1) != 1 or gate_up.stride(1) != 1:
        return lambda dy, gate_up: backward(_rows(dy), _rows(gate_up))
    block = _block(f, 4096)
    fixed = {"F": f, "stride_dy": dy.stride(0), "stride_row": gate_up.stride(0), "BLOCK": block}
    go = Prepared(
        swiglu_bwd_kernel, (m, triton.cdiv(f, block)), fixed, num_warps=max(1, block // 512), enable_fp_fusion=False
    )

    def run(dy: Tensor, gate_up: Tensor) -> Tensor:
        out = empty()
        go(dy, gate_up, out)
        return out

    return run


def backward(dy: Tensor, gate_up: Tensor) -> Tensor:
    """dy [M, F], gate_up [M, 2F] -> [M, 2F], bf16."""
    return prepared_backward(dy, gate_up)(dy, gate_up)
