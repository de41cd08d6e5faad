"""The logic of the Triton sources in the interpreter, without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter needs a process without a GPU")

INTERPRETED = """
import torch
from rl_gemm import plans, triton_gate_up, triton_gemm, triton_merge

def run(kind, m, n, k, leaves=1, fused=1, at=False, bt=False, **more):
    fields = dict(kind=kind, block_m=16, block_n=32, block_k=16, warps=4, stages=2) | more
    kernel = plans.Kernel(**fields)
    a, b, bias = torch.randn(m, k), torch.randn(n, k), torch.randn(n)
    if at: a = a.t().contiguous().t()
    if bt: b = b.t().contiguous().t()
    out = torch.full((m, n), float("nan"))
    if kind == "tree" or leaves == 1:
        triton_gemm.launch(kernel, a, b, bias, out, leaves, fused, 3)
    else:
        parts = torch.full((leaves, m, n), float("nan"))
        triton_gemm.launch(kernel, a, b, None, parts, leaves, fused, 3)
        triton_merge.merge(parts, bias, out)
    order = torch.arange(k).view(fused, leaves, -1).transpose(0, 1).flatten()
    parts = [x @ y.t() for x, y in zip(a[:, order].chunk(leaves, 1), b[:, order].chunk(leaves, 1))]
    while len(parts) > 1:
        parts = [parts[i] + parts[i + 1] for i in range(0, len(parts), 2)]
    assert (out - parts[0] - bias).abs().max() < 1e-4, (kind, m, n, k, leaves, fused, more)

def run_gated(m, f, k, **more):
    fields = dict(kind="gated", block_m=16, block_n=32, block_k=16, warps=4, stages=2) | more
    x, weight, out = torch.randn(m, k), torch.randn(2 * f, k), torch.full((m, f), float("nan"))
    triton_gate_up.launch(plans.Kernel(**fields), x, weight, out, 3)
    gate, up = (x @ weight.t()).chunk(2, 1)
    assert (out - torch.nn.functional.silu(gate) * up).abs().max() < 2e-3, (m, f, k, more)

torch.manual_seed(0)
run_gated(17, 45, 100)
run_gated(40, 96, 136, swap=True)
run_gated(20, 68, 256, block_k=32)
run_gated(1, 7, 16)
run("leaf", 17, 45, 100)
run("leaf", 17, 45, 128, 2, swap=True)
run("leaf", 17, 45, 128, 2, at=True, bt=True)
run("leaf", 17, 45, 128, 4, 2)
run("tma", 40, 96, 136)
run("tma", 40, 96, 128, 4, swap=True)
for leaves in (2, 4, 8, 16):
    for held in (0, 1, 2, 3):
        run("tree", 20, 68, 256, leaves, held=held, slices=2)
run("tree", 40, 68, 256, 8, 2, at=True, bt=True, held=1)
run("tree", 20, 68, 256, 8, swap=True, held=3)
print("interpreted")
"""


def test_kernels_add_up_in_the_interpreter(tmp_path):
    """In a fresh process, since the interpreter is chosen when a kernel is defined; fp32, which it follows exactly."""
    script = tmp_path / "interpreted.py"
    script.write_text(INTERPRETED)
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, cwd=Path.cwd())
    assert done.stdout.strip() == "interpreted", done.stderr[-2000:]
