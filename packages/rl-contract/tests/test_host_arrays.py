"""A tensor's memory as an array: the same bits in the same place, and a storage that can still be resized."""

import gc

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode

from rl_contract import ContractError
from rl_contract.arrays import as_array
from rl_contract.devices import host_array, host_span

REAL = [torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64]
REAL += [torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64]
VIEWS = {
    "whole": lambda x: x,
    "transposed": lambda x: x.t(),
    "columns": lambda x: x[:, 1:3],
    "every other": lambda x: x[1::2, ::2],
    "expanded": lambda x: x[:, :1].expand(4, 6),
    "one element": lambda x: x[2, 3],
    "no row": lambda x: x[4:],
    "no column": lambda x: x[1:, 2:2],
}


def tensor(dtype):
    # every bit pattern of a byte is a value of every type but bool
    raw = torch.arange(256, dtype=torch.uint8).repeat(24)[: 24 * dtype.itemsize]
    return (raw % 2).bool().view(4, 6) if dtype == torch.bool else raw.view(dtype).view(4, 6)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", REAL)
def test_an_array_is_the_bits_of_the_tensor_in_the_same_place(dtype, view):
    x, twin = (VIEWS[view](tensor(dtype)) for _ in range(2))
    # the twin is marked, x must not be
    expected = (twin.view(torch.uint16) if dtype == torch.bfloat16 else twin).numpy()
    found, copied, span = host_array(x), as_array(x), host_span(x)
    for array in (found, copied):
        assert (array.dtype, array.shape) == (expected.dtype, expected.shape)
        assert array.tobytes() == expected.tobytes()
        assert (array.flags.writeable, array.flags.aligned) == (True, True)
    assert copied.flags.c_contiguous
    assert span.shape == (expected.size and 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride())),)
    if x.numel():
        assert found.ctypes.data == span.ctypes.data == x.data_ptr()
        assert found.strides == tuple(s * x.element_size() for s in x.stride()) or x.is_contiguous()
        assert (copied.ctypes.data == x.data_ptr()) == x.is_contiguous()
    assert [y.untyped_storage().resizable() for y in (x, twin)] == [True, False]


def test_what_is_written_to_an_array_is_in_the_tensor():
    x = torch.nn.Parameter(torch.zeros(3, 4))
    host_array(x)[1, 2] = 5.0
    host_array(x.t())[3, 0] = 6.0
    host_span(x[1:, 1:3])[4] = 7.0
    assert [x[at].item() for at in ((1, 2), (0, 3), (2, 1))] == [5.0, 6.0, 7.0]


def test_memory_lasts_as_long_as_its_array():
    x = torch.full((1 << 20,), 3.0)
    array = host_array(x)
    x.set_(torch.zeros(1))
    del x
    gc.collect()
    torch.zeros(1 << 20)
    assert (array == 3.0).all()
    p = torch.nn.Parameter(torch.ones(8))
    array = as_array(p)
    p.data = torch.zeros(8)
    assert (array == 1.0).all()


def given_back():
    # a view with an offset: its address is not null
    x = torch.zeros(4, 4)[1:]
    x.untyped_storage().resize_(0)
    return x


def fake():
    with FakeTensorMode():
        return torch.zeros(3)


REFUSED = {
    "given back": (given_back, "memory was given back"),
    "meta": (lambda: torch.zeros(3, device="meta"), "on meta"),
    "fake": (fake, "FakeTensor of torch.float32"),
    "complex": (lambda: torch.zeros(3, dtype=torch.complex64), "torch.complex64"),
    "fp8": (lambda: torch.zeros(3).to(torch.float8_e4m3fn), "torch.float8_e4m3fn"),
    "negated lazily": (lambda: torch.ones(1, dtype=torch.complex64).conj().imag, "resolve_neg"),
}


@pytest.mark.parametrize("make", REFUSED)
@pytest.mark.parametrize("function", [host_array, host_span, as_array])
def test_what_has_no_memory_for_numpy_is_refused_by_name(function, make):
    given, words = REFUSED[make]
    with pytest.raises(ContractError, match=rf"{words}.*; supported: |; supported: .*{words}"):
        function(given())


def test_numba_sees_the_array_that_numpy_makes():
    numba = pytest.importorskip("numba")
    x = torch.randn(3, 4)
    assert numba.typeof(host_array(x)) == numba.typeof(np.zeros((3, 4), np.float32))
    assert numba.typeof(host_array(x.t())) == numba.typeof(x.clone().t().numpy())
