"""Nested and uninitialized tensors, and those whose memory was given back, in place of any tensor of any package.

A kernel of the host that read such memory would end the process.
"""

import os

import pytest
import torch

import rl_attn
import rl_gemm
import rl_logprob
import rl_norm
import vime_sync
from rl_contract import ContractError, compare
from rl_contract.communicator import SingleRank
from rl_logprob.draw import draw_scored

VOCAB, EPS = 600, 1e-6


def given_back(x, *, whole=True):
    """What FSDP leaves between steps: of a tensor, or of a view into a flat parameter."""
    x = x.clone() if whole else torch.stack([x, x])[1]
    x.untyped_storage().resize_(0)
    return x


KINDS = {
    "given back": (given_back, "memory was given back"),
    "parameter given back": (
        lambda x: torch.nn.Parameter(given_back(x), requires_grad=x.is_floating_point()),
        "memory was given back",
    ),
    "a view of what was given back": (lambda x: given_back(x, whole=False), "memory was given back"),
    "nested": (lambda x: torch.nested.nested_tensor([x, x]), "nested"),
    "jagged": (lambda x: torch.nested.nested_tensor([x, x], layout=torch.jagged), "nested"),
    "uninitialized parameter": (
        lambda x: torch.nn.UninitializedParameter(dtype=x.dtype, requires_grad=False),
        "UninitializedParameter",
    ),
    "uninitialized buffer": (lambda x: torch.nn.UninitializedBuffer(dtype=x.dtype), "UninitializedBuffer"),
}

X, W, ROWS = torch.randn(4, 16), torch.randn(8, 16), torch.arange(3)
LOGITS, ONES = torch.randn(3, VOCAB), torch.ones(3)
Q, K = torch.randn(4, 2, 16), torch.randn(4, 1, 16)
CU, PAGES = torch.tensor([0, 4], dtype=torch.int32), torch.randn(4, 1, 16, 16)
POSITIONS, TABLE = torch.arange(4), rl_attn.rope_table(64, 16, 1e4)
STEP = {
    "query_start_loc": CU,
    "seq_lens": torch.tensor([4], dtype=torch.int32),
    "block_table": torch.zeros(1, 1, dtype=torch.int32),
}


def cache(k, v):
    """As one that was right when it was made."""
    held = rl_attn.PagedKV(PAGES.clone(), PAGES.clone())
    object.__setattr__(held, "k", k)
    object.__setattr__(held, "v", v)
    return held


def on_pages(q, k, v, out, **step):
    return rl_attn.attention_paged(q, cache(k, v), scale=0.25, out=out, **step)


def normed(q, k, v, positions, slots, q_weight, k_weight, k_pages, v_pages):
    weights = {"q_weight": q_weight, "k_weight": k_weight}
    return rl_attn.norm_rotary_write(q, k, v, positions, TABLE, cache(k_pages, v_pages), slots, **weights, eps=EPS)


def key_of(threshold, last_id, temperature):
    return rl_logprob.SupportKey(threshold, last_id, temperature)


def supported(logits, temperature, k, p, least):
    return rl_logprob.sampling_support(logits, vocab_size=VOCAB, temperature=temperature, top_k=k, top_p=p, min_p=least)


