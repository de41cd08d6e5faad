"""What a package says of a device without contracts, and of an installation without Triton."""

from types import SimpleNamespace

import pytest
import torch

from rl_contract import MissingSupport
from rl_contract.gpu import arch_of, needs_triton


@pytest.mark.parametrize(
    ("hip", "properties", "name"),
    [
        (None, {"major": 9, "minor": 0}, "sm90"),
        (None, {"major": 10, "minor": 3}, "sm103"),
        ("6.4", {"major": 9, "minor": 4, "gcnArchName": "gfx942:sramecc+:xnack-"}, "gfx942"),
    ],
)
def test_a_device_without_contracts_is_refused_by_name(monkeypatch, hip, properties, name):
    monkeypatch.setattr(torch.version, "hip", hip)
    device = SimpleNamespace(name="a GPU", **properties)
    monkeypatch.setattr(torch.cuda, "get_device_properties", {3: device}.__getitem__)
    assert arch_of(3, (name,), "rl_x") == name
    with pytest.raises(MissingSupport, match=rf"^rl_x got a a GPU \({name}\); supported GPUs: \['sm80'\]$"):
        arch_of(3, ["sm80"], "rl_x")


def test_kernels_without_triton_are_refused_by_name():
    words = r"^rl_x on a GPU needs Triton \(no such thing\); install a PyTorch build with Triton$"
    with pytest.raises(MissingSupport, match=words), needs_triton("rl_x"):
        raise ImportError("no such thing")
    # what is wrong with the kernels themselves stays what it is
    with pytest.raises(SyntaxError), needs_triton("rl_x"):
        raise SyntaxError
    with needs_triton("rl_x"):
        pass
