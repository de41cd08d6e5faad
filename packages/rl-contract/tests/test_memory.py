"""What is a dense tensor and what an integer; where tensors lie, from strides as from the places themselves."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_contract import ContractError, memory
from rl_contract.checks import require_tensor, whole_number

DIMS = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), min_size=1, max_size=3)


def places(dims, first=0):
    """Every element's place, in elements."""
    found = [first]
    for size, stride in dims:
        found = [at + i * stride for at in found for i in range(size)]
    return found


def view(dims, first=0):
    return torch.zeros(200).as_strided([n for n, _ in dims], [s for _, s in dims], first)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), min_size=1, max_size=3))
def test_elements_called_distinct_share_no_place(dims):
    assert memory.distinct(dims) or 0 not in [size for size, _ in dims]
    if memory.distinct(dims):
        assert len({*places(dims)}) == len(places(dims))
    x = torch.zeros([n for n, _ in dims])
    assert memory.distinct(zip(x.shape, x.stride()))


@given(DIMS, st.integers(0, 60))
def test_stretches_overlap_where_they_reach_one_byte(dims, first):
    x = view(dims)
    y = x.as_strided(x.shape, x.stride(), first)
    assert memory.reach(y) == (x.data_ptr() + 4 * first, x.data_ptr() + 4 * (max(places(dims, first)) + 1))
    assert memory.overlap(x, y) == (first <= max(places(dims)))
    assert not memory.overlap(x, x.clone())


@given(DIMS, st.integers(-60, 60))
def test_views_called_apart_share_no_place(dims, offset):
    shape, strides = tuple(n for n, _ in dims), tuple(s for _, s in dims)
    if memory.apart(shape, 4, 4000, strides, 4000 + 4 * offset, strides):
        assert not {*places(dims)} & {*places(dims, offset)}


def test_keys_and_values_of_one_buffer_are_apart_and_a_shifted_view_is_not():
    shape, strides = (3, 5), (20, 2)
    assert memory.apart(shape, 2, 4000, strides, 4002, strides)
    assert not memory.apart(shape, 2, 4000, strides, 4004, strides)


@pytest.mark.parametrize(
    "given", [None, [1.0], np.zeros(2), torch.zeros(2, 2).to_sparse()], ids=["None", "list", "array", "sparse"]
)
def test_what_is_no_dense_tensor_is_refused_by_name(given):
    require_tensor("f", "x", torch.zeros(2))
    with pytest.raises(
        ContractError,
        match=r"f got x as (NoneType|list|ndarray|torch\.sparse_coo).*; supported: .*(make one|x\.to_dense)",
    ):
        require_tensor("f", "x", given)


def test_whole_numbers_are_integers_alone():
    assert all(map(whole_number, (0, -3, 2**70, np.int32(5), np.uint64(5))))
    assert not any(map(whole_number, (True, np.True_, 2.0, np.float32(2), "2", None, torch.tensor(2), [2])))
