"""Opaque operators: one node for a compiler, no gradient that nobody wrote, writes that autograd sees."""

import pytest
import torch
from torch import Tensor

from rl_contract import ContractError, opaque
from rl_contract.opaque import opaque_op


@opaque_op("rl_contract_test::scaled")
def scaled(x: Tensor, bias: Tensor | None = None, factor: float = 2.0) -> Tensor:
    return x * factor if bias is None else x * factor + bias


@scaled.register_fake
def _(x, bias=None, factor=2.0):
    return x.new_empty(x.shape)


@opaque_op("rl_contract_test::grow", mutates_args=("total",))
def grow(total: Tensor, x: Tensor) -> None:
    total.copy_(total + x)


@grow.register_fake
def _(total, x):
    return None


@opaque_op("rl_contract_test::squared", device_type=None)
def squared(x: Tensor) -> Tensor:
    return x * x


@squared.register_fake
def _(x):
    return x.new_empty(x.shape)


def _context(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, dy):
    return 2 * ctx.saved_tensors[0] * dy


squared.register_autograd(_backward, setup_context=_context)


def test_a_kernel_of_the_host_is_never_given_memory_that_was_given_back():
    x, bias = torch.ones(3), torch.ones(3)
    compiled = torch.compile(lambda x, bias: scaled(x, bias) + 1, fullgraph=True, backend="aot_eager")
    assert compiled(x, bias).tolist() == [4, 4, 4]
    bias.untyped_storage().resize_(0)
    for call in (scaled, compiled, torch.func.vmap(scaled, in_dims=(0, None))):
        with pytest.raises(ContractError, match=r"rl_contract_test::scaled got bias as .* was given back; supported: "):
            call(x[None] if call not in (scaled, compiled) else x, bias)
    assert scaled(torch.ones(0), None).tolist() == []
    with pytest.raises(ContractError, match="got total as a tensor whose memory was given back"):
        grow(bias, x)


def test_keeps_the_rules_of_operators():
    x = torch.randn(5, 3)
    torch.library.opcheck(scaled.overload, (x, x, 3.0))
    torch.library.opcheck(grow.overload, (x.clone(), x), test_utils=("test_schema", "test_faketensor"))
    torch.library.opcheck(squared.overload, (x.clone().requires_grad_(),))


def test_one_node_of_a_compiled_graph_with_the_eager_bits():
    seen = []

    def backend(graph, inputs):
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    x = torch.randn(4, 3)
    traced = torch.compile(lambda x: scaled(x, factor=3.0), fullgraph=True, backend=backend)
    assert torch.equal(traced(x), scaled(x, None, 3.0))
    assert seen == ["rl_contract_test.scaled.default"]


def test_a_gradient_that_nobody_wrote_is_refused_where_it_would_be_lost():
    x = torch.randn(3, requires_grad=True)
    for call in (lambda: scaled(x), lambda: scaled(torch.ones(3), bias=x), lambda: grow(torch.zeros(3), x)):
        with pytest.raises(ContractError, match=r"requires grad.*no_grad"):
            call()
    with torch.no_grad():
        assert torch.equal(scaled(x), 2 * x)
    for backend in ("eager", "aot_eager"):
        traced = torch.compile(lambda x: scaled(x) * 1, backend=backend)
        with pytest.raises(Exception, match=r"requires grad.*no_grad"):
            traced(x)
        with torch.no_grad():
            assert torch.equal(traced(x), 2 * x)