CALLS = {
    "compare": (compare, {"a": X, "b": X, "mask": X > 0}),
    "linear": (rl_gemm.linear, {"x": X, "weight": W, "bias": W[:, 0]}),
    "column": (rl_gemm.column_parallel_linear, {"x": X, "weight": W, "bias": W[:, 0]}),
    "row": (rl_gemm.row_parallel_linear, {"x": X, "weight": W, "bias": W[:, 0]}),
    "swiglu": (rl_gemm.swiglu, {"gate_up": X}),
    "gate_up_swiglu": (rl_gemm.gate_up_swiglu, {"x": X, "weight": W}),
    "rms_norm": (lambda residual, **g: rl_norm.rms_norm(**g, eps=EPS, residual=residual),
                 {"x": X, "weight": W[0], "residual": X}),
    "rotary": (lambda **g: rl_attn.rotary(**g, table=TABLE), {"q": Q, "k": K, "positions": POSITIONS}),
    "RopeTable": (rl_attn.RopeTable, {"cos": X, "sin": X}),
    "packed": (lambda **g: rl_attn.attention_packed(**g, scale=0.25),
               {"q": Q, "k": K, "v": K, "cu_seqlens_q": CU, "cu_seqlens_k": CU, "positions": POSITIONS}),
    "PagedKV": (rl_attn.PagedKV, {"k": PAGES, "v": PAGES.clone()}),
    "paged": (on_pages, {"q": Q, "k": PAGES, "v": PAGES, "out": torch.empty_like(Q), **STEP}),
    "check_paged": (lambda **step: rl_attn.check_paged(cache(PAGES, PAGES), **step), STEP),
    "write_paged": (lambda k, v, slots, k_pages, v_pages: rl_attn.write_paged(cache(k_pages, v_pages), k, v, slots),
                    {"k": K, "v": K, "slots": POSITIONS, "k_pages": PAGES, "v_pages": PAGES}),
    "norm_rotary_write": (normed, {"q": Q, "k": K, "v": K, "positions": POSITIONS, "slots": POSITIONS,
                                   "q_weight": W[0], "k_weight": W[0], "k_pages": PAGES, "v_pages": PAGES}),
    "cp_rows": (lambda c: rl_attn.cp_rows(c, 0, 2), {"c": CU}),
    "cp_split": (lambda x, c: rl_attn.cp_split(x, c, 0, 2), {"x": X, "c": CU}),
    "cp_merge": (lambda a, b, c: rl_attn.cp_merge([a, b], c), {"a": X[:2], "b": X[:2], "c": CU}),
    "context parallel": (lambda **g: rl_attn.context_parallel_attention(**g, scale=0.25, comm=SingleRank()),
                         {"q": Q, "k": K, "v": K, "cu_seqlens": CU}),
    "selected_logprob": (lambda **g: rl_logprob.selected_logprob(**g, vocab_size=VOCAB),
                         {"logits": LOGITS, "targets": ROWS, "temperature": ONES}),
    "full_logprob": (lambda **g: rl_logprob.full_logprob(**g, vocab_size=VOCAB),
                     {"logits": LOGITS, "temperature": ONES}),
    "entropy": (lambda **g: rl_logprob.entropy(**g, vocab_size=VOCAB), {"logits": LOGITS, "temperature": ONES}),
    "gumbel_sample": (lambda **g: rl_logprob.gumbel_sample(**g, vocab_size=VOCAB),
                      {"logits": LOGITS, "seeds": ROWS, "positions": ROWS, "temperature": ONES}),
    "greedy_sample": (lambda **g: rl_logprob.greedy_sample(**g, vocab_size=VOCAB), {"logits": LOGITS}),
    "linear_logprob": (lambda **g: rl_logprob.linear_logprob(**g, vocab_size=VOCAB),
                       {"hidden": X[:3], "weight": torch.randn(1024, 16), "targets": ROWS, "temperature": ONES}),
    "sampling_support": (supported, {"logits": LOGITS, "temperature": ONES, "k": ROWS, "p": ONES, "least": ONES}),
    "SupportKey": (key_of, {"threshold": ONES, "last_id": ROWS, "temperature": ONES}),
    "SupportIds": (rl_logprob.SupportIds, {"ids": ROWS.int(), "starts": torch.arange(4)}),
    "draw_scored": (lambda **g: draw_scored(**g, vocab_size=VOCAB),
                    {"logits": LOGITS, "seeds": ROWS, "positions": ROWS + 1, "temperature": ONES,
                     "kinds": torch.zeros(3, dtype=torch.int64), "bad": torch.zeros(1, dtype=torch.int64),
                     "out": torch.zeros(3, 3, dtype=torch.int64)}),
    "rollout_metrics": (lambda rollout, train, mask, **g: rl_logprob.rollout_metrics(rollout, train, mask, **g),
                        {"rollout": -ONES, "train": -ONES, "mask": ONES > 0, "sample_ids": ROWS,
                         "rollout_tokens": ROWS, "train_tokens": ROWS}),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", CALLS)
def test_every_tensor_of_every_operator_is_refused_by_name(call, kind):
    function, given = CALLS[call]
    make, words = KINDS[kind]
    function(**given)
    for name, x in given.items():
        with pytest.raises(ContractError, match=rf"{words}.*supported"):
            function(**{**given, name: make(x)})


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_freed_before_a_backward_is_refused_there(kind):
    make, _ = KINDS[kind]
    weight = W.clone().requires_grad_()
    weight.main_grad = make(torch.zeros_like(W))
    with pytest.raises(ContractError, match=r"main_grad is .*supported: torch\.float32"):
        rl_gemm.linear(X, weight).sum().backward()
    weight = W.clone().requires_grad_()
    y = rl_gemm.linear(X.clone().requires_grad_(), weight)
    weight.untyped_storage().resize_(0)
    with pytest.raises(ContractError, match=r"rl_gemm::grad_input got weight as .* given back; supported"):
        y.sum().backward()


def test_a_compiled_call_refuses_what_was_freed_since():
    def call(x, w):
        return rl_norm.rms_norm(rl_gemm.linear(x, w), w[:, 0], EPS)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert compare(compiled(X, W), call(X, W)).bitwise_equal
    with pytest.raises(ContractError, match=r"rl_gemm::matmul got weight as .* given back"):
        compiled(X, given_back(W))


def written(folder, tensors, manifest):
    version = vime_sync.PolicyVersion("run", 0, manifest.digest)
    vime_sync.write_weights(folder / "v", tensors, version, manifest)


def lent(folder, tensors, manifest):
    with vime_sync.Loan("cpu", folder=folder) as loan:
        loan.fill(tensors)


def lent_again(folder, tensors, manifest):
    with vime_sync.Loan("cpu", folder=folder) as loan:
        good = {"a": X, "b": W.t()}
        assert loan.fill(good) == manifest
        try:
            loan.fill(tensors)
        finally:
            # nothing was written: the engines' version stands
            assert loan.manifest == manifest
            assert all(torch.equal(loan[name], x) for name, x in good.items())


def named(folder, tensors, manifest):
    for algorithm in vime_sync.digest.ALGORITHMS:
        with pytest.raises(ContractError, match="b is "):
            vime_sync.Manifest.from_tensors(tensors, algorithm=algorithm)
    vime_sync.Manifest.from_tensors(tensors)


def digested(folder, tensors, manifest):
    vime_sync.digest.digests("sha256", tensors.items())


WEIGHTS = KINDS | {
    "meta": (lambda x: x.to("meta"), "meta tensor"),
    "sparse": (lambda x: x.to_sparse(), "sparse_coo"),
    "csr": (lambda x: x.to_sparse_csr(), "sparse_csr"),
    "no tensor": (lambda x: x.tolist(), "a list"),
}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("call", [written, lent, lent_again, named, digested])
def test_weights_without_values_are_refused_by_name_and_nothing_is_left(call, kind, tmp_path):
    make, words = WEIGHTS[kind]
    manifest = vime_sync.Manifest.from_tensors({"a": X, "b": W.t()})
    bad = make(W.t())
    with pytest.raises(ContractError, match=rf"(b|tensor) is .*{words}.*supported"):
        call(tmp_path, {"a": X, "b": bad}, manifest)
    assert os.listdir(tmp_path) == []
