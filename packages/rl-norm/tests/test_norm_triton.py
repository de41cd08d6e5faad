"""The Triton source without a GPU: it compiles for every architecture; the interpreter gives the reference's bits."""

import os
import subprocess
import sys

import pytest
import torch

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter needs a process without a GPU")

TARGETS = {"sm90": ("cuda", 90, 32), "gfx942": ("hip", "gfx942", 64), "gfx950": ("hip", "gfx950", 64)}
FORWARD = ("x", "residual", "weight", "y", "stream")
BACKWARD = ("dy", "stream", "weight", "dstream", "dx")


def build(function, tensors, scalars, constants, options, arch):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = function.arg_names
    types = dict.fromkeys(tensors, "*bf16") | {"rstd": "*fp32"} | scalars
    source = ASTSource(
        fn=function,
        signature={n: types.get(n, "constexpr") for n in names},
        constexprs={(names.index(n),): v for n, v in constants.items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in (*tensors, "rstd")},
    )
    return triton.compile(source, target=GPUTarget(*TARGETS[arch]), options=options)


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("width", [128, 1000, 4096, 20000])
def test_kernels_compile_without_spills(arch, width):
    from rl_norm import triton_norm as kernels

    strides = {"M": "i32", "stride_x": "i32", "stride_residual": "i32", "eps": "fp32"}
    shape, options = kernels._launch_shape(width, kernels._KEPT_FORWARD)
    forward = build(kernels.rms_norm_fwd_kernel, FORWARD, strides, shape | {"ADD": True}, options, arch)
    strides = {"M": "i32", "stride_dy": "i32", "stride_dstream": "i32"}
    shape, options = kernels._launch_shape(width, kernels._KEPT_BACKWARD)
    backward = build(kernels.rms_norm_bwd_kernel, BACKWARD, strides, shape | {"ADD": True}, options, arch)
    for built in (forward, backward):
        text = built.asm["ptx" if arch == "sm90" else "amdgcn"]
        if arch == "sm90":
            # the only fused operations are those written as such, and none is in fp32
            assert "fma.rn.f32" not in text
        else:
            spilled = {line.split()[-1] for line in text.splitlines() if ".vgpr_spill_count" in line}
            assert spilled == {"0"}


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
print("interpreted")
"""


def test_bits_in_the_interpreter_are_the_reference(tmp_path):
    """In a fresh process, since the interpreter is chosen when a kernel is defined; fp32, which it follows exactly."""
    script = tmp_path / "interpreted.py"
    script.write_text(INTERPRETED)
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "interpreted", done.stderr[-2000:]
