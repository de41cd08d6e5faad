"""Contract `logprob` on a GPU, fused behind the head's product: logits live in registers only.

Order: the fp32 accumulator of `gemm.column`, a chain over K from +0 in steps of the matrix unit, tails padded with
zeros. A block of logits then becomes tile statistics (``triton_tiles.tile_sums``) or the gradient of the logits,
rounded once to the model's type. Block sizes, warps, stages, persistence and the way operands are loaded are free: none
of them moves a k or regroups a float sum.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_logprob.plans import Kernel
from rl_logprob.triton_launch import descriptor
from rl_logprob.triton_launch import launch as launch_kernel
from rl_logprob.triton_tiles import load_support, logit_gradient, row_temperature, scaled, supported, tile_sums

_HIP = torch.version.hip is not None
# on CDNA these two would permute or regroup K, so they are pinned here and are no field of a plan
_PINNED = {"kpack": 1, "matrix_instr_nonkdim": 16} if _HIP else {}


@triton.jit
def _tile_origin(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Walk the tiles in groups of GROUP_M rows, so that neighbours share rows of the weight in the L2."""
    group = tile // (GROUP_M * tiles_n)
    first = group * GROUP_M
    height = tl.minimum(tiles_m - first, GROUP_M)
    within = tile % (GROUP_M * tiles_n)
    return first + within % height, within // height


