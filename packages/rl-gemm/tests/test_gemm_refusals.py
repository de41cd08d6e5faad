"""Bad input is refused with what was given, what is supported and what to do; and the ops as torch sees them."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

import rl_gemm
from rl_contract import ContractError, MissingSupport, Settings, SingleRank
from rl_gemm import contract, ops

SETTINGS = Settings(hidden_size=64, vocab_size=100, norm_eps=1e-6, rope={"theta": 1e4, "rotary_dim": 16}, leaves=4)


class FakeRank:
    rank, world_size = 0, 4


def half(*shape):
    return torch.zeros(shape, dtype=torch.float16)


X, W = torch.zeros(3, 24), torch.zeros(8, 24)

BAD = {
    "K differs": (lambda: rl_gemm.linear(X, torch.zeros(8, 23)), "one K"),
    "sparse x": (lambda: rl_gemm.linear(X.to_sparse(), W), r"x as torch\.sparse_coo.*x\.to_dense"),
    "sparse weight": (lambda: rl_gemm.linear(X, W.to_sparse()), r"weight as torch\.sparse_coo"),
    "sparse gate_up": (lambda: rl_gemm.swiglu(X.to_sparse()), r"gate_up as torch\.sparse_coo"),
    "scalar": (lambda: rl_gemm.linear(torch.tensor(1.0), W), "one K"),
    "weight 1-D": (lambda: rl_gemm.linear(X, W[0]), "weight .N, K."),
    "K of 0": (lambda: rl_gemm.linear(torch.zeros(3, 0), torch.zeros(8, 0)), "K > 0"),
    "fp16": (lambda: rl_gemm.linear(half(3, 24), half(8, 24)), "float16"),
    "fp64": (lambda: rl_gemm.linear(X.double(), W.double()), "float64"),
    "integers": (lambda: rl_gemm.linear(X.int(), W.int()), "int32"),
    "mixed types": (lambda: rl_gemm.linear(X.to(torch.bfloat16), W), "one type"),
    "fp16 output": (
        lambda: rl_gemm.linear(X, W, out_dtype=torch.float16),
        r"out_dtype=torch\.float16, supported: torch\.float32, torch\.bfloat16; take torch\.float32 and convert",
    ),
    **{
        f"output {type(given).__name__} {given}": (
            lambda call=call, given=given: call(X, W, out_dtype=given),
            rf"linear got out_dtype={re.escape(repr(given))} \(a {type(given).__name__}\), supported: "
            rf"torch\.float32, torch\.bfloat16; pass {todo}",
        )
        for call in (rl_gemm.linear, rl_gemm.column_parallel_linear, rl_gemm.row_parallel_linear)
        for given, todo in (
            *((x, r"torch\.float32") for x in ("float32", "torch.float32", np.float32, np.dtype("float32"))),
            *((x, "one of these, or None") for x in ("", 0, float, "fp32", np.zeros(2))),
        )
    },
    "bias shape": (lambda: rl_gemm.linear(X, W, torch.zeros(7)), "needs \\[8\\]"),
    "bias of one": (lambda: rl_gemm.linear(X, W, torch.zeros(1)), "needs \\[8\\]"),
    "bias type": (lambda: rl_gemm.linear(X, W, half(8)), "bias"),
    "fp32 bias with bf16 x": (lambda: rl_gemm.linear(X.bfloat16(), W.bfloat16(), torch.zeros(8)), "bias torch.float32"),
    "bf16 bias with fp32 x": (lambda: rl_gemm.linear(X, W, torch.zeros(8).bfloat16()), "bias torch.bfloat16"),
    "bias of one over ranks": (
        lambda: rl_gemm.row_parallel_linear(X, W, torch.zeros(1), comm=FakeRank(), leaves=4),
        "needs \\[8\\]",
    ),
    "scalar in row": (lambda: rl_gemm.row_parallel_linear(torch.tensor(1.0), W), "one K"),
    "scalar weight in row": (lambda: rl_gemm.row_parallel_linear(X, torch.tensor(1.0)), "weight .N, K."),
    "scalar weight": (lambda: rl_gemm.linear(X, torch.tensor(1.0)), "weight .N, K."),
    "leaves 2.0": (lambda: rl_gemm.linear(X, W, leaves=2.0), "leaves=2.0"),
    "leaves 1.0": (lambda: rl_gemm.linear(X, W, leaves=1.0), "leaves=1.0"),
    "column leaves 2.0": (lambda: rl_gemm.column_parallel_linear(X, W, leaves=2.0), "leaves=2.0"),
    "fused 2.0": (lambda: rl_gemm.column_parallel_linear(X, W, fused=2.0), "fused=2.0"),
    "leaves 16 for K 24": (lambda: rl_gemm.linear(X, W, leaves=16), "divisible"),
    "leaves 3": (lambda: rl_gemm.linear(X, W, leaves=3), "powers of two"),
    "leaves 0": (lambda: rl_gemm.row_parallel_linear(X, W, leaves=0), "powers of two"),
    "leaves below ranks": (lambda: rl_gemm.row_parallel_linear(X, W, comm=FakeRank(), leaves=2), "multiple of the TP"),
    "N not in leaves": (lambda: rl_gemm.column_parallel_linear(X, torch.zeros(6, 24), leaves=4), "divisible"),
    "N not in fused leaves": (lambda: rl_gemm.column_parallel_linear(X, W, leaves=8, fused=2), "2 sections"),
    "fused true": (lambda: rl_gemm.column_parallel_linear(X, W, fused=True), "fused=True"),
    "x of numpy": (lambda: rl_gemm.linear(X.numpy(), W), "x as ndarray"),
    "no weight": (lambda: rl_gemm.row_parallel_linear(X, None), "weight as NoneType"),
    "bias of numbers": (lambda: rl_gemm.linear(X, W, [0.0] * 8), "bias as list"),
    "swiglu of numpy": (lambda: rl_gemm.swiglu(X.numpy()), "gate_up as ndarray"),
    "gate_up of numpy": (lambda: rl_gemm.gate_up_swiglu(X.numpy(), W), "x as ndarray"),
    "fused 3": (lambda: rl_gemm.column_parallel_linear(X, W, fused=3), "fused=3"),
    "grad_input shape": (lambda: ops.grad_input(torch.zeros(3, 7), W), "one N"),
    "grad_weight shape": (lambda: ops.grad_weight(torch.zeros(3, 8), torch.zeros(4, 24)), "one T"),
    "column tokens": (lambda: rl_gemm.column_parallel_linear(X, W, tokens="x"), "tokens='x'; supported: None, or Tok"),
    "row tokens": (lambda: rl_gemm.row_parallel_linear(X, W, tokens=5), "tokens=5; supported"),
    "gate_up tokens": (lambda: rl_gemm.gate_up_swiglu(X, W, tokens=0), "tokens=0; supported"),
    "column comm": (lambda: rl_gemm.column_parallel_linear(X, W, comm="x"), "comm='x'; supported: None"),
    "row comm": (lambda: rl_gemm.row_parallel_linear(X, W, comm=2), "comm=2; supported"),
    "gate_up comm": (lambda: rl_gemm.gate_up_swiglu(X, W, comm=[0]), r"comm=\[0\]; supported"),
    "gate_up odd": (lambda: rl_gemm.gate_up_swiglu(X, torch.zeros(7, 24)), "2 sections"),
    "gate_up none": (lambda: rl_gemm.gate_up_swiglu(X, torch.zeros(0, 24)), "F > 0"),
    "gate_up K": (lambda: rl_gemm.gate_up_swiglu(X, torch.zeros(8, 23)), "one K"),
    "gate_up fp16": (lambda: rl_gemm.gate_up_swiglu(half(3, 24), half(8, 24)), "float16"),
    "gate_up leaves": (lambda: rl_gemm.gate_up_swiglu(X, W, comm=FakeRank(), leaves=2), "multiple of the TP"),
    "swiglu odd": (lambda: rl_gemm.swiglu(torch.zeros(3, 5)), "2F"),
    "swiglu none": (lambda: rl_gemm.swiglu(torch.zeros(3, 0)), "F > 0"),
    "swiglu fp16": (lambda: rl_gemm.swiglu(half(3, 4)), "float16"),
    "swiglu dy": (lambda: ops.swiglu_backward(torch.zeros(3, 3), torch.zeros(3, 4)), "dy"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused(name):
    call, words = BAD[name]
    with pytest.raises(ContractError, match=words):
        call()


def test_another_device_is_named():
    with pytest.raises(MissingSupport, match="meta"):
        ops.check_device(X, W.to("meta"))


@pytest.mark.parametrize("make", [contract.column, contract.row, contract.swiglu])
def test_contract_follows_the_settings(make):
    one = make(SETTINGS)
    assert one.precision["accumulator"] == "float32"
    assert one.fingerprint == make(replace(SETTINGS)).fingerprint
    assert make(replace(SETTINGS, dtype="float32")).fingerprint != one.fingerprint
    with pytest.raises(ContractError, match="float16"):
        make(replace(SETTINGS, dtype="float16"))


def test_contract_of_row_names_the_leaves():
    assert contract.row(SETTINGS).fingerprint != contract.row(replace(SETTINGS, leaves=8)).fingerprint
    assert contract.column(SETTINGS).fingerprint != contract.column(replace(SETTINGS, leaves=8)).fingerprint
    assert contract.swiglu(SETTINGS).fingerprint == contract.swiglu(replace(SETTINGS, leaves=8)).fingerprint


def test_ops_keep_the_rules_of_custom_ops():
    x, w, b = torch.randn(5, 32), torch.randn(16, 32), torch.randn(16)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.matmul_tree.overload, (x, w, 2), test_utils=checks)
    torch.library.opcheck(ops.matmul.overload, (x, w, b, 1, torch.bfloat16), test_utils=checks)
    torch.library.opcheck(ops.grad_input.overload, (torch.randn(5, 16), w, 2, 2), test_utils=checks)
    torch.library.opcheck(ops.grad_weight.overload, (torch.randn(5, 16), x), test_utils=checks)
    torch.library.opcheck(ops.gate_up_swiglu.overload, (x, w), test_utils=checks)
    torch.library.opcheck(ops.swiglu.overload, (x,), test_utils=checks)
    torch.library.opcheck(ops.swiglu_backward.overload, (torch.randn(5, 16), x), test_utils=checks)


@pytest.mark.field_report("R54")
def test_graph_traced_equals_eager():
    w = torch.randn(32, 64).to(torch.bfloat16)

    def block(x):
        return rl_gemm.swiglu(rl_gemm.linear(x, w, leaves=4))

    traced = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=True)
    for m in (1, 3, 70):
        x = torch.randn(m, 64).to(torch.bfloat16)
        assert torch.equal(traced(x), block(x))


def test_gradient_of_a_matrix_times_itself_is_whole_when_compiled():
    g = torch.Generator().manual_seed(3)
    x, grad = torch.randn(64, 64, generator=g).bfloat16(), torch.randn(64, 64, generator=g).bfloat16()
    found = []
    for compiled in (False, True):
        leaf = x.clone().requires_grad_()
        call = lambda a: rl_gemm.linear(a, a)  # noqa: E731
        (torch.compile(call, fullgraph=True, backend="eager") if compiled else call)(leaf).backward(grad)
        found.append(leaf.grad)
    assert torch.equal(*found)


def test_main_grad_of_a_matrix_times_itself_is_found_when_compiled():
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    found = []
    for compiled in (False, True):
        leaf = torch.nn.Parameter(x.clone())
        leaf.main_grad = torch.zeros(64, 64)
        call = lambda a: rl_gemm.linear(a, a)  # noqa: E731
        (torch.compile(call, backend="eager") if compiled else call)(leaf).sum().backward()
        found.append(leaf.main_grad)
    assert torch.equal(*found)
    assert found[0].abs().max() > 0


def test_a_refusal_keeps_its_words_and_type_where_a_compiler_looks_on():
    x, weight = torch.ones(4, 64).bfloat16(), torch.ones(8, 32).bfloat16()
    for call in (rl_gemm.column_parallel_linear, rl_gemm.row_parallel_linear):
        torch._dynamo.reset()
        with pytest.raises(ContractError, match=r"weight \(8, 32\); needs x"):
            torch.compile(call, backend="eager")(x, weight)


@pytest.mark.parametrize("early_stop", [True, False])
def test_activation_checkpointing_is_no_refusal(early_stop):
    from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

    class Peers(SingleRank):
        said = ()

        def refuse(self, problem, *, device=""):
            self.said = (*self.said, problem)

    comm, grads = Peers(), []
    g = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(size, generator=g).bfloat16() for size in ((4, 64), (64, 64)))

    def block(a):
        return rl_gemm.column_parallel_linear(rl_gemm.row_parallel_linear(a, weight, comm=comm), weight, comm=comm)

    for call in (block, lambda a: checkpoint(block, a, use_reentrant=False)):
        leaf = x.clone().requires_grad_()
        with set_checkpoint_early_stop(early_stop):
            call(leaf).sum().backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads)
    assert comm.said == ()
    with pytest.raises(ContractError):
        rl_gemm.row_parallel_linear(x, weight[:, :32], comm=comm)
    assert len(comm.said) == 1
