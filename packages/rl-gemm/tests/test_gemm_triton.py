"""The Triton sources without a GPU: they compile for every architecture, and their logic holds in the interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rl_gemm import plans

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter needs a process without a GPU")

TARGETS = {"sm90": ("cuda", 90, 32), "gfx942": ("hip", "gfx942", 64), "gfx950": ("hip", "gfx950", 64)}
POINTERS = {"a": "*bf16", "b": "*bf16", "out": "*bf16", "M": "i32", "N": "i32", "K": "i32", "leaf_k": "i32"}


def compile_leaf(kernel, arch, leaf_grid=False):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from rl_gemm.triton_gemm import gemm_leaf_kernel, pinned

    constants = {
        "bias": None, "stride_ak": 1, "stride_bk": 1, "BLOCK_M": kernel.block_m, "BLOCK_N": kernel.block_n,
        "BLOCK_K": kernel.block_k, "GROUP_M": 8, "FUSED": 1, "EVEN_K": True, "SWAP": kernel.swap, "HAS_BIAS": False,
    }  # fmt: skip
    types = POINTERS | {"stride_am": "i32", "stride_bn": "i32", "stride_om": "i32", "stride_out_leaf": "i64"}
    types["out"] = "*fp32" if leaf_grid else "*bf16"
    names = gemm_leaf_kernel.arg_names
    aligned = {(names.index(n),): [["tt.divisibility", 16]] for n in types if n != "M"}
    source = ASTSource(
        fn=gemm_leaf_kernel,
        signature={n: types.get(n, "constexpr") for n in names},
        constexprs={(names.index(n),): v for n, v in constants.items()},
        attrs=aligned,
    )
    options = {"num_warps": kernel.warps, "num_stages": kernel.stages} | pinned(arch.startswith("gfx"))
    return triton.compile(source, target=GPUTarget(*TARGETS[arch]), options=options)


@pytest.mark.parametrize("arch", TARGETS)
def test_every_leaf_kernel_of_the_plan_compiles_to_matrix_instructions(arch):
    for kernel in plans.shipped(arch).kernels.values():
        if kernel.kind != "leaf":
            continue
        built = compile_leaf(kernel, arch)
        if arch == "sm90":
            text = built.asm["ptx"]
            assert "wgmma.mma_async" in text or "mma.sync.aligned.m16n8k16" in text
            assert "tf32" not in text
        else:
            text = built.asm["amdgcn"]
            wanted = "v_mfma_f32_16x16x16" if arch == "gfx942" else "v_mfma_f32_16x16x32"
            assert wanted in text, kernel.name
            assert "v_mfma_f32_32x32" not in text
            spilled = [line.split()[-1] for line in text.splitlines() if ".vgpr_spill_count" in line]
            assert spilled, "the compiler's report has no spill count"
            assert set(spilled) == {"0"}, (kernel.name, spilled)


INTERPRETED = """
import torch
from rl_gemm import plans, triton_gemm

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
        triton_gemm.merge(parts, bias, out)
    order = torch.arange(k).view(fused, leaves, -1).transpose(0, 1).flatten()
    parts = [x @ y.t() for x, y in zip(a[:, order].chunk(leaves, 1), b[:, order].chunk(leaves, 1))]
    while len(parts) > 1:
        parts = [parts[i] + parts[i + 1] for i in range(0, len(parts), 2)]
    assert (out - parts[0] - bias).abs().max() < 1e-4, (kind, m, n, k, leaves, fused, more)

torch.manual_seed(0)
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