@triton.jit
def _stats_of_block(
    acc, temperature, threshold, last_id, goal, m, s, u, row, column, M, N, first_tile, stride_tile,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, UNIT: tl.constexpr, ENTROPY: tl.constexpr, SUPPORT: tl.constexpr,
):  # fmt: skip
    """Statistics of BLOCK_N // 128 tiles of acc [BLOCK_M, BLOCK_N] into m, s, u [tiles, T]."""
    rows = row + tl.arange(0, BLOCK_M)
    row_mask = rows < M
    columns = column + tl.arange(0, BLOCK_N)
    x = scaled(acc, row_temperature(temperature, rows, row_mask, UNIT)[:, None], UNIT)
    if SUPPORT:
        least, last, own = load_support(threshold, last_id, goal, rows, row_mask)
        ids = first_tile * 128 + columns
        x = supported(x, ids[None, :], least[:, None], last[:, None], own[:, None])
    x = tl.where((columns < N)[None, :], x, float("-inf"))
    if BLOCK_N == 128:
        top, total, weighted = tile_sums(x, 1, ENTROPY)
        at = (first_tile + column // 128).to(tl.int64) * stride_tile + rows
        mask = row_mask
    else:
        # every tile of the block is reduced on its own
        TILES: tl.constexpr = BLOCK_N // 128
        top, total, weighted = tile_sums(tl.reshape(x, (BLOCK_M, TILES, 128)), 2, ENTROPY)
        tiles = column // 128 + tl.arange(0, TILES)
        at = (first_tile + tiles).to(tl.int64)[None, :] * stride_tile + rows[:, None]
        mask = row_mask[:, None] & (tiles * 128 < N)[None, :]
    tl.store(m + at, top, mask=mask)
    tl.store(s + at, total, mask=mask)
    if ENTROPY:
        tl.store(u + at, weighted, mask=mask)


@triton.jit
def _gradient_of_block(
    acc, temperature, threshold, last_id, state, targets, dlogp, dentropy, out, row, column, M, N, first_id, stride_om,
    stride_block, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SLICES: tl.constexpr, UNIT: tl.constexpr,
    ENTROPY: tl.constexpr, SUPPORT: tl.constexpr, GROUP_N: tl.constexpr, DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """Rounded gradient of acc [BLOCK_M, BLOCK_N] into ``out``, a slice of columns at a time to hold fewer values."""
    if SLICES > 1:
        HALF: tl.constexpr = BLOCK_N // 2
        low, high = acc.reshape(BLOCK_M, 2, HALF).permute(0, 2, 1).split()
        _gradient_of_block(
            low, temperature, threshold, last_id, state, targets, dlogp, dentropy, out, row, column, M, N,
            first_id, stride_om, stride_block, BLOCK_M, HALF, SLICES // 2, UNIT, ENTROPY, SUPPORT, GROUP_N, DESCRIPTOR,
        )  # fmt: skip
        _gradient_of_block(
            high, temperature, threshold, last_id, state, targets, dlogp, dentropy, out, row, column + HALF, M, N,
            first_id, stride_om, stride_block, BLOCK_M, HALF, SLICES // 2, UNIT, ENTROPY, SUPPORT, GROUP_N, DESCRIPTOR,
        )  # fmt: skip
    else:
        rows = row + tl.arange(0, BLOCK_M)
        row_mask = rows < M
        columns = column + tl.arange(0, BLOCK_N)
        temp = row_temperature(temperature, rows, row_mask, UNIT)[:, None]
        top = tl.load(state + rows * 3, mask=row_mask, other=0.0).to(tl.float32)
        log_total = tl.load(state + rows * 3 + 1, mask=row_mask, other=0.0).to(tl.float32)
        target = (tl.load(targets + rows, mask=row_mask, other=-1) - first_id).to(tl.int32)
        g = tl.load(dlogp + rows, mask=row_mask, other=0.0)
        entropy = top
        h = top
        if ENTROPY:
            entropy = tl.load(state + rows * 3 + 2, mask=row_mask, other=0.0).to(tl.float32)
            h = tl.load(dentropy + rows, mask=row_mask, other=0.0)
        x = scaled(acc, temp, UNIT)
        if SUPPORT:
            last = (tl.load(last_id + rows, mask=row_mask, other=0) - first_id).to(tl.int32)
            least = tl.load(threshold + rows, mask=row_mask, other=0.0)
            x = supported(x, columns[None, :], least[:, None], last[:, None], target[:, None])
        value = logit_gradient(
            x, top[:, None], log_total[:, None], entropy[:, None], g[:, None], h[:, None],
            columns[None, :] == target[:, None], temp, ENTROPY, UNIT,
        )  # fmt: skip
        if SUPPORT:
            value = tl.where(x != float("-inf"), value, 0.0)
        # a group of blocks of ids lies block by block, each with stride_block rows
        down, right = 0, column
        if GROUP_N:
            down, right = column // GROUP_N * stride_block, column % GROUP_N
        if DESCRIPTOR:
            out.store([down + row, right], value.to(tl.bfloat16))
        else:
            at = right + tl.arange(0, BLOCK_N)
            ptrs = out + (down + rows).to(tl.int64)[:, None] * stride_om + at[None, :]
            tl.store(ptrs, value.to(out.dtype.element_ty), mask=row_mask[:, None] & (columns < N)[None, :])


@triton.jit
def _finish_block(
    acc, temperature, threshold, last_id, state, targets, dlogp, dentropy, m, s, u, out, row, column, M, N, first,
    stride, stride_block, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SLICES: tl.constexpr, UNIT: tl.constexpr,
    ENTROPY: tl.constexpr, SUPPORT: tl.constexpr, GRADIENT: tl.constexpr, GROUP_N: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    if GRADIENT:
        _gradient_of_block(
            acc, temperature, threshold, last_id, state, targets, dlogp, dentropy, out, row, column, M, N, first,
            stride, stride_block, BLOCK_M, BLOCK_N, SLICES, UNIT, ENTROPY, SUPPORT, GROUP_N, DESCRIPTOR,
        )  # fmt: skip
    else:
        _stats_of_block(
            acc, temperature, threshold, last_id, targets, m, s, u, row, column, M, N, first, stride,
            BLOCK_M, BLOCK_N, UNIT, ENTROPY, SUPPORT,
        )  # fmt: skip


@triton.jit(do_not_specialize=["M", "first", "stride", "stride_block"])
def head_tma_kernel(
    a_desc, b_desc, temperature, threshold, last_id, state, targets, dlogp, dentropy, m, s, u, out, M, N, K, first,
    stride, stride_block, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    SLICES: tl.constexpr, UNIT: tl.constexpr, ENTROPY: tl.constexpr, SUPPORT: tl.constexpr, GRADIENT: tl.constexpr,
    GROUP_N: tl.constexpr,
):  # fmt: skip
    """Persistent programs over blocks of logits, operands through the tensor copy engine."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    steps = tl.cdiv(K, BLOCK_K)
    count = tl.cdiv(tiles_m * tiles_n - program, programs)
    # one flat loop over all steps of all blocks, so that loads of the next block are in flight during an epilogue
    tile = program - programs
    step = steps - 1
    row, column = 0, 0
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for _ in tl.range(0, count * steps):
        step = tl.where(step == steps - 1, 0, step + 1)
        if step == 0:
            tile += programs
            tile_m, tile_n = _tile_origin(tile, tiles_m, tiles_n, GROUP_M)
            row, column = tile_m * BLOCK_M, tile_n * BLOCK_N
        acc = tl.dot(a_desc.load([row, step * BLOCK_K]), b_desc.load([column, step * BLOCK_K]).T, acc)
        if step == steps - 1:
            _finish_block(
                acc, temperature, threshold, last_id, state, targets, dlogp, dentropy, m, s, u, out, row, column, M, N,
                first, stride, stride_block, BLOCK_M, BLOCK_N, SLICES, UNIT, ENTROPY, SUPPORT, GRADIENT, GROUP_N, True,
            )  # fmt: skip
            acc = tl.zeros_like(acc)


@triton.jit(do_not_specialize=["M", "first", "stride", "stride_block"])
def head_pointer_kernel(
    a, b, temperature, threshold, last_id, state, targets, dlogp, dentropy, m, s, u, out, M, N, K, first, stride,
    stride_block, stride_am, stride_bn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, EVEN_K: tl.constexpr,
    UNIT: tl.constexpr, ENTROPY: tl.constexpr, SUPPORT: tl.constexpr, GRADIENT: tl.constexpr, GROUP_N: tl.constexpr,
):  # fmt: skip
    """One program per block of logits, operands through pointers."""
    tile_m, tile_n = _tile_origin(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    row, column = tile_m * BLOCK_M, tile_n * BLOCK_N
    rows = row + tl.arange(0, BLOCK_M)
    columns = column + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    a_ptrs = a + rows.to(tl.int64)[:, None] * stride_am + ks[None, :]
    b_ptrs = b + columns.to(tl.int64)[None, :] * stride_bn + ks[:, None]
    row_mask, column_mask = (rows < M)[:, None], (columns < N)[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        if EVEN_K:
            a_tile = tl.load(a_ptrs + k, mask=row_mask, other=0.0)
            b_tile = tl.load(b_ptrs + k, mask=column_mask, other=0.0)
        else:
            left = ks < K - k
            a_tile = tl.load(a_ptrs + k, mask=row_mask & left[None, :], other=0.0)
            b_tile = tl.load(b_ptrs + k, mask=column_mask & left[:, None], other=0.0)
        acc = tl.dot(a_tile, b_tile, acc)
    _finish_block(
        acc, temperature, threshold, last_id, state, targets, dlogp, dentropy, m, s, u, out, row, column, M, N, first,
        stride, stride_block, BLOCK_M, BLOCK_N, 1, UNIT, ENTROPY, SUPPORT, GRADIENT, GROUP_N, False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["M", "first_id", "vocab_size"])
def target_logit_kernel(
    a, b, temperature, targets, out, M, N, K, first_id, vocab_size, stride_am, stride_bn,
    BLOCK_K: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """out[t] = x of row t's target where this shard holds it, else 0, or NaN for one outside a vocabulary of
    ``vocab_size`` ids, unless that is 0: the diagonal of 16 rows times their 16 target rows.
    """
    rows = tl.program_id(0) * 16 + tl.arange(0, 16)
    row_mask = rows < M
    at = tl.load(targets + rows, mask=row_mask, other=-1).to(tl.int64) - first_id
    outside = (vocab_size > 0) & ((at + first_id < 0) | (at + first_id >= vocab_size))
    here = row_mask & (at >= 0) & (at < N)
    at = tl.where(here, at, 0)
    ks = tl.arange(0, BLOCK_K)
    a_ptrs = a + rows.to(tl.int64)[:, None] * stride_am + ks[None, :]
    b_ptrs = b + at[None, :] * stride_bn + ks[:, None]
    acc = tl.zeros((16, 16), tl.float32)
    for k in range(0, K, BLOCK_K):
        left = ks < K - k
        a_tile = tl.load(a_ptrs + k, mask=row_mask[:, None] & left[None, :], other=0.0)
        b_tile = tl.load(b_ptrs + k, mask=here[None, :] & left[:, None], other=0.0)
        acc = tl.dot(a_tile, b_tile, acc)
    diagonal = tl.arange(0, 16)[:, None] == tl.arange(0, 16)[None, :]
    logit = tl.sum(tl.where(diagonal, acc, 0.0), 1)
    x = scaled(logit, row_temperature(temperature, rows, row_mask, UNIT), UNIT)
    tl.store(out + rows, tl.where(outside, float("nan"), tl.where(here, x, 0.0)), mask=row_mask)


def launch(
    kernel: Kernel, hidden: Tensor, weight: Tensor, temperature: Tensor, first: int, processors: int, *,
    stats: tuple[Tensor, Tensor, Tensor] | None = None, gradient: dict[str, Tensor] | None = None,
    out: Tensor | None = None, kept: tuple[Tensor, Tensor, Tensor] | None = None,
) -> None:  # fmt: skip
    """hidden [T, K], weight [N, K], rows contiguous. Either ``stats`` m, s, u [tiles, T] are filled from tile ``first``
    on, or ``out`` gets the gradient by the logits of ids from ``first``, with state, targets, dlogp and dentropy
    in ``gradient``. ``kept``: threshold fp32, last id and goal int64 [T] of a support, ids counted as ``first`` counts.
    """
    (tokens, k), n = hidden.shape, weight.shape[0]
    m, s, u = stats or (hidden, hidden, hidden)
    more = gradient or dict.fromkeys(("state", "targets", "dlogp", "dentropy"), hidden)
    target = out if out is not None else hidden
    entropy = more["dentropy"].numel() > 0 if gradient else u.numel() > 0
    blocks = -(-tokens // kernel.block_m) * -(-n // kernel.block_n)
    if kept is not None:
        more = {**more, "targets": kept[2]}
    limits = kept[:2] if kept is not None else (temperature, temperature)
    head = (temperature, *limits, more["state"], more["targets"], more["dlogp"], more["dentropy"], m, s, u, target)
    # out may be a group of blocks of ids [blocks, at least T in whole block_m, ids a block]
    grouped = target.dim() == 3
    stride_block, group_n = (target.shape[1], target.shape[2]) if grouped else (0, 0)
    target = target.view(-1, group_n) if grouped else target
    head = (*head[:-1], target)
    tail = (tokens, n, k, first, (target if gradient else m).stride(0), stride_block)
    blocks_of = {
        "BLOCK_M": kernel.block_m, "BLOCK_N": kernel.block_n, "BLOCK_K": kernel.block_k, "GROUP_M": kernel.group_m,
    }  # fmt: skip
    flags = {
        "UNIT": temperature.numel() == 0, "ENTROPY": entropy, "SUPPORT": kept is not None,
        "GRADIENT": gradient is not None, "GROUP_N": group_n,
    }  # fmt: skip
    options: dict[str, Any] = {
        "num_warps": kernel.warps, "num_stages": kernel.stages, "enable_fp_fusion": False, **_PINNED,
    }  # fmt: skip
    if kernel.kind == "tma":
        if gradient is not None:
            width = kernel.block_n // kernel.slices
            head = (*head[:-1], descriptor(target, [kernel.block_m, width]))
        a = descriptor(hidden, [kernel.block_m, kernel.block_k])
        b = descriptor(weight, [kernel.block_n, kernel.block_k])
        grid = (min(processors * kernel.per_sm, blocks), 1, 1)
        constants = {**blocks_of, "SLICES": kernel.slices, **flags}
        launch_kernel(head_tma_kernel, grid, (a, b, *head, *tail), constants, **options)
        return
    args = (hidden, weight, *head, *tail, hidden.stride(0), weight.stride(0))
    constants = {**blocks_of, "EVEN_K": k % kernel.block_k == 0, **flags}
    launch_kernel(head_pointer_kernel, (blocks, 1, 1), args, constants, **options)


def target_logits(
    hidden: Tensor, weight: Tensor, n: int, targets: Tensor, temperature: Tensor, first_id: int, out: Tensor,
    vocab_size: int | None = None,
) -> None:  # fmt: skip
    """x of targets among the ids first_id .. first_id + n - 1 of weight's first n rows into out fp32 [T], 0 elsewhere;
    NaN beyond ``vocab_size`` if given.
    """
    tokens, k = hidden.shape
    launch_kernel(
        target_logit_kernel, (-(-tokens // 16), 1, 1),
        (hidden, weight, temperature, targets, out, tokens, n, k, first_id, vocab_size or 0, hidden.stride(0),
         weight.stride(0)),
        {"BLOCK_K": 128, "UNIT": temperature.numel() == 0},
        num_warps=1, num_stages=4, enable_fp_fusion=False, **_PINNED,
    )  # fmt: skip
