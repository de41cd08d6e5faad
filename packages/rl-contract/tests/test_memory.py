"""What is a dense tensor and what an integer; where tensors lie, from strides as from the places themselves."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from rl_contract import ContractError, memory
from rl_contract.checks import given_back, require_tensor, tensor_problem, whole_number

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


@pytest.mark.parametrize("offset", [0, 4])
@pytest.mark.parametrize("kind", [torch.Tensor.detach, torch.nn.Parameter, torch.nn.Buffer])
def test_what_was_given_back_is_refused_and_what_has_no_elements_is_not(kind, offset):
    whole = torch.ones(8)
    x = kind(whole[offset:])
    require_tensor("f", "x", x)
    require_tensor("f", "x", kind(torch.ones(0, 3)))
    whole.untyped_storage().resize_(0)
    assert given_back(x)
    with pytest.raises(ContractError, match=r"f got x as a tensor whose memory was given back; supported: one that"):
        require_tensor("f", "x", x)
    # as the trainer gathers it again
    whole.untyped_storage().resize_(32)
    require_tensor("f", "x", x)


def asked(x):
    require_tensor("f", "x", x)
    assert tensor_problem("x", x) is None
    return x + 1


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_what_traces_sees_no_look_at_memory(mode):
    x = torch.arange(6.0).view(2, 3)
    compiled = torch.compile(asked, fullgraph=True, backend="eager", dynamic=mode == "symbolic")
    for y in (x, torch.nn.Parameter(x), torch.ones(5, 4)):
        assert torch.equal(compiled(y), y + 1)
    graph = make_fx(asked, tracing_mode=mode)(x)
    assert [n.target for n in graph.graph.nodes if n.op == "call_function"] == [torch.ops.aten.add.Tensor]
    assert torch.equal(graph(x), x + 1)


def test_what_stands_for_a_tensor_need_have_no_memory():
    x = torch.ones(2, 3)
    assert torch.equal(torch.func.grad(lambda y: asked(y).sum())(x), x)
    assert torch.equal(torch.func.functionalize(asked)(x), x + 1)
    for transform in (torch.func.vmap(asked), torch.func.vmap(torch.func.jacrev(asked))):
        transform(x)
    torch.func.jvp(asked, (x,), (x,))
    with FakeTensorMode() as mode:
        asked(mode.from_tensor(x))
        asked(torch.ones(3))
    asked(torch.ones(3, device="meta"))
    module = torch.nn.Module()
    module.forward = asked
    assert torch.equal(torch.export.export(module, (x,)).module()(x), x + 1)


def test_whole_numbers_are_integers_alone():
    assert all(map(whole_number, (0, -3, 2**70, np.int32(5), np.uint64(5))))
    assert not any(map(whole_number, (True, np.True_, 2.0, np.float32(2), "2", None, torch.tensor(2), [2])))
