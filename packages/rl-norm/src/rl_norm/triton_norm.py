"""GPU RMSNorm: contract norm, forward and backward; one source for CUDA and ROCm.

Order: lane j of L = gpu_lanes(H) holds the elements j, j+L, ... of the row and is a chain from +0, ascending,
multiply rounded, then add rounded; lanes join with their neighbours 1, 2, 4, ... L/2 apart. Every step is written out
(loop, split, gather), so neither warps nor rows per program nor the compiler's layout can change it. Rounds after
every fp32 operation (mean by IEEE division, rsqrt through fp64, x * rstd, times weight), then once to bf16. The
weight gradient adds rows in order in blocks of ROW_BLOCK rows, each a chain from +0, blocks folded left from +0.
"""

from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_contract.triton_launch import Prepared
from rl_norm.contract import ROW_BLOCK, gpu_lanes

_KEPT_FORWARD, _KEPT_BACKWARD = 16, 8  # chunks of a row that fit in the registers
_STEP = 128  # blocks of a weight gradient that are on their way at once


@triton.jit
def _join_lanes(lanes, ROWS: tl.constexpr, LANES: tl.constexpr):
    """fp32 [ROWS, LANES] -> [ROWS], neighbours first. Down to 32 lanes by splitting, then by exchange."""
    if LANES > 32:
        even, odd = lanes.reshape(ROWS, LANES // 2, 2).split()
        return _join_lanes(even + odd, ROWS, LANES // 2)
    else:
        at = tl.broadcast_to(tl.arange(0, LANES)[None, :], (ROWS, LANES))
        if LANES > 1:
            lanes = lanes + tl.gather(lanes, at ^ 1, 1)
        if LANES > 2:
            lanes = lanes + tl.gather(lanes, at ^ 2, 1)
        if LANES > 4:
            lanes = lanes + tl.gather(lanes, at ^ 4, 1)
        if LANES > 8:
            lanes = lanes + tl.gather(lanes, at ^ 8, 1)
        if LANES > 16:
            lanes = lanes + tl.gather(lanes, at ^ 16, 1)
        # every lane holds the same sum: this picks it without arithmetic
        return tl.sum(tl.where(at == 0, lanes, 0.0).to(tl.int32, bitcast=True), 1).to(tl.float32, bitcast=True)


@triton.jit
def rsqrt_f32(x):
    """1/sqrt(x) in fp64, rounded once to fp32, for normal positive x.

    The approximate fp32 value is only a start: one step of third order takes its error, below 2**-20, under 2**-52.
    """
    start = tl.rsqrt(x).to(tl.float64)
    error = 1.0 - (x.to(tl.float64) * start) * start
    exact = start + (start * error) * (0.5 + 0.375 * error)
    return tl.where(x == float("inf"), 0.0, exact.to(tl.float32))


@triton.jit
def _stream(x, residual, TYPE: tl.constexpr, ADD: tl.constexpr):
    """The norm's input in the model's type: x, or the rounded sum of x and residual."""
    if ADD:
        return (x.to(tl.float32) + residual.to(tl.float32)).to(TYPE)
    return x


@triton.jit
def _scaled_chunk(v, w, y, scale, row, h, mask, H: tl.constexpr):
    tl.store(y + row * H + h, (v.to(tl.float32) * scale * w.to(tl.float32)).to(y.dtype.element_ty), mask=mask)


@triton.jit
def _mean(lanes, H: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr):
    """The joined lanes over H by IEEE division; for a power of two the product with 1/H is the same, and quick."""
    if H & (H - 1) == 0:
        return _join_lanes(lanes, ROWS, LANES) * (1.0 / H)
    return tl.div_rn(_join_lanes(lanes, ROWS, LANES), H * 1.0)


@triton.jit
def _rstd(lanes, eps, H: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr):
    return rsqrt_f32(_mean(lanes, H, ROWS, LANES) + eps)


@triton.jit
def rms_norm_fwd_kernel(
    x, residual, weight, y, stream, rstd, M, stride_x, stride_residual, eps,
    H: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """KEEP: the row stays in registers between the two passes; otherwise the second one reads it again."""
    CHUNKS: tl.constexpr = (H + LANES - 1) // LANES
    TYPE: tl.constexpr = y.dtype.element_ty
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    at, row = tl.arange(0, LANES)[None, :], rows[:, None]
    inside = row < M
    lanes = tl.zeros((ROWS, LANES), tl.float32)
    if KEEP:
        # all loads come before the first store, so that none waits for another
        xs, others, weights = (), (), ()
        for i in tl.static_range(CHUNKS):
            h = i * LANES + at
            mask = (h < H) & inside
            xs = xs + (tl.load(x + row * stride_x + h, mask=mask, other=0.0),)  # type: ignore[assignment]
            if ADD:
                other = tl.load(residual + row * stride_residual + h, mask=mask, other=0.0)
                others = others + (other,)  # type: ignore[assignment]
            weights = weights + (tl.load(weight + h, mask=h < H, other=0.0),)  # type: ignore[assignment]
        kept = ()
        for i in tl.static_range(CHUNKS):
            v = _stream(xs[i], others[i] if ADD else xs[i], TYPE, ADD)
            kept = kept + (v,)  # type: ignore[assignment]
            lanes = lanes + v.to(tl.float32) * v.to(tl.float32)
        scale = _rstd(lanes, eps, H, ROWS, LANES)
        for i in tl.static_range(CHUNKS):
            h = i * LANES + at
            mask = (h < H) & inside
            if ADD:
                tl.store(stream + row * H + h, kept[i], mask=mask)
            _scaled_chunk(kept[i], weights[i], y, scale[:, None], row, h, mask, H)
    else:
        for i in tl.range(CHUNKS, loop_unroll_factor=4):
            h = i * LANES + at
            mask = (h < H) & inside
            v = tl.load(x + row * stride_x + h, mask=mask, other=0.0)
            if ADD:
                v = _stream(v, tl.load(residual + row * stride_residual + h, mask=mask, other=0.0), TYPE, ADD)
                tl.store(stream + row * H + h, v, mask=mask)
            lanes = lanes + v.to(tl.float32) * v.to(tl.float32)
        scale = _rstd(lanes, eps, H, ROWS, LANES)
        for i in tl.range(CHUNKS, loop_unroll_factor=4):
            h = i * LANES + at
            mask = (h < H) & inside
            v = tl.load(x + row * stride_x + h, mask=mask, other=0.0)
            if ADD:
                v = _stream(v, tl.load(residual + row * stride_residual + h, mask=mask, other=0.0), TYPE, ADD)
            _scaled_chunk(v, tl.load(weight + h, mask=h < H, other=0.0), y, scale[:, None], row, h, mask, H)
    tl.store(rstd + rows, scale, mask=rows < M)


@triton.jit
def _product_chunk(dy, stream, weight, scale, row, h, mask, stride_dy, H: tl.constexpr):
    """g = dy * weight and xhat = stream * rstd of one chunk."""
    w = tl.load(weight + h, mask=h < H, other=0.0).to(tl.float32)
    g = tl.load(dy + row * stride_dy + h, mask=mask, other=0.0).to(tl.float32) * w
    return g, tl.load(stream + row * H + h, mask=mask, other=0.0).to(tl.float32) * scale


@triton.jit
def _gradient_chunk(g, xhat, c, scale, dstream, dx, row, h, mask, stride_dstream, H: tl.constexpr, ADD: tl.constexpr):
    out = scale * (g - xhat * c)
    if ADD:
        out = out + tl.load(dstream + row * stride_dstream + h, mask=mask, other=0.0).to(tl.float32)
    tl.store(dx + row * H + h, out.to(dx.dtype.element_ty), mask=mask)


@triton.jit
def rms_norm_bwd_kernel(
    dy, stream, weight, rstd, dstream, dx, M, stride_dy, stride_dstream,
    H: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """dx = rstd * (g - xhat * mean(g * xhat)) (+ dstream), g = dy * weight, xhat = stream * rstd."""
    CHUNKS: tl.constexpr = (H + LANES - 1) // LANES
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    at, row = tl.arange(0, LANES)[None, :], rows[:, None]
    inside = row < M
    scale = tl.load(rstd + rows, mask=rows < M, other=0.0)[:, None]
    lanes = tl.zeros((ROWS, LANES), tl.float32)
    if KEEP:
        kept_g, kept_xhat = (), ()
        for i in tl.static_range(CHUNKS):
            h = i * LANES + at
            g, xhat = _product_chunk(dy, stream, weight, scale, row, h, (h < H) & inside, stride_dy, H)
            kept_g, kept_xhat = kept_g + (g,), kept_xhat + (xhat,)  # type: ignore[assignment]
            lanes = lanes + g * xhat
        c = _mean(lanes, H, ROWS, LANES)[:, None]
        for i in tl.static_range(CHUNKS):
            h = i * LANES + at
            _gradient_chunk(
                kept_g[i], kept_xhat[i], c, scale, dstream, dx, row, h, (h < H) & inside, stride_dstream, H, ADD
            )
    else:
        for i in tl.range(CHUNKS, loop_unroll_factor=4):
            h = i * LANES + at
            g, xhat = _product_chunk(dy, stream, weight, scale, row, h, (h < H) & inside, stride_dy, H)
            lanes = lanes + g * xhat
        c = _mean(lanes, H, ROWS, LANES)[:, None]
        for i in tl.range(CHUNKS, loop_unroll_factor=4):
            h = i * LANES + at
            g, xhat = _product_chunk(dy, stream, weight, scale, row, h, (h < H) & inside, stride_dy, H)
            _gradient_chunk(g, xhat, c, scale, dstream, dx, row, h, (h < H) & inside, stride_dstream, H, ADD)


@triton.jit
def _row_onto(part, dy, stream, rstd, i, h, mask, stride_dy, H):
    """part + dy * xhat of row i."""
    d = tl.load(dy + i * stride_dy + h, mask=mask, other=0.0).to(tl.float32)
    v = tl.load(stream + i * H + h, mask=mask, other=0.0).to(tl.float32)
    return part + d * (v * tl.load(rstd + i))


@triton.jit
def weight_block_kernel(
    dy, stream, rstd, parts, rows, heads, mine, pitch, stride_dy, H,
    ROW_BLOCK: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """parts[leaf, h, block]: chain over the block's rows; row n of a leaf is head n % mine of token n // mine."""
    # CUDA takes many programs along the first axis alone
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    block, leaf = tl.program_id(0), tl.program_id(2)
    mask = h < H
    part = tl.zeros((BLOCK_H,), tl.float32)
    first = block.to(tl.int64) * ROW_BLOCK
    # a division a program, none a row
    token, head = first // mine, first % mine
    if first + ROW_BLOCK <= rows:
        for _start in range(0, ROW_BLOCK, 8):
            for _step in tl.static_range(8):
                part = _row_onto(part, dy, stream, rstd, token * heads + leaf * mine + head, h, mask, stride_dy, H)
                last = head == mine - 1
                token, head = tl.where(last, token + 1, token), tl.where(last, 0, head + 1)
    else:
        for _row in range(first, rows):
            part = _row_onto(part, dy, stream, rstd, token * heads + leaf * mine + head, h, mask, stride_dy, H)
            last = head == mine - 1
            token, head = tl.where(last, token + 1, token), tl.where(last, 0, head + 1)
    tl.store(parts + (leaf.to(tl.int64) * H + h) * pitch + block, part, mask=mask)


@triton.jit
def _fold_four(total, row, start, blocks, mask, ALL: tl.constexpr):
    """Four blocks by one load, folded in their order."""
    four = tl.load(row[:, None] + start + tl.arange(0, 4)[None, :], mask=mask[:, None], other=0.0)
    even, odd = four.reshape(four.shape[0], 2, 2).split()
    a, c = even.split()
    b, d = odd.split()
    if ALL:
        return (((total + a) + b) + c) + d
    total = tl.where(start < blocks, total + a, total)
    total = tl.where(start + 1 < blocks, total + b, total)
    total = tl.where(start + 2 < blocks, total + c, total)
    return tl.where(start + 3 < blocks, total + d, total)


@triton.jit
def weight_fold_kernel(parts, out, blocks, pitch, H, BLOCK_H: tl.constexpr, STEP: tl.constexpr):
    """out[leaf, h] = parts[leaf, h, 0] + parts[leaf, h, 1] + ..., folded left from +0.

    pitch: blocks and what fills the last STEP, which is read and dropped."""
    h = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    leaf = tl.program_id(1).to(tl.int64)
    mask = h < H
    row = parts + (leaf * H + h) * pitch
    total = tl.zeros((BLOCK_H,), tl.float32)
    whole = blocks // STEP * STEP
    for start in range(0, whole, STEP):
        for j in tl.static_range(0, STEP, 4):
            total = _fold_four(total, row, start + j, blocks, mask, True)
    if whole < blocks:
        for j in tl.static_range(0, STEP, 4):
            total = _fold_four(total, row, whole + j, blocks, mask, False)
    tl.store(out + leaf * H + h, total, mask=mask)


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 and x.stride(0) >= x.shape[1] else x.contiguous()


def _launch_shape(width: int, most: int, head_warps: int = 1) -> tuple[dict[str, int | bool], dict[str, int | bool]]:
    """constexprs and options, from the row's width alone. A thread holds 8 neighbouring lanes: loads of 16 bytes.

    Rows as narrow as a head are taken by ``head_warps`` warps together.
    """
    lanes = gpu_lanes(width)
    chunks = triton.cdiv(width, lanes)
    warps = 4 if lanes == 1024 else head_warps if chunks == 1 else 1
    rows = max(1, (1 if lanes == 1024 else warps) * 1024 // (lanes * chunks))
    return (
        {"H": width, "LANES": lanes, "ROWS": rows, "KEEP": chunks <= most},
        {"num_warps": warps, "enable_fp_fusion": False},
    )


def prepared_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> Callable[[Tensor, Tensor | None, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """``forward`` of any tensors of these shapes, types and device, with these strides and as many bytes off 16."""
    (m, width), add = x.shape, residual is not None
    given = (x, weight) if residual is None else (x, residual, weight)
    if not _in_place(*given):
        return lambda x, residual, weight: forward(_dense(x), _optional(residual), weight.contiguous(), eps)
    empty = partial(torch.empty, (m, width), dtype=x.dtype, device=x.device)
    scales = partial(torch.empty, m, dtype=torch.float32, device=x.device)
    shape, options = _launch_shape(width, _KEPT_FORWARD, 2)
    fixed = {
        "M": m, "stride_x": x.stride(0), "stride_residual": x.stride(0) if residual is None else residual.stride(0),
        "eps": eps, "ADD": add, **shape,
    }  # fmt: skip
    go = Prepared(rms_norm_fwd_kernel, (triton.cdiv(m, shape["ROWS"]),), fixed, **options) if m else None

    def run(x: Tensor, residual: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, rstd = empty(), scales()
        stream, other = (x, x) if residual is None else (empty(), residual)
        if go is not None:
            go(x, other, weight, y, stream, rstd)
        return y, stream, rstd

    return run


def forward(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """x, residual [M, H] -> y, stream [M, H] (x itself without a residual), rstd fp32 [M]."""
    return prepared_forward(x, residual, weight, eps)(x, residual, weight)


def _in_place(*tensors: Tensor) -> bool:
    """Whether kernels can read these as they lie: rows [M, H] dense, weights [H] contiguous."""
    return all(t.is_contiguous() if t.dim() == 1 else _dense(t) is t for t in tensors)


def _optional(x: Tensor | None) -> Tensor | None:
    return None if x is None else _dense(x)


def prepared_grad_input(
    dy: Tensor, stream: Tensor, weight: Tensor, rstd: Tensor, dstream: Tensor | None
) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]:
    """``grad_input`` of any tensors of these shapes, types and device, with these strides and as many bytes off 16."""
    m, width = dy.shape
    given = (dy, weight) if dstream is None else (dy, dstream, weight)
    if not _in_place(*given) or not stream.is_contiguous():
        return lambda dy, stream, weight, rstd, dstream: grad_input(
            _dense(dy), stream.contiguous(), weight.contiguous(), rstd, _optional(dstream)
        )
    empty = partial(torch.empty, (m, width), dtype=stream.dtype, device=dy.device)
    if not m:
        return lambda *_: empty()
    shape, options = _launch_shape(width, _KEPT_BACKWARD)
    fixed = {
        "M": m, "stride_dy": dy.stride(0), "stride_dstream": dy.stride(0) if dstream is None else dstream.stride(0),
        "ADD": dstream is not None, **shape,
    }  # fmt: skip
    go = Prepared(rms_norm_bwd_kernel, (triton.cdiv(m, shape["ROWS"]),), fixed, **options)

    def run(dy: Tensor, stream: Tensor, weight: Tensor, rstd: Tensor, dstream: Tensor | None) -> Tensor:
        dx = empty()
        go(dy, stream, weight, rstd, dy if dstream is None else dstream, dx)
        return dx

    return run


def grad_input(dy: Tensor, stream: Tensor, weight: Tensor, rstd: Tensor, dstream: Tensor | None) -> Tensor:
    """[M, H] -> [M, H], rounded once."""
    return prepared_grad_input(dy, stream, weight, rstd, dstream)(dy, stream, weight, rstd, dstream)


def prepared_grad_weight(
    dy: Tensor, stream: Tensor, rstd: Tensor, heads: int, leaves: int
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """``grad_weight`` of any tensors of these shapes, types and device, with these strides and as many bytes off 16.

    One leaf comes as fp32 [H], several as [leaves, H].
    """
    size = (dy.shape[1],) if leaves == 1 else (leaves, dy.shape[1])
    if _dense(dy) is not dy or not stream.is_contiguous():

        def by_copies(dy: Tensor, stream: Tensor, rstd: Tensor) -> Tensor:
            dy, stream = _dense(dy), stream.contiguous()
            return prepared_grad_weight(dy, stream, rstd, heads, leaves)(dy, stream, rstd)

        return by_copies
    width, mine, device = dy.shape[1], heads // leaves, dy.device
    rows = dy.shape[0] // heads * mine
    if not rows:
        return lambda *_: torch.zeros(size, dtype=torch.float32, device=device)
    blocks, block_h = triton.cdiv(rows, ROW_BLOCK), min(256, triton.next_power_of_2(width))
    pitch = triton.cdiv(blocks, _STEP) * _STEP
    fixed = {
        "rows": rows, "heads": heads, "mine": mine, "pitch": pitch, "stride_dy": dy.stride(0), "H": width,
        "ROW_BLOCK": ROW_BLOCK, "BLOCK_H": block_h,
    }  # fmt: skip
    grid = blocks, triton.cdiv(width, block_h), leaves
    add_blocks = Prepared(weight_block_kernel, grid, fixed, num_warps=1, enable_fp_fusion=False)
    fold_h = min(64, block_h)
    fixed = {"blocks": blocks, "pitch": pitch, "H": width, "BLOCK_H": fold_h, "STEP": _STEP}
    grid = triton.cdiv(width, fold_h), leaves, 1
    fold = Prepared(weight_fold_kernel, grid, fixed, num_warps=2, enable_fp_fusion=False)
    empty = partial(torch.empty, dtype=torch.float32, device=device)

    def run(dy: Tensor, stream: Tensor, rstd: Tensor) -> Tensor:
        parts, out = empty((leaves, width, pitch)), empty(size)
        add_blocks(dy, stream, rstd, parts)
        fold(parts, out)
        return out

    return run


def grad_weight(dy: Tensor, stream: Tensor, rstd: Tensor, heads: int, leaves: int) -> Tensor:
    """dy, stream [T * heads, H] -> fp32 [leaves, H]."""
    return prepared_grad_weight(dy, stream, rstd, heads, leaves)(dy, stream, rstd).view(leaves, dy.shape[1])
