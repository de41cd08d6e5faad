"""The ops of ``ops.py`` and ``ops_backward.py`` on a GPU: ``gpu*.py`` and the Triton kernels, imported at first use.

Page ids, slots and positions of a table lie on the device; looking at them would stop the stream and a graph capture.
So the kernels never follow one that is out of range: its rows become NaN, its slot is skipped, and ``check_paged`` says
which one it was.
"""

from torch import Tensor

from rl_attn import gpu, gpu_backward, gpu_rotary, ops, ops_backward


@ops.packed.register_kernel("cuda")
def _packed(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, positions: Tensor, scale: float,
    key_tile: int, segment: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return gpu.packed(q, k, v, cu_seqlens_q, cu_seqlens_k, positions, scale, key_tile, segment)


@ops.paged.register_kernel("cuda")
def _paged(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, query_start_loc: Tensor, seq_lens: Tensor, block_table: Tensor,
    scale: float, key_tile: int, segment: int, most_rows: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    rest = (query_start_loc, seq_lens, block_table, scale, key_tile, segment)
    return gpu.paged(q, k_cache, v_cache, *rest, most_rows=most_rows)


@ops.paged_into.register_kernel("cuda")
def _paged_into(
    out: Tensor, q: Tensor, k_cache: Tensor, v_cache: Tensor, query_start_loc: Tensor, seq_lens: Tensor,
    block_table: Tensor, scale: float, key_tile: int, segment: int, most_rows: int | None = None,
) -> Tensor:  # fmt: skip
    rest = (query_start_loc, seq_lens, block_table, scale, key_tile, segment)
    return gpu.paged(q, k_cache, v_cache, *rest, most_rows=most_rows, out=out)[1]


@ops.write.register_kernel("cuda")
def _write(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
    gpu_rotary.write(k_cache, v_cache, k, v, slot_mapping)


@ops.rotary.register_kernel("cuda")
def _rotary(
    q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, inverse: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return gpu_rotary.rotary(q, k, positions, cos, sin, inverse)


@ops_backward.row_delta.register_kernel("cuda")
def _row_delta(grad_out: Tensor, out: Tensor) -> Tensor:
    return gpu_backward.row_delta(grad_out, out)


@ops_backward.grad_queries.register_kernel("cuda")
def _grad_queries(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor, positions: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    return gpu_backward.grad_queries(grad_out, q, k, v, lse, delta, cu_seqlens_q, cu_seqlens_k, positions, scale)


@ops_backward.grad_keys.register_kernel("cuda")
def _grad_keys(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor, positions: Tensor, key_positions: Tensor, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return gpu_backward.grad_keys(
        grad_out, q, k, v, lse, delta, cu_seqlens_q, cu_seqlens_k, positions, key_positions, scale
    )  # fmt: skip
