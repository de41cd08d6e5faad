"""Bad input is refused with what was given, what is supported and what to do; and the ops as torch sees them."""

from dataclasses import replace

import pytest
import torch

from rl_contract import ContractError, Settings
from rl_norm import contract, ops, rms_norm

SETTINGS = Settings(hidden_size=64, vocab_size=100, norm_eps=1e-6, rope={"theta": 1e4, "rotary_dim": 16}, leaves=4)
X, W = torch.ones(3, 8), torch.ones(8)


class FakeRank:
    rank, world_size = 0, 4


BAD = {
    "weight shape": (lambda: rms_norm(X, torch.ones(7), 1e-6), "needs \\[8\\]"),
    "weight of one": (lambda: rms_norm(X, torch.ones(1), 1e-6), "needs \\[8\\]"),
    "weight 2-D": (lambda: rms_norm(X, torch.ones(1, 8), 1e-6), "needs \\[8\\]"),
    "fp32 weight for bf16": (lambda: rms_norm(X.to(torch.bfloat16), W, 1e-6), "one type"),
    "fp16": (lambda: rms_norm(X.half(), W.half(), 1e-6), "float16"),
    "fp64": (lambda: rms_norm(X.double(), W.double(), 1e-6), "float64"),
    "eps 0": (lambda: rms_norm(X, W, 0.0), "positive"),
    "eps below 0": (lambda: rms_norm(X, W, -1e-6), "positive"),
    "eps nan": (lambda: rms_norm(X, W, float("nan")), "positive"),
    "eps inf": (lambda: rms_norm(X, W, float("inf")), "positive"),
    "eps that fp32 cannot hold": (lambda: rms_norm(X, W, 1e-60), "positive"),
    "eps of text": (lambda: rms_norm(X, W, "1e-6"), "eps='1e-6'"),
    "eps none": (lambda: rms_norm(X, W, None), "eps=None"),
    "eps true": (lambda: rms_norm(X, W, True), "eps=True"),
    "no weight": (lambda: rms_norm(X, None, 1e-6), "weight as NoneType"),
    "x of numpy": (lambda: rms_norm(X.numpy(), W, 1e-6), "x as ndarray"),
    "sparse x": (lambda: rms_norm(X.to_sparse(), W, 1e-6), r"x as torch\.sparse_coo.*x\.to_dense"),
    "residual of numbers": (lambda: rms_norm(X, W, 1e-6, residual=[0.0]), "residual as list"),
    "eps 1e39": (lambda: rms_norm(X, W, 1e39), "positive"),
    "scalar weight": (lambda: rms_norm(X, torch.tensor(1.0), 1e-6), "needs \\[8\\]"),
    "leaves 2.0": (lambda: rms_norm(torch.ones(2, 4, 8), W, 1e-6, leaves=2.0), "leaves=2.0"),
    "leaves 1.0": (lambda: rms_norm(torch.ones(2, 4, 8), W, 1e-6, leaves=1.0), "leaves=1.0"),
    "residual shape": (lambda: rms_norm(X, W, 1e-6, residual=X[:2]), "one shape"),
    "residual type": (lambda: rms_norm(X, W, 1e-6, residual=X.to(torch.bfloat16)), "shape and type"),
    "tokens of text": (lambda: rms_norm(X, W, 1e-6, tokens="x"), "tokens='x'; supported: None, or TokenShards"),
    "tokens 5": (lambda: rms_norm(X, W, 1e-6, tokens=5), "tokens=5; supported"),
    "comm of text": (lambda: rms_norm(torch.ones(2, 4, 8), W, 1e-6, comm="x"), "comm='x'; supported: None"),
    "comm 2": (lambda: rms_norm(torch.ones(2, 4, 8), W, 1e-6, comm=2), "comm=2; supported"),
    "scalar": (lambda: rms_norm(torch.tensor(1.0), W, 1e-6), "H > 0"),
    "no hidden": (lambda: rms_norm(torch.ones(3, 0), torch.ones(0), 1e-6), "H > 0"),
    "leaves without heads": (lambda: rms_norm(X, W, 1e-6, leaves=2), "heads"),
    "leaves 3": (lambda: rms_norm(torch.ones(2, 4, 8), W, 1e-6, leaves=3), "power of two"),
    "leaves below ranks": (lambda: rms_norm(torch.ones(2, 4, 8), W, 1e-6, leaves=2, comm=FakeRank()), "leaves=2"),
}


@pytest.mark.field_report("R22")
@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused(name):
    call, words = BAD[name]
    with pytest.raises(ContractError, match=words):
        call()


def test_contract_follows_the_settings():
    one = contract.norm(SETTINGS)
    assert contract.norm(replace(SETTINGS, norm_eps=1e-5)).fingerprint != one.fingerprint
    assert "norm_eps" not in one.dependency
    assert contract.norm(replace(SETTINGS, dtype="float32")).fingerprint != one.fingerprint
    with pytest.raises(ContractError, match="float16"):
        contract.norm(replace(SETTINGS, dtype="float16"))


def test_ops_keep_the_rules_of_custom_ops():
    x, w = torch.randn(5, 32), torch.randn(32)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.rms_norm.overload, (x, w, 1e-6), test_utils=checks)
    torch.library.opcheck(ops.add_rms_norm.overload, (x, x + 1, w, 1e-6), test_utils=checks)
    torch.library.opcheck(ops.grad_input.overload, (x, x, w, torch.rand(5), x), test_utils=checks)
    torch.library.opcheck(ops.grad_weight.overload, (x, x, torch.rand(5)), test_utils=checks)


@pytest.mark.field_report("R54")
def test_graph_traced_equals_eager():
    w = torch.randn(64)
    traced = torch.compile(
        lambda x: rms_norm(x, w, 1e-6, residual=x), fullgraph=True, backend="aot_eager", dynamic=True
    )
    for m in (1, 3, 70):
        x = torch.randn(m, 64)
        for a, b in zip(traced(x), rms_norm(x, w, 1e-6, residual=x)):
            assert torch.equal(a, b)


def test_gradient_of_a_tensor_given_twice_is_whole_when_compiled():
    g = torch.Generator().manual_seed(3)
    x, w, grad = torch.randn(7, 64, generator=g), torch.randn(64, generator=g), torch.randn(7, 64, generator=g)
    found = []
    for compiled in (False, True):
        leaf = x.clone().requires_grad_()
        call = lambda a: rms_norm(a, w, 1e-6, residual=a)[0]  # noqa: E731
        (torch.compile(call, fullgraph=True, backend="eager") if compiled else call)(leaf).backward(grad)
        found.append(leaf.grad)
    assert torch.equal(*found)
    # one half of it is what a compiler that takes both for one would give
    assert found[0].abs().max() > 0.1
