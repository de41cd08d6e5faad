"""What a chain costs where nothing has to be loaded: matrix steps of depth 16, each waiting for the one before."""

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

DEPTH = 64
REPEAT = 256


@gluon.jit
def _warpgroup_kernel(times, out, REPEAT: gl.constexpr, BLOCK_N: gl.constexpr, DEPTH: gl.constexpr,
                      FROM_REGISTERS: gl.constexpr):  # fmt: skip
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    tile: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    a = gl.allocate_shared_memory(gl.bfloat16, [64, DEPTH], tile)
    b = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_N, DEPTH], tile)
    zeros: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    a.store(gl.zeros([64, DEPTH], gl.bfloat16, zeros))
    b.store(gl.zeros([BLOCK_N, DEPTH], gl.bfloat16, zeros))
    fence_async_shared()
    acc = gl.zeros([64, BLOCK_N], gl.float32, acc_layout)
    left = a.load(a_layout) if FROM_REGISTERS else a
    start = gl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l", [], dtype=gl.int64, is_pure=False, pack=1)
    for _ in range(REPEAT):
        acc = warpgroup_mma(left, b.permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    end = gl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l", [], dtype=gl.int64, is_pure=False, pack=1)
    gl.store(times, end - start)
    rows = gl.arange(0, 64, gl.SliceLayout(1, acc_layout))
    columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, acc_layout))
    gl.store(out + rows[:, None] * BLOCK_N + columns[None, :], acc)


@triton.jit
def _warp_kernel(times, a, out, REPEAT: tl.constexpr, BLOCK_N: tl.constexpr, DEPTH: tl.constexpr):
    rows, columns, depth = tl.arange(0, 16), tl.arange(0, BLOCK_N), tl.arange(0, DEPTH)
    left = tl.load(a + rows[:, None] * DEPTH + depth[None, :])
    right = tl.load(a + columns[None, :] * DEPTH + depth[:, None])
    acc = tl.dot(left, right)
    start = tl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l", [], tl.int64, False, 1)
    for _ in tl.range(0, REPEAT, num_stages=1):
        acc = tl.dot(left, right, acc)
    tl.store(out + rows[:, None] * BLOCK_N + columns[None, :], acc)
    end = tl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l", [], tl.int64, False, 1)
    tl.store(times, end - start)


@triton.jit
def _empty_kernel(out):
    tl.store(out + tl.program_id(0), 0.0)


def nothing(_: int) -> None:
    """A launch of as many programs as the GPU has multiprocessors."""
    _empty_kernel[(132,)](_out())


_kept: list[torch.Tensor] = []


def _out() -> torch.Tensor:
    if not _kept:
        _kept.append(torch.zeros(256 * 128, device="cuda"))
    return _kept[0]


def launch(times: torch.Tensor, a: torch.Tensor, out: torch.Tensor) -> dict[str, int]:
    """Run each instruction; ``times`` int64 takes the cycles of all its steps. Returns name -> its place there."""
    names: dict[str, int] = {}
    for n in (16, 32, 64, 128):
        for registers in (False, True):
            place = len(names)
            _warpgroup_kernel[(1,)](times[place:], out, REPEAT, n, DEPTH, registers, num_warps=4)
            names[f"wgmma m64n{n}k16, weight from {'registers' if registers else 'shared memory'}"] = place
    for n in (16, 32):
        place = len(names)
        _warp_kernel[(1,)](times[place:], a, out, REPEAT, n, DEPTH, num_warps=1)
        names[f"mma.sync m16n8k16, 16x{n} in one warp"] = place
    return names


def cycles() -> dict[str, float]:
    """Clock cycles per step of depth 16, by instruction."""
    times = torch.zeros(16, dtype=torch.int64, device="cuda")
    a = torch.zeros(64, DEPTH, dtype=torch.bfloat16, device="cuda")
    for _ in range(2):
        names = launch(times, a, _out())
    found = times.tolist()
    return {name: round(found[place] / (REPEAT * DEPTH // 16), 1) for name, place in names.items()}
