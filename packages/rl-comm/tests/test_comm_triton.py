"""The tree's kernel without a GPU: it compiles for every architecture, and interpreted it gives the tree's bits."""

import os
import subprocess
import sys

import pytest
import torch

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter needs a process without a GPU")

TARGETS = {"sm90": ("cuda", 90, 32), "gfx942": ("hip", "gfx942", 64), "gfx950": ("hip", "gfx950", 64)}
INTERPRETED = """
import torch
from rl_comm import tree_sum, triton_tree

for world in (1, 2, 4, 8):
    for n in (1, 7, 4097):
        parts = torch.randn(world, n, generator=torch.Generator().manual_seed(n)) * 1e3
        # the interpreter truncates to bf16, so its rounding is left to a GPU's test
        assert torch.equal(triton_tree.tree_sum(parts, torch.float32), tree_sum(list(parts))), (world, n)
print("equal")
"""


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("world", [2, 8])
def test_kernel_compiles(arch, world):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from rl_comm.triton_tree import tree_sum_kernel

    source = ASTSource(
        fn=tree_sum_kernel,
        signature={"parts": "*fp32", "out": "*bf16", "n": "i32", "WORLD": "constexpr", "BLOCK": "constexpr"},
        constexprs={(3,): world, (4,): 2048},
        attrs={(i,): [["tt.divisibility", 16]] for i in range(3)},
    )
    built = triton.compile(source, target=GPUTarget(*TARGETS[arch]), options={"num_warps": 8})
    if arch == "sm90":
        # rows are read 16 bytes at a time
        assert built.asm["ptx"].count("ld.global.v4") >= world


def test_interpreted_kernel_is_the_tree():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", INTERPRETED], env=environment, capture_output=True, text=True
    )
    assert done.stdout.strip() == "equal", done.stderr[-2000:]
