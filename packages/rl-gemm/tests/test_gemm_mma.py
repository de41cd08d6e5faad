"""The CPU model of the sm90 contract against what an H200 computed; no GPU is needed."""

from pathlib import Path

import numpy as np
import pytest
import torch

from rl_contract import ContractError
from rl_gemm import golden, mma

VECTORS = np.load(Path(__file__).parent / "data" / "golden_sm90.npz")
MODELS = {"qwen3-0.6b": (1024, 16, 3072), "qwen3-8b": (4096, 32, 12288), "qwen3-32b": (5120, 64, 25600)}
ODD = {"odd_n": (1000, 4096), "odd_k": (1024, 3000), "router": (128, 4096)}
ROWS, COLUMNS = 4, 16


def sample(n):
    return (torch.arange(COLUMNS) * n) // COLUMNS + torch.arange(COLUMNS) % max(1, n // COLUMNS)


def shape(name):
    """(N, K) of a captured layer."""
    model, _, rest = name.partition("/")
    if model in ODD:
        return ODD[model]
    hidden, heads, ffn = MODELS[model]
    tp, layer = int(rest.split("/")[0][2:]), rest.split("/")[1]
    return {
        "qkv": ((heads + 16) * 128 // tp, hidden),
        "o": (hidden, heads * 128 // tp),
        "gate_up": (2 * ffn // tp, hidden),
        "down": (hidden, ffn // tp),
        "lm_head": (151936 // tp, hidden),
    }[layer]


LAYERS = [n for n in VECTORS.files if not n.startswith(("special_", "grad_"))]
SPECIAL = [n[8:-2] for n in VECTORS.files if n.startswith("special_") and n.endswith("_y")]


def layer_inputs(name):
    n, k = shape(name)
    kind = name.rsplit("/", 1)[1]
    return golden.matrix(torch.arange(ROWS), k, kind, 1), golden.matrix(sample(n), k, kind, 2)


def equal(a, b):
    return torch.equal(a.view(torch.int32), torch.from_numpy(b.copy()).view(torch.int32))


def test_every_layer_shape_is_there():
    assert len(LAYERS) >= 2 * (3 * 2 * 7 + 3)
    assert len(SPECIAL) >= 8


@pytest.mark.parametrize("name", LAYERS)
def test_golden_layer(name):
    leaves = int(name.split("/")[-2].removeprefix("tree"))
    x, weight = layer_inputs(name)
    assert equal(mma.tree(x, weight, leaves), VECTORS[name])


@pytest.mark.parametrize("name", SPECIAL)
def test_golden_denormal_overflow_and_nonfinite(name):
    x, w = (torch.from_numpy(VECTORS[f"special_{name}_{side}"].copy()).view(torch.bfloat16) for side in "xw")
    assert equal(mma.tree(x, w), VECTORS[f"special_{name}_y"])


@pytest.mark.parametrize("kind", golden.KINDS)
def test_golden_gradients(kind):
    n, k, tokens = 6144, 1024, 1000
    columns = sample(k)
    dy = golden.matrix(torch.arange(ROWS), n, kind, 3)
    weight = golden.matrix(torch.arange(n), columns, kind, 5)
    for leaves, fused in ((1, 1), (8, 1), (8, 2)):
        assert equal(mma.tree(dy, weight.t(), leaves, fused), VECTORS[f"grad_input/tree{leaves}/fused{fused}/{kind}"])
    dy = golden.matrix(torch.arange(tokens), sample(n), kind, 3)
    x = golden.matrix(torch.arange(tokens), columns, kind, 4)
    assert equal(mma.tree(dy.t(), x.t()), VECTORS[f"grad_weight/{kind}"])


def test_a_tampered_vector_fails():
    name = LAYERS[0]
    tampered = VECTORS[name].copy()
    tampered.view(np.int32)[1, 3] ^= 1
    assert not equal(mma.tree(*layer_inputs(name)), tampered)


def test_another_order_of_k_fails():
    wrong = 0
    for name in LAYERS[:20]:
        x, weight = layer_inputs(name)
        wrong += equal(mma.tree(x.flip(1), weight.flip(1)), VECTORS[name])
        if "tree8" in name:
            wrong += equal(mma.tree(x, weight, 4), VECTORS[name])
    assert wrong == 0


def test_within_one_step_of_sixteen_the_order_is_free():
    x, weight = golden.matrix(torch.arange(8), 512, "spread", 1), golden.matrix(torch.arange(32), 512, "spread", 2)
    order = torch.arange(512).view(-1, 16)[:, torch.randperm(16)].flatten()
    assert torch.equal(mma.tree(x, weight), mma.tree(x[:, order], weight[:, order]))
    shifted = torch.arange(512).roll(8)
    assert not torch.equal(mma.tree(x, weight), mma.tree(x[:, shifted], weight[:, shifted]))


def test_accuracy_against_fp64():
    x, weight = torch.randn(32, 2048).bfloat16(), torch.randn(64, 2048).bfloat16()
    exact = x.double() @ weight.double().t()
    assert (mma.tree(x, weight).double() - exact).norm() / exact.norm() < 1e-5


def test_bad_input_is_refused():
    x = torch.zeros(2, 48).bfloat16()
    with pytest.raises(ContractError, match="bfloat16"):
        mma.tree(x.float(), x.float())
    with pytest.raises(ContractError, match="divisible"):
        mma.tree(x, x, 2)
    for leaves in (0, -1, 3, 1.0, True, None):
        with pytest.raises(ContractError, match=f"leaves={leaves!r}; supported: a power of two"):
            mma.tree(x, x, leaves)
    with pytest.raises(ContractError, match="fused=0; supported"):
        mma.tree(x, x, 1, 0)
