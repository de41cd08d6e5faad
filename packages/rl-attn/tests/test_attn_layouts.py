"""A cache as the copy engine sees it: one table of rows for keys and one for values, whatever layout the engine has."""

import pytest
import torch

from rl_attn import PagedKV, gpu

pytest.importorskip("triton")

from rl_attn.triton_hopper_tiles import pages_descriptor, rows_descriptor

BLOCKS, HEADS, DIM = 5, 3, 64


def _distinct(*shape):
    """Every row of D elements has other bits."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.int32).mul(40503).to(torch.int16).view(shape).bfloat16()


def _cache(layout, page, heads):
    """Views [blocks, Hkv, page, D] of keys and values."""
    if layout == "vllm_cpu":
        return PagedKV.from_vllm_cpu(_distinct(BLOCKS, heads, page, 2 * DIM), num_kv_heads=heads, head_dim=DIM)
    if layout == "vllm_split":
        return PagedKV.from_vllm_split(_distinct(2, BLOCKS, page, heads, DIM), num_kv_heads=heads, head_dim=DIM)
    if layout == "block of both":  # [blocks, 2, page, Hkv, D]
        cache = _distinct(BLOCKS, 2, page, heads, DIM)
        return PagedKV(cache[:, 0].transpose(1, 2), cache[:, 1].transpose(1, 2))
    if layout == "token of both":  # [blocks, page, Hkv, 2 * D]
        cache = _distinct(BLOCKS, page, heads, 2 * DIM).transpose(1, 2)
        return PagedKV(cache[..., :DIM], cache[..., DIM:])
    cache = _distinct(2, BLOCKS, heads, page, DIM)  # heads first
    return PagedKV(cache[0], cache[1])


def _table(descriptor):
    """What the copy engine may fetch; fails where it would reach beyond the cache."""
    x = descriptor.base
    return torch.as_strided(x, descriptor.shape, descriptor.strides, x.storage_offset())


@pytest.mark.parametrize("heads", [1, HEADS])
@pytest.mark.parametrize("page", [8, 16, 64, 256])
@pytest.mark.parametrize("layout", ["vllm_cpu", "vllm_split", "block of both", "token of both", "heads first"])
def test_layout_is_a_table_of_rows(layout, page, heads):
    kv = _cache(layout, page, heads)
    for x in (kv.k, kv.v):
        assert gpu._may_fetch_pages(x)
        steps = gpu.page_steps(x)
        block_rows, head_rows, head_columns = steps
        descriptor = pages_descriptor(x, steps, 128)
        assert descriptor.block_shape == [min(page, 128), DIM]
        # bytes between rows, as the copy engine asks
        assert 2 * descriptor.strides[0] % 16 == 0
        table = _table(descriptor)
        for block in range(BLOCKS):
            for head in range(heads):
                row, column = block * block_rows + head * head_rows, head * head_columns
                assert torch.equal(table[row : row + page, column : column + DIM], x[block, head])


def test_layout_that_is_no_table_of_rows_is_not_fetched():
    odd = _distinct(BLOCKS, HEADS, 16, DIM + 4)[..., :DIM]
    assert gpu.page_steps(odd) is None
    # pages that do not begin at a multiple of a row
    gaps = torch.as_strided(_distinct(4096 * 3), (2, 1, 16, DIM), (16 * DIM + 8, 16 * DIM, DIM, 1))
    assert gpu.page_steps(gaps) is None
    shifted = _distinct(4096)[3 : 3 + 16 * DIM].view(1, 1, 16, DIM)
    assert gpu.page_steps(shifted) is None
    assert not gpu._may_fetch_pages(_distinct(BLOCKS, HEADS, 24, DIM))
    assert not gpu._may_fetch_pages(_distinct(BLOCKS, HEADS, 4, DIM))


def test_layout_of_packed_rows_is_a_table_of_rows():
    qkv = _distinct(40, 3 * HEADS, DIM)
    for x in (qkv[:, HEADS : 2 * HEADS], qkv[:, 2 * HEADS :], _distinct(40, HEADS, DIM)):
        assert gpu._may_fetch_rows(x)
        table = _table(rows_descriptor(x, 64))
        for head in range(HEADS):
            assert torch.equal(table[:, head * x.stride(1) : head * x.stride(1) + DIM], x[:, head])
