"""The trainer's GPU kernels without a GPU: they compile, and the interpreter gives the bits of the CPU's sequences."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter needs a process without a GPU")

TARGETS = {"sm90": ("cuda", 90, 32), "gfx942": ("hip", "gfx942", 64)}
INTERPRETED = """
import math
import torch
from rl_megatron import triton_optimizer, triton_rows
from rl_megatron.optimizer import _adamw, _State

g = torch.Generator().manual_seed(0)
for n in (1, 7, 5000):
    for coef, decay in ((1.0, 0.0), (0.3, 0.1)):
        master = torch.randn(n, generator=g)
        moments = [torch.randn(n, generator=g) * 1e-3, torch.rand(n, generator=g) * 10.0 ** torch.randint(-40, 3, (n,))]
        grad = torch.randn(n, generator=g) * 10.0 ** torch.randint(-20, 3, (n,)).float()
        # the interpreter truncates to bf16, so the parameter's rounding is left to a GPU's test
        want, got = (
            _State(torch.nn.Parameter(master.clone()), *[x.clone() for x in (grad, master, *moments)]) for _ in "ab"
        )
        step = triton_optimizer.Step(coef=coef, b1=0.9, b2=0.95, size=1e-3 / 0.1, root2=math.sqrt(0.05), eps=1e-8)
        keep = 1.0 - 1e-3 * decay
        if coef < 1.0:
            want.grad.mul_(coef)
        _adamw(want, want.grad, 0.9, 0.95, step.size, step.root2, step.eps, keep)
        want.parameter.data.copy_(want.master)
        triton_optimizer.adamw(
            got.master, got.exp_avg, got.exp_avg_sq, got.grad, got.parameter.data, step, keep
        )
        for name in ("master", "exp_avg", "exp_avg_sq"):
            a, b = getattr(want, name), getattr(got, name)
            assert torch.equal(a.view(torch.int32), b.view(torch.int32)), (n, coef, name)
        assert torch.equal(want.parameter, got.parameter)

for rows, width, tokens in ((11, 40, 300), (5, 1500, 9), (3, 8, 0)):
    ids = torch.randint(0, rows + 2, (tokens,), generator=g)
    grad = (torch.randn(tokens, width, generator=g) * 100).bfloat16()
    want = torch.randn(rows, width, generator=g)
    got = want.clone()
    for t in range(tokens):
        if ids[t] < rows:
            want[ids[t]] += grad[t].float()
    triton_rows.add_rows(got, ids, grad)
    assert torch.equal(want, got), (rows, width)

grad = torch.randn(96, 320, generator=g)
for dim, fused in ((0, 1), (0, 2), (1, 1)):
    whole = torch.empty(8, dtype=torch.float64)
    triton_optimizer.square_sums(grad, whole, dim, fused)
    torch.testing.assert_close(whole.sum(), grad.double().square().sum(), rtol=1e-12, atol=0)
    for t in (1, 2, 4, 8):
        if dim == 0:
            shards = [torch.cat(parts) for parts in zip(*(h.chunk(t) for h in grad.chunk(fused)))]
        else:
            shards = [p.contiguous() for p in grad.chunk(t, 1)]
        mine = [torch.empty(8 // t, dtype=torch.float64) for _ in shards]
        for shard, out in zip(shards, mine):
            triton_optimizer.square_sums(shard, out, dim, fused)
        assert torch.equal(torch.cat(mine), whole), (dim, fused, t)
print("equal")
"""


def build(
    function: Any, pointers: dict[str, str], scalars: dict[str, str], constants: dict[str, Any], arch: str
) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = function.arg_names
    types = pointers | scalars
    source = ASTSource(
        fn=function,
        signature={n: types.get(n, "constexpr") for n in names},
        constexprs={(names.index(n),): v for n, v in constants.items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in pointers},
    )
    return triton.compile(source, target=GPUTarget(*TARGETS[arch]), options={"enable_fp_fusion": False})


@pytest.mark.parametrize("arch", TARGETS)
def test_kernels_compile_and_contract_nothing(arch: str) -> None:
    from rl_megatron import triton_optimizer, triton_rows

    moments = dict.fromkeys(("master", "exp_avg", "exp_avg_sq", "grad"), "*fp32")
    numbers = dict.fromkeys(("coef", "b1", "rest1", "b2", "rest2", "root2", "eps", "keep", "size"), "fp32")
    adamw = build(
        triton_optimizer.adamw_kernel,
        moments | {"parameter": "*bf16"},
        numbers | {"n": "i64"},
        {"CLIP": True, "DECAY": True, "BLOCK": 2048},
        arch,
    )
    squares = build(
        triton_optimizer.squares_kernel,
        {"grad": "*fp32", "sums": "*fp64"},
        dict.fromkeys(("length", "section", "section_stride", "columns", "row_stride", "leaf_stride", "blocks"), "i32"),
        {"STRIDED": True, "NARROW": True, "BLOCK": 8192},
        arch,
    )
    rows = build(
        triton_rows.add_rows_kernel,
        {"total": "*fp32", "ids": "*i64", "order": "*i64", "grad": "*bf16"},
        dict.fromkeys(("tokens", "rows", "width", "stride"), "i32"),
        {"BLOCK": 1024},
        arch,
    )
    if arch == "sm90":
        assert "sqrt.rn.f32" in adamw.asm["ptx"]
        assert "div.rn.f32" in adamw.asm["ptx"]
        # IEEE division and root are sequences with fma of their own only after the assembler
        for built in (adamw, squares, rows):
            assert "fma.rn.f32" not in built.asm["ptx"]
            assert "fma.rn.f64" not in built.asm["ptx"]


def test_interpreted_kernels_have_the_bits_of_the_cpu() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", INTERPRETED], env=environment, capture_output=True, text=True
    )
    assert done.stdout.strip() == "equal", done.stderr[-3000:]
