"""The trainer's GPU kernels without a GPU: they compile, and the interpreter gives the bits of the CPU's sequences."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter needs a process without a GPU")

TARGETS = {"sm90": ("cuda", 90, 32), "gfx942": ("hip", "gfx942", 64)}
INTERPRETED = """
import importlib
import math
import sys
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

order = importlib.import_module("square_order")
for name, grad in order.gradients(((80, 8 * 13), (16, 8 * 1001)), 1, "cpu"):
    order.check(triton_optimizer.square_sums, name, grad, 4)
print("equal")
"""


def build(
    function: Any,
    pointers: dict[str, str],
    scalars: dict[str, str],
    constants: dict[str, Any],
    arch: str,
    aligned: tuple[str, ...] = (),
) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = function.arg_names
    types = pointers | scalars
    source = ASTSource(
        fn=function,
        signature={n: types.get(n, "constexpr") for n in names},
        constexprs={(names.index(n),): v for n, v in constants.items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in (*pointers, *aligned)},
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
        {"STRIDED": True, "NARROW": True, "BLOCK": 8192, "LANES": 1024},
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


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("strided", [False, True])
def test_layout_squares_are_joined_two_at_a_time(arch: str, strided: bool) -> None:
    """How registers hold what a load brings follows from the shard's sizes; a sum of two does not see it."""
    from rl_megatron import triton_optimizer

    sizes = ("length", "section", "section_stride", "columns", "row_stride", "leaf_stride", "blocks")
    constants = {"STRIDED": strided, "NARROW": True, "BLOCK": 8192, "LANES": 1024}
    pointers = {"grad": "*fp32", "sums": "*fp64"}
    for aligned in (False, True):
        built = build(
            triton_optimizer.squares_kernel, pointers, dict.fromkeys(sizes, "i32"), constants, arch,
            sizes if aligned else (),
        )  # fmt: skip
        assert reduced(built) == [2] * 10, aligned
    fold = build(
        triton_optimizer.fold_kernel, {"sums": "*fp64", "out": "*fp64"}, {"blocks": "i32"}, {"LANES": 1024}, arch
    )
    assert reduced(fold) == [2] * 10


def reduced(built: Any) -> list[int]:
    """How many elements each of a kernel's reductions joins."""
    text = built.asm["ttgir"]
    shapes = re.findall(r"\}\) : \(tensor<((?:\d+x)+)f64", text)
    assert len(shapes) == text.count('"tt.reduce"(')
    return [int(shape.split("x")[-2]) for shape in shapes]


def test_interpreted_kernels_have_the_bits_of_the_cpu() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", INTERPRETED],
        env=environment,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
    )
    assert done.stdout.strip() == "equal", done.stderr[-3000:]