GRAD, VMAP = torch.func.grad, torch.vmap
LOST = {
    "grad": lambda x: GRAD(lambda a: scaled(a).sum())(x),
    "grad of the bias": lambda x: GRAD(lambda a: scaled(x, a).sum())(x),
    "grad of what is written": lambda x: GRAD(lambda a: (grow(a * 1, x), a.sum())[1])(x),
    "vjp": lambda x: torch.func.vjp(scaled, x),
    "jacrev": lambda x: torch.func.jacrev(scaled)(x),
    "hessian": lambda x: torch.func.hessian(lambda a: (a * scaled(a)).sum())(x),
    "vmap of grad": lambda x: VMAP(GRAD(lambda a: scaled(a)))(x),
    "grad of vmap": lambda x: GRAD(lambda a: VMAP(scaled)(a).sum())(x),
    "grad of the outer": lambda x: GRAD(lambda a: GRAD(lambda b: (b * scaled(a)).sum())(x).sum())(x),
    "autograd around vmap": lambda x: VMAP(scaled)(x.clone().requires_grad_()),
    "jvp": lambda x: torch.func.jvp(scaled, (x,), (x,)),
    "linearize": lambda x: torch.func.linearize(scaled, x),
    "jacfwd": lambda x: torch.func.jacfwd(scaled)(x),
}


looks_into_transforms = pytest.mark.skipif(
    not opaque.TRANSFORMS, reason="this PyTorch's compiler traces no such kernel"
)


@looks_into_transforms
@pytest.mark.parametrize("how", LOST)
def test_transforms_that_would_take_zeros_for_a_gradient_are_refused(how):
    with pytest.raises(ContractError, match=r"requires grad.*no_grad|forward-mode"):
        LOST[how](torch.randn(3))


@looks_into_transforms
@pytest.mark.parametrize("how", ["grad", "vjp", "vmap of grad", "grad of vmap", "jvp"])
def test_a_compiler_refuses_them_too(how):
    for backend in ("eager", "aot_eager"):
        with pytest.raises(Exception, match=r"requires grad.*no_grad|forward-mode"):
            torch.compile(LOST[how], backend=backend)(torch.randn(3))


def product(op):
    """a -> sum of a * op(a), where the factor counts as a constant: the gradient of the first is op(a)."""

    def of(a):
        with torch.no_grad():
            factor = op(a)
        return (a * factor).sum()

    return of


KEPT = {
    "vmap": lambda op, x: VMAP(op)(x),
    "vmap of vmap": lambda op, x: VMAP(VMAP(op))(x),
    "a constant of grad": lambda op, x: GRAD(lambda a: (a * op(x)).sum())(x),
    "no_grad in grad": lambda op, x: GRAD(product(op))(x),
    "vmap of that": lambda op, x: VMAP(VMAP(GRAD(product(op))))(x),
    "a constant of both": lambda op, x: VMAP(VMAP(GRAD(lambda a, b: a * op(b))))(x, x),
    "vmap in grad": lambda op, x: GRAD(lambda a, b: (a * VMAP(op)(b)).sum())(x, x),
    "grad of grad": lambda op, x: VMAP(VMAP(GRAD(GRAD(lambda a, b: a * a / 2 * op(b)))))(x, x),
    "functionalize": lambda op, x: torch.func.functionalize(op)(x),
}


@pytest.mark.parametrize("how", KEPT)
@pytest.mark.parametrize("op", [scaled, squared], ids=["scaled", "squared"])
def test_transforms_that_lose_nothing_have_the_bits_of_plain_calls(op, how):
    x = torch.randn(4, 3)
    wanted = op(x)
    assert torch.equal(KEPT[how](op, x), wanted)
    # of its own accord, an earlier compiler does not trace this one
    if opaque.TRANSFORMS or how != "vmap in grad":
        assert torch.equal(torch.compile(lambda x: KEPT[how](op, x), backend="eager")(x), wanted)


def test_a_gradient_around_a_transform_flows_through_a_registered_one():
    x = torch.randn(4, 3)
    for call in (VMAP(squared), lambda y: GRAD(lambda a, b: (a * squared(b)).sum())(x, y)):
        leaf = x.clone().requires_grad_()
        call(leaf).sum().backward()
        assert torch.equal(leaf.grad, 2 * x)
    leaf = x[0].clone().requires_grad_()
    (rows,) = torch.autograd.grad(squared(leaf), leaf, torch.eye(3), is_grads_batched=True)
    assert torch.equal(rows, torch.diag(2 * x[0]))


