"""The Triton source without a GPU: it compiles for every architecture; the interpreter gives the reference's bits."""

import os
import subprocess
import sys

import pytest
import torch

from rl_contract.dry_run import SHARED_LIMIT, no_gpu

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter needs a process without a GPU")

ARCHS = ("sm90", "gfx942", "gfx950")


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("width", [128, 1000, 4096, 20000])
def test_every_launch_fits_and_does_not_spill(arch, width):
    """The launches of production code, compiled for a GPU that is not there."""
    from rl_norm import triton_norm

    x, weight = torch.empty(6, width, dtype=torch.bfloat16), torch.empty(width, dtype=torch.bfloat16)
    with no_gpu(arch) as built:
        _, stream, rstd = triton_norm.forward(x, x, weight, 1e-6)
        triton_norm.forward(x, None, weight, 1e-6)
        triton_norm.grad_input(x, stream, weight, rstd, x)
        triton_norm.grad_input(x, stream, weight, rstd, None)
        rows = len(built)
        triton_norm.grad_weight(x, stream, rstd, 2, 2)
    assert len(built) == rows + 2 == 6
    for one in built:
        assert one.spilled == 0, (one.name, one.spilled)
        assert one.shared <= SHARED_LIMIT[arch], (one.name, one.shared)
    for one in built[:rows] if arch == "sm90" else ():
        # the only fused operations are those written as such, and none is in fp32
        assert "fma.rn.f32" not in one.text


INTERPRETED = """
import torch
from rl_norm import reference, triton_norm

torch.manual_seed(0)
for width in (24, 128, 1000, 1504, 4096):
    (x, residual, dy), weight = torch.randn(3, 5, width), torch.randn(width)
    y, stream, rstd = triton_norm.forward(x, residual, weight, 1e-6)
    want, want_stream = reference.rms_norm(x, weight, 1e-6, residual, arch="sm90")
    assert torch.equal(y, want) and torch.equal(stream, want_stream), width
    plain = reference.rms_norm(x, weight, 1e-6, arch="sm90")[0]
    assert torch.equal(triton_norm.forward(x, None, weight, 1e-6)[0], plain), width
    dx = triton_norm.grad_input(dy, stream, weight, rstd, residual)
    assert torch.equal(dx, reference.grad_input(dy, stream, weight, 1e-6, residual, arch="sm90")), width
    # the interpreter's arithmetic is numpy's: another order must still show
    assert not torch.equal(y, reference.rms_norm(x, weight, 1e-6, residual)[0]) or width == 24
dy, x = torch.randn(2, 70 * 8, 128)
_, _, rstd = triton_norm.forward(x, None, torch.ones(128), 1e-6)
parts = triton_norm.grad_weight(dy, x, rstd, 8, 2)
assert torch.equal(parts[0] + parts[1], reference.grad_weight(dy, x, 1e-6, 8, 2, arch="sm90"))
dy, x = torch.randn(2, 9000, 8)
_, _, rstd = triton_norm.forward(x, None, torch.ones(8), 1e-6)
(total,) = triton_norm.grad_weight(dy, x, rstd, 1, 1)
assert torch.equal(total, reference.grad_weight(dy, x, 1e-6, 1, 1, arch="sm90"))
print("interpreted")
"""


def test_bits_in_the_interpreter_are_the_reference(tmp_path):
    """In a fresh process, since the interpreter is chosen when a kernel is defined; fp32, which it follows exactly."""
    script = tmp_path / "interpreted.py"
    script.write_text(INTERPRETED)
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "interpreted", done.stderr[-2000:]
