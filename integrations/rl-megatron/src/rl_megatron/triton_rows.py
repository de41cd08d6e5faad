"""Gradient of a table's rows on a GPU: each row takes its tokens' gradients one after another in packed order, fp32.

The first token of an id (after a stable sort by id) walks all tokens of that id, starting from what the row holds; the
order is that of the tokens, as on a CPU, whatever the launch shape.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def add_rows_kernel(total, ids, order, grad, tokens, rows, width, stride, BLOCK: tl.constexpr):
    """total fp32 [rows, width]; ids, order int64 [tokens], ids ascending; grad [tokens, width]"""
    t = tl.program_id(0)
    row = tl.load(ids + t)
    before = tl.load(ids + t - 1, mask=t > 0, other=-1)
    if (row < rows) & (row != before):
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        held = at < width
        place = total + row * width + at
        acc = tl.load(place, held)
        here = row
        while here == row:
            token = tl.load(order + t)
            acc += tl.load(grad + token * stride + at, held).to(tl.float32)
            t += 1
            here = tl.load(ids + t, mask=t < tokens, other=-1)
        tl.store(place, acc, held)


def add_rows(total: Tensor, ids: Tensor, grad: Tensor) -> None:
    """total[ids[t]] += grad[t] for t ascending; an id at or beyond the table's rows is left out.

    Args:
        total: fp32 [rows, width], contiguous.
        ids: int64 [tokens], none negative.
        grad: [tokens, width], of the model's type.
    """
    tokens, width = grad.shape
    if tokens == 0:
        return
    grad = grad.contiguous()
    ascending, order = torch.sort(ids, stable=True)
    block = min(1024, triton.next_power_of_2(width))
    add_rows_kernel[(tokens, triton.cdiv(width, block))](
        total, ascending, order, grad, tokens, total.shape[0], width, grad.stride(0), BLOCK=block, num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip
