"""Every launch that a plan file can ask for, compiled without a GPU: it fits the GPU, does not spill, uses the matrix
unit. A plan that asks for too much would fail at its first use in production."""

import pytest
import torch

from rl_contract.dry_run import SHARED_LIMIT, no_gpu
from rl_gemm import plans

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a process without a GPU")

ARCHS = ("sm90", "gfx942", "gfx950")
# bytes of stack a thread on sm90: compilers of different age keep a few registers there while sub-trees are joined,
# once a leaf; a loop that spills takes hundreds
STACK = {"sm90": 64, "gfx942": 0, "gfx950": 0}


def wanted(arch):
    """(kernel, leaves, operation) of every row."""
    own, found = plans.shipped(arch), set()
    for row in own.rows:
        for name in (row.use, row.otherwise):
            if name not in own.kernels:
                continue
            kernel = own.kernels[name]
            one_program = kernel.kind in ("tree", "hopper")
            for leaves in (row.leaves,) if row.leaves else (1, 2):
                # without one program for all leaves their number is only the grid's
                found.add((name, leaves if one_program else min(leaves, 2), row.operation))
    return sorted(found)


def launch(kernel, leaves, operation):
    """As ``gpu.py`` does, with the fp32 output that takes the most room."""
    from rl_gemm import triton_gate_up, triton_gemm

    m, n, k = 333, 1024, 8192
    a, b = torch.empty(m, k, dtype=torch.bfloat16), torch.empty(n, k, dtype=torch.bfloat16)
    if operation == plans.GATE_UP:
        triton_gate_up.launch(kernel, a, b, torch.empty(m, n // 2, dtype=torch.bfloat16), 132)
        return
    if operation == "grad_weight":
        a = torch.empty(k, 336, dtype=torch.bfloat16).t()
    if operation != "forward":
        b = torch.empty(k, n, dtype=torch.bfloat16).t()
    out = torch.empty(len(a), n)
    if kernel.kind == "hopper":
        from rl_gemm import gluon_tree

        target = gluon_tree.workspace(kernel, a, b) if kernel.parts > 1 else out
        gluon_tree.launch(kernel, a, b, None, target, leaves, 1, 132)
    elif kernel.kind == "tree" or leaves == 1:
        triton_gemm.launch(kernel, a, b, None, out, leaves, 1, 132)
    else:
        triton_gemm.launch(kernel, a, b, None, torch.empty(leaves, *out.shape), leaves, 1, 132)


@pytest.mark.parametrize("arch", ARCHS)
def test_every_launch_of_the_plan_fits_the_gpu_and_does_not_spill(arch):
    own, checked = plans.shipped(arch), 0
    gluon = triton.__version__.startswith("3.6.")
    for name, leaves, operation in wanted(arch):
        kernel = own.kernels[name]
        if kernel.kind == "hopper" and not gluon:
            continue
        with no_gpu(arch) as built:
            launch(kernel, leaves, operation)
        (one,) = built
        what = (name, leaves, operation)
        assert one.shared <= SHARED_LIMIT[arch], (what, one.shared)
        assert one.spilled <= STACK[arch], (what, one.spilled)
        if arch == "sm90":
            assert "wgmma.mma_async" in one.text or "mma.sync.aligned.m16n8k16" in one.text, what
            assert "tf32" not in one.text, what
        else:
            assert {"gfx942": "v_mfma_f32_16x16x16", "gfx950": "v_mfma_f32_16x16x32"}[arch] in one.text, what
            assert "v_mfma_f32_32x32" not in one.text, what
        checked += 1
    assert checked >= len(own.kernels) - 6


def test_gated_launches_fit_and_do_not_spill():
    for rows, columns, depth, warps, stages, swap in (
        (16, 64, 128, 4, 5, True),
        (32, 64, 64, 4, 5, True),
        (64, 32, 128, 4, 5, False),
        (128, 64, 64, 8, 6, False),
    ):
        kernel = plans.Kernel(
            kind="gated", block_m=rows, block_n=columns, block_k=depth, warps=warps, stages=stages, swap=swap
        )
        with no_gpu("sm90") as built:
            launch(kernel, 1, plans.GATE_UP)
        (one,) = built
        assert one.shared <= SHARED_LIMIT["sm90"]
        assert one.spilled <= STACK["sm90"]
        # the rounding of gate and up to bf16, before SwiGLU in fp32 without contraction
        assert "cvt.rn.bf16" in one.text
        assert "wgmma.mma_async" in one.text


def test_launches_that_do_not_fit_or_spill_are_seen():
    large = plans.Kernel(kind="leaf", block_m=128, block_n=256, block_k=128, warps=8, stages=4)
    greedy = plans.Kernel(kind="tree", block_m=128, block_n=128, block_k=64, warps=4, stages=3, held=3)
    with no_gpu("sm90") as built:
        launch(large, 1, "forward")
        launch(greedy, 8, "forward")
    assert built[0].shared > SHARED_LIMIT["sm90"]
    assert built[1].spilled > 10 * STACK["sm90"]


HOPPER = [
    plans.Kernel(kind="hopper", block_m=m, block_n=n, block_k=k, warps=w, stages=16)
    for m, n, k, w in ((128, 128, 64, 8), (64, 32, 128, 4), (64, 64, 128, 4), (64, 128, 64, 8), (128, 64, 64, 4))
]


def test_the_hopper_ring_leaves_room_for_its_stash():
    """In every Triton: the sum of what the kernel allocates, for every leaf count, output and wish."""
    try:
        from rl_gemm import gluon_tree
    except ImportError:
        pytest.skip("this Triton has no Gluon of Hopper")
    for kernel in (*HOPPER, *(k for k in plans.shipped("sm90").kernels.values() if k.kind == "hopper")):
        stage = 2 * kernel.block_k * (kernel.block_m + kernel.block_n)
        for leaves in (1, 2, 4, 8):
            for kind in (torch.bfloat16, torch.float32):
                stages = gluon_tree.stages_that_fit(kernel, leaves, kind)
                wide = leaves > 4 and kernel.block_m * kernel.block_n > 1024 * kernel.warps
                stash = kernel.block_m * kernel.block_n * (4 if wide or kind == torch.float32 else 2)
                assert 3 <= stages <= kernel.stages
                assert stages * (stage + 16) + stash + 128 <= SHARED_LIMIT["sm90"], (kernel.name, leaves, kind)


@pytest.mark.skipif(not triton.__version__.startswith("3.6."), reason="the Gluon kernel runs under Triton 3.6")
def test_hopper_launches_of_every_shape_fit_and_do_not_spill():
    for kernel in HOPPER:
        with no_gpu("sm90") as built:
            launch(kernel, 8, "forward")
        (one,) = built
        assert one.shared <= SHARED_LIMIT["sm90"], (kernel.name, one.shared)
        assert one.spilled == 0, (kernel.name, one.spilled)
        assert "wgmma.mma_async" in one.text


def test_clocks_are_read_for_a_profile_only():
    from rl_gemm import triton_gemm, triton_merge, triton_stamps

    tma = plans.Kernel(kind="tma", block_m=64, block_n=64, block_k=64, warps=4, stages=4)
    a, b = torch.empty(64, 4096, dtype=torch.bfloat16), torch.empty(256, 4096, dtype=torch.bfloat16)
    parts, out = torch.empty(2, 64, 256), torch.empty(64, 256, dtype=torch.bfloat16)
    for stamps in (None, triton_stamps.room(132, "cpu")):
        with no_gpu("sm90") as built:
            triton_gemm.launch(tma, a, b, None, parts, 2, 1, 132, stamps)
            triton_merge.merge(parts, None, out, early=True, stamps=stamps)
            if triton.__version__.startswith("3.6."):
                from rl_gemm import gluon_tree

                gluon_tree.launch(HOPPER[1], a, b, None, out, 2, 1, 132, stamps)
        for one in built:
            assert ("globaltimer" in one.text) == (stamps is not None), one.name


@pytest.mark.parametrize("arch", ARCHS)
def test_merge_and_swiglu_fit_and_do_not_spill(arch):
    from rl_gemm import triton_merge, triton_swiglu

    with no_gpu(arch) as built:
        for leaves in (2, 4, 8, 16):
            triton_merge.merge(torch.empty(leaves, 33, 96), None, torch.empty(33, 96, dtype=torch.bfloat16))
        for width in (100, 3072, 12288):
            gate_up = torch.empty(5, 2 * width, dtype=torch.bfloat16)
            triton_swiglu.forward(gate_up)
            triton_swiglu.backward(gate_up[:, :width], gate_up)
    assert len(built) == 10
    assert all(b.spilled == 0 and b.shared <= SHARED_LIMIT[arch] for b in built)
