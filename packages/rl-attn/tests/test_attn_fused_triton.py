"""The GPU's kernel of norm, rotation and cache write without a GPU: its bits in Triton's interpreter."""

import os
import subprocess
import sys

import pytest

triton = pytest.importorskip("triton")

INTERPRETED = """
import torch
import triton
import triton.language as tl
from rl_attn import triton_rotary

torch.manual_seed(0)
EPS = 1e-6


@triton.jit
def halves_first(x, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    if WIDTH == 1:
        return x.reshape(ROWS)
    else:
        return halves_first(tl.sum(x.reshape(ROWS, 2, WIDTH // 2), 1), ROWS, WIDTH // 2)


def power(n):
    return 1 << (n - 1).bit_length()


def normed(x, weight):
    total = torch.nn.functional.pad(x * x, (0, power(x.shape[-1]) - x.shape[-1]))
    while total.shape[-1] > 1:
        total = total[..., ::2] + total[..., 1::2]
    scale = (total / x.shape[-1] + EPS).double().rsqrt().float()
    return x * scale * weight


def rotated(x, cos, sin):
    half = cos.shape[-1]
    a, b = x[..., :half], x[..., half : 2 * half]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]), -1)


def run(heads, kv_heads, D, half, tokens, block, kv_block):
    '''Whether queries, keys and values are those of the steps above; fp32, which the interpreter follows exactly.'''
    shapes = [(tokens, h, D) for h in (heads, kv_heads, kv_heads)]
    q, k, v = (torch.randn(shape) * 2.0 ** torch.randint(-6, 7, (*shape[:2], 1)) for shape in shapes)
    q_weight, k_weight = torch.randn(2, D)
    cos, sin = torch.randn(2, 50, half)
    positions, slots = torch.randint(0, 50, (tokens,)), torch.randperm(32)[:tokens]
    slots[0] = -1
    out, caches = torch.full_like(q, torch.nan), torch.full((2, 2, kv_heads, 16, D), torch.nan)
    strides = [x.stride()[:2] for x in (q, k, v, out)] + [x.stride()[:3] for x in caches]
    triton_rotary.norm_rotary_write_kernel[(tokens, -(-heads // block) + -(-kv_heads // kv_block))](
        q, k, v, out, q_weight, k_weight, *caches, positions, slots, cos, sin, EPS, 50, 32, heads, kv_heads,
        *(step for steps in strides for step in steps), PAGE=16, D=D, BLOCK_D=power(D), HALF=half,
        BLOCK_HALF=power(half), BLOCK_REST=power(max(1, D - 2 * half)), HEADS=block, KV_HEADS=kv_block, NORM=True,
    )
    angles = cos[positions][:, None], sin[positions][:, None]
    wanted = torch.full_like(caches, torch.nan)
    for at, key, value in zip(slots.tolist()[1:], rotated(normed(k, k_weight), *angles)[1:], v[1:]):
        wanted[0, at // 16, :, at % 16], wanted[1, at // 16, :, at % 16] = key, value
    ints = lambda x: x.view(torch.int32)
    return torch.equal(ints(out), ints(rotated(normed(q, q_weight), *angles))), torch.equal(ints(caches), ints(wanted))


CASES = (5, 2, 128, 64, 9, 4, 2), (3, 1, 96, 24, 5, 2, 1), (4, 2, 128, 48, 7, 4, 2), (2, 1, 64, 32, 24, 2, 1)
assert [run(*case) for case in CASES] == [(True, True)] * len(CASES)
triton_rotary.neighbour_tree = halves_first
found = [run(*case) for case in CASES]
assert found == [(False, False)] * len(CASES), found
print("interpreted")
"""


@pytest.mark.skipif(not triton.__version__.startswith("3.6."), reason="later interpreters refuse masks of scalars")
def test_bits_of_norm_rotation_and_write_and_a_tree_that_adds_halves_first_is_seen(tmp_path):
    """In a fresh process, since the interpreter is chosen when a kernel is defined."""
    script = tmp_path / "interpreted.py"
    script.write_text(INTERPRETED)
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "interpreted", done.stderr[-2000:]
