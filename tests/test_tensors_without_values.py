"""Nested and uninitialized tensors, and those whose memory was given back, in place of any tensor of any package.

A kernel of the host that read such memory would end the process. Memory that an operator has read can be given back.
"""

import ast
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import rl_attn
import rl_gemm
import rl_logprob
import rl_norm
import vime_sync
from rl_contract import ContractError, compare
from rl_contract.communicator import SingleRank, said_of
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


def give_back(**tensors):
    # asked before: what shows a tensor that was given back, as pytest does for a failure, reads its memory
    assert [name for name, x in tensors.items() if not x.untyped_storage().resizable()] == []
    for x in tensors.values():
        x.untyped_storage().resize_(0)


def results(found):
    return [x for x in (found if isinstance(found, tuple) else (found,)) if isinstance(x, torch.Tensor)]


def numbered(name, tensors):
    return {f"{name} {n}": x for n, x in enumerate(tensors)}


MODEL_TYPES = ("compare", "linear", "column", "row", "swiglu", "gate_up_swiglu", "rms_norm", "rotary", "packed",
               "context parallel")  # fmt: skip
GRADIENTS = (*MODEL_TYPES[1:], "linear_logprob")


@pytest.mark.parametrize(
    ("call", "dtype"), [(c, torch.float32) for c in CALLS] + [(c, torch.bfloat16) for c in MODEL_TYPES]
)
def test_memory_that_an_operator_was_given_can_be_given_back_afterwards(call, dtype):
    function, given = CALLS[call]
    given = {name: x.clone() for name, x in given.items()}
    given = {name: x.to(dtype) if x.is_floating_point() else x for name, x in given.items()}
    found = results(function(**given))
    give_back(**given, **numbered("result", found))


@pytest.mark.parametrize("call", GRADIENTS)
def test_memory_that_a_backward_was_given_can_be_given_back_afterwards(call):
    function, given = CALLS[call]
    given = {name: x.clone().requires_grad_(x.is_floating_point() and name != "temperature")
             for name, x in given.items()}  # fmt: skip
    found = [x for x in results(function(**given)) if x.requires_grad]
    above = [torch.ones_like(x) for x in found]
    torch.autograd.backward(found, above)
    below = [x.grad for x in given.values() if x.requires_grad]
    assert below
    give_back(**given, **numbered("result", found), **numbered("gradient", above + below))


def test_memory_that_vime_sync_was_given_can_be_given_back_afterwards(tmp_path):
    for run, algorithm in enumerate(vime_sync.digest.ALGORITHMS):
        tensors = {"a": X.clone(), "b": W.clone().t(), "c": W.bfloat16()}
        manifest = vime_sync.Manifest.from_tensors(tensors, algorithm=algorithm)
        written(tmp_path / str(run), tensors, manifest)
        lent(tmp_path, tensors, manifest)
        vime_sync.digest.digests(algorithm, tensors.items())
        give_back(**tensors)


def test_memory_that_a_rank_spoke_of_can_be_given_back_afterwards():
    targets, temperature = ROWS.clone(), ONES.clone()
    said_of("linear_logprob", targets=targets, temperature=temperature, none=torch.zeros(0))
    give_back(targets=targets, temperature=temperature)


def test_fully_shard_frees_and_gathers_weights_that_operators_read():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.scale = torch.nn.Parameter(torch.randn(16, 16)), torch.nn.Parameter(torch.ones(16))

        def forward(self, x):
            return rl_norm.rms_norm(rl_gemm.linear(x, self.weight), self.scale, EPS)

    alone, sharded = (torch.nn.Sequential(Layer(), Layer()) for _ in range(2))
    sharded.load_state_dict(alone.state_dict())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for module in (*sharded, sharded):
            fully_shard(module, mesh=mesh, reshard_after_forward=True)
        for _ in range(2):
            y, expected = sharded(X), alone(X)
            assert torch.equal(y, expected)
            y.sum().backward()
            expected.sum().backward()
        for a, b in zip(sharded.parameters(), alone.parameters(), strict=True):
            assert torch.equal(a.grad.full_tensor(), b.grad)
    finally:
        dist.destroy_process_group()


def test_no_module_takes_an_array_from_torch_itself():
    root = Path(__file__).parents[1]
    sources = [path for kind in ("packages", "integrations") for path in (root / kind).glob("*/src/**/*.py")]
    assert len(sources) > 100
    for path in sources:
        for node in ast.walk(ast.parse(path.read_text())):
            took = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "numpy"
            assert not took, f"{path}:{node.lineno} marks a storage; use rl_contract.devices.host_array"


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


def key_made():
    return rl_logprob.SupportKey(torch.full((3,), -torch.inf), torch.zeros(3, dtype=torch.int64))


def list_made():
    return rl_logprob.SupportIds(torch.arange(6).int(), torch.tensor([0, 2, 4, 6]))


SUPPORTS = [(key_made, "threshold"), (key_made, "last_id"), (list_made, "ids"), (list_made, "starts")]
SCORES = {
    "linear_logprob": lambda support: rl_logprob.linear_logprob(
        X[:3], HEAD, torch.tensor([0, 2, 4]), vocab_size=VOCAB, support=support
    ),
    "selected_logprob": lambda support: rl_logprob.selected_logprob(
        LOGITS, torch.tensor([0, 2, 4]), vocab_size=VOCAB, support=support
    ),
    "gumbel_sample": lambda support: rl_logprob.gumbel_sample(LOGITS, ROWS, ROWS, vocab_size=VOCAB, support=support),
}
HEAD = torch.randn(1024, 16)


@pytest.mark.parametrize(("make", "part"), SUPPORTS)
@pytest.mark.parametrize("call", SCORES)
def test_a_support_freed_since_it_was_made_is_refused_by_name(call, make, part):
    SCORES[call](make())
    support = make()
    getattr(support, part).untyped_storage().resize_(0)
    with pytest.raises(ContractError, match=r"support is .* given back; supported"):
        SCORES[call](support)


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("freed", ["hidden", "weight", "targets", "temperature", *SUPPORTS])
def test_what_was_freed_before_the_backward_of_a_log_probability_is_refused_there(freed, entropy):
    support = None if isinstance(freed, str) else freed[0]()
    given = {"hidden": X[:3].clone().requires_grad_(), "weight": HEAD.clone().requires_grad_(),
             "targets": torch.tensor([0, 2, 4]), "temperature": torch.ones(3)}  # fmt: skip
    found = rl_logprob.linear_logprob(**given, vocab_size=VOCAB, support=support, return_entropy=entropy)
    name = freed if isinstance(freed, str) else freed[1]
    held = given[name] if support is None else getattr(support, name)
    held.data = given_back(held.detach())
    with pytest.raises(ContractError, match=rf"linear_logprob's backward got {name} as .* given back; supported"):
        (sum(found) if entropy else found).sum().backward()
    assert given["hidden"].grad is given["weight"].grad is None


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
