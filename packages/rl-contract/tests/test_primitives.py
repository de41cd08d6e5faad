"""Primitives against fp64 references, and vector loops against scalar calls."""

import math

import numba as nb
import numpy as np
import pytest
import torch

from rl_contract import primitives as prim


@nb.njit
def _map_exp2(x, y):
    for i in range(x.size):
        y[i] = prim.exp2_f32(x[i])


@nb.njit
def _map_exp(x, y):
    for i in range(x.size):
        y[i] = prim.exp_f32(x[i])


@nb.njit
def _map_log(x, y):
    for i in range(x.size):
        y[i] = prim.log_f32(x[i])


@nb.njit
def _map_rsqrt(x, y):
    for i in range(x.size):
        y[i] = prim.rsqrt_f32(x[i])


@nb.njit
def _round_trip(x, y):
    for i in range(x.size):
        y[i] = prim.f32_to_bf16(x[i])


def _run(kernel, x):
    y = np.full(x.shape, np.nan, np.float32)
    kernel(x, y)
    return y


CASES = [
    (_map_exp2, np.exp2, (-149.0, 127.9)),
    (_map_exp, np.exp, (-103.0, 88.0)),
    (_map_log, np.log, (1e-38, 3e38)),
    (_map_rsqrt, lambda x: 1 / np.sqrt(x), (1e-38, 3e38)),
]


@pytest.mark.parametrize(("kernel", "oracle", "span"), CASES, ids=["exp2", "exp", "log", "rsqrt"])
def test_accuracy_half_ulp_of_fp64(kernel, oracle, span):
    rng = np.random.default_rng(0)
    if span[0] > 0:
        x = np.exp(rng.uniform(math.log(span[0]), math.log(span[1]), 1_000_000)).astype(np.float32)
    else:
        x = rng.uniform(*span, 1_000_000).astype(np.float32)
    y, exact = _run(kernel, x), oracle(x.astype(np.float64))
    ulp = np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)
    assert np.max(np.abs(y - exact) / ulp) < 0.50001


@pytest.mark.parametrize(("kernel", "oracle", "span"), CASES, ids=["exp2", "exp", "log", "rsqrt"])
def test_batch_vector_loop_equals_single_call(kernel, oracle, span):
    rng = np.random.default_rng(1)
    x = rng.uniform(max(span[0], -100.0), min(span[1], 80.0), 1021).astype(np.float32)
    whole = _run(kernel, x)
    single = np.concatenate([_run(kernel, x[i : i + 1]) for i in range(x.size)])
    assert np.array_equal(whole.view(np.int32), single.view(np.int32))


def test_special_values():
    x = np.array([-np.inf, -200.0, 0.0, -0.0, 128.0, np.inf, np.nan], np.float32)
    y = _run(_map_exp2, x)
    assert y[:6].tolist() == [0.0, 0.0, 1.0, 1.0, np.inf, np.inf]
    assert np.isnan(y[6])
    z = _run(_map_log, np.array([0.0, 1.0, np.inf, -1.0, np.nan, 1e-45], np.float32))
    assert z[:3].tolist() == [-np.inf, 0.0, np.inf]
    assert np.isnan(z[3:5]).all()
    assert z[5] == np.float32(np.log(np.float64(np.float32(1e-45))))


def test_bf16_rounding_equals_torch():
    rng = np.random.default_rng(2)
    u = rng.integers(0, 2**32, 2_000_000, dtype=np.uint64).astype(np.uint32)
    x = u.view(np.float32)
    mine = np.empty(x.shape, np.uint16)
    _round_trip(x, mine)
    theirs = torch.from_numpy(x.copy()).to(torch.bfloat16)
    back = torch.from_numpy(mine.view(np.int16)).view(torch.bfloat16)
    nan = torch.isnan(theirs)
    assert torch.equal(torch.isnan(back), nan)
    assert torch.equal(back[~nan].view(torch.int16), theirs[~nan].view(torch.int16))