def test_a_write_inside_a_transform_arrives():
    def grown(a, b):
        total = b.clone()
        with torch.no_grad():
            grow(total, b)
        return (a * total).sum()

    x = torch.randn(4, 3)
    assert torch.equal(GRAD(grown)(x, x), 2 * x)


def test_a_registered_gradient_flows():
    x = torch.tensor([1.0, -3.0], requires_grad=True)
    squared(x).sum().backward()
    assert torch.equal(x.grad, torch.tensor([2.0, -6.0]))


def test_tangents_are_refused_where_they_would_be_lost():
    x = torch.ones(2)
    for op in (scaled, squared):
        with pytest.raises(ContractError, match="forward-mode"):
            torch.func.jvp(op, (x,), (x,))
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, x)
            with pytest.raises(ContractError, match="forward-mode"):
                op(dual)
    assert torch.equal(scaled(x), 2 * x)


def test_autograd_sees_a_write():
    total = torch.ones(2, requires_grad=True).clone()
    used = total * total
    with torch.no_grad():
        grow(total, torch.ones(2))
    assert torch.equal(total.detach(), torch.full((2,), 2.0))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        used.sum().backward()
    with torch.inference_mode():
        inside = torch.zeros(2)
        grow(inside, torch.ones(2))
        assert torch.equal(inside, torch.ones(2))


def test_another_device_type_is_refused_by_name():
    with pytest.raises(ContractError, match=r"'xpu'.*'cpu', 'cuda'"):
        scaled.register_kernel("xpu")


def test_what_kernels_would_not_be_given_is_refused_when_an_operator_is_made():
    def by_name(x: Tensor, *, factor: float = 2.0) -> Tensor:
        return x * factor

    def of_a_list(xs: list[Tensor]) -> Tensor:
        return xs[0] * 2

    for number, (function, name) in enumerate(((by_name, "factor"), (of_a_list, "xs"))):
        with pytest.raises(ContractError, match=rf"'{name}'.*by place"):
            opaque_op(f"rl_contract_test::odd{number}")(function)


def test_an_operator_that_is_refused_leaves_its_name_free():
    def by_name(x: Tensor, *, factor: float = 2.0) -> Tensor:
        return x * factor

    def unannotated(x):
        return x * 2

    def doubled(x: Tensor) -> Tensor:
        return x * 2

    for function, rest, words in (
        (by_name, {}, "by place"),
        (unannotated, {}, "can't be made of unannotated.*annotated tensors"),
        (doubled, {"mutates_args": ("y",)}, "can't be made of doubled.*mutates_args"),
        (doubled, {"device_type": "xpu"}, "'xpu'.*'cpu', 'cuda'"),
    ):
        with pytest.raises(ContractError, match=words):
            opaque_op("rl_contract_test::again", **rest)(function)
    made = opaque_op("rl_contract_test::again")(doubled)
    assert torch.equal(torch.ops.rl_contract_test.again(torch.ones(2)), made(torch.ones(2)))
    for name, words in (
        ("rl_contract_test::again", "give a name that no operator of the process has"),
        ("again", "'namespace::name'"),
        ("a::b::c", "'namespace::name'"),
        ("a::", "'namespace::name'"),
        (None, "'namespace::name'"),
    ):
        with pytest.raises(ContractError, match=words):
            opaque_op(name)(doubled)
    assert torch.equal(made(torch.ones(2)), torch.full((2,), 2.0))


def test_a_written_tensor_may_be_left_out():
    @opaque_op("rl_contract_test::into", mutates_args=("out",))
    def into(x: Tensor, out: Tensor | None = None) -> None:
        if out is not None:
            out.copy_(x)

    x, out = torch.ones(2), torch.zeros(2)
    into(x)
    into(x, None)
    before = out._version
    into(x, out)
    assert torch.equal(out, x)
    assert out._version > before
