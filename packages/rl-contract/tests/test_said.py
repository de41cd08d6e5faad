"""What ranks say of an operator: the same of what is equal, and another text of what is not."""

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode

from rl_contract.checks import shown
from rl_contract.communicator import said_of


@pytest.mark.parametrize(
    ("alike", "said"),
    [
        ((1, 1.0, np.int8(1), np.uint64(1), np.float16(1), np.float64(1)), "1"),
        ((0, 0.0, -0.0, np.float32(-0.0)), "0"),
        ((0.5, np.float16(0.5), np.float32(0.5)), "0.5"),
        ((2**70, 2.0**70), hex(2**70)),
        ((-(2**63), -(2.0**63), np.int64(-(2**63))), str(-(2**63))),
        ((float("nan"), np.float32("nan")), "nan"),
        ((float("-inf"), np.float32("-inf")), "-inf"),
        ((10**5000,), hex(10**5000)),
        ((True, np.bool_(True)), "True"),
        ((None,), "None"),
        ((torch.float32,), "torch.float32"),
    ],
)
def test_equal_numbers_are_said_alike(alike, said):
    assert {said_of("op", a=x) for x in alike} == {f"op(a={said})"}


def test_numbers_that_differ_are_said_otherwise():
    values = [0, 1, -1, 0.1, np.float32(0.1), np.nextafter(1.0, 2.0), 2**53, 2**53 + 1, True, False, None]
    assert len({said_of("op", a=x) for x in values}) == len(values)


def test_a_tensor_whose_bytes_are_not_its_own_is_not_read():
    """Inside a transform of torch.func, and while someone traces; the operator is said nothing of then."""
    x = torch.arange(3.0)
    said = []

    def seen(y):
        said.append(said_of("op", x=y, k=1))
        return y.sum()

    torch.func.grad(seen)(x)
    torch.func.vmap(seen)(x[None])
    with FakeTensorMode() as mode:
        seen(mode.from_tensor(x))
    assert said == [""] * 3
    seen(x)
    seen(torch.nn.Parameter(x))
    assert said[3] == said[4] == "op(x=float32 [3] (check 30c8bc70), k=1)"


class Unshown:
    def __repr__(self):
        raise RuntimeError("no")


def test_what_can_not_be_shown_is_named():
    assert shown(10**5000) == "an integer of 16610 bits"
    assert shown(Unshown()) == "a Unshown"
    assert shown("x" * 100) == "'" + "x" * 79
    assert shown([1, None]) == "[1, None]"
