"""Gradients: accurate against fp64, same on every run, independent of packing, mates, threads and the heads' split."""

import pytest
import torch

import rl_attn
from rl_contract import compare, launches
from rl_contract.profile import KEY_TILE, SEGMENT


def gradients(q, k, v, grad, lengths, scale, **options):
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    cu = torch.tensor([0, *lengths]).cumsum(0)
    out = rl_attn.attention_packed(*leaves, cu_seqlens_q=cu, cu_seqlens_k=cu, scale=scale, **options)
    out.backward(grad)
    return [x.grad for x in leaves]


def grad_like(s, seed=7):
    return torch.randn(s.q.shape, generator=torch.Generator().manual_seed(seed)).to(s.q.dtype)


def exact_gradients(s, grad):
    q, k, v = (x.double().requires_grad_() for x in (s.q, s.k, s.v))
    group = s.q.shape[1] // s.k.shape[1]
    scores = torch.einsum("ihd,jhd->hij", q, k.repeat_interleave(group, 1)) * s.scale
    scores = scores.masked_fill(torch.ones(s.length, s.length, dtype=torch.bool).triu(1), -torch.inf)
    torch.einsum("hij,jhd->ihd", scores.softmax(-1), v.repeat_interleave(group, 1)).backward(grad.double())
    return q.grad, k.grad, v.grad


@pytest.mark.field_report("R41")
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 3e-6), (torch.bfloat16, 8e-3)], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("length", "heads", "kv_heads", "head_dim"), [(1, 2, 1, 8), (65, 6, 2, 40), (700, 4, 2, 64)])
def test_accuracy_of_gradients_against_fp64(lab, length, heads, kv_heads, head_dim, dtype, bound):
    s = lab.sequence(length, heads, kv_heads, head_dim, dtype)
    s.q, s.v = s.q / 3, s.v.sign() * s.k.roll(1, 0).abs()
    grad = grad_like(s)
    for name, mine, exact in zip(
        "qkv", gradients(s.q, s.k, s.v, grad, [length], s.scale), exact_gradients(s, grad), strict=True
    ):
        error = float((mine.double() - exact).norm() / exact.norm().clamp_min(1e-3))
        assert error < bound, (name, error)
    ran = {row["kernel"] for row in launches()}
    assert {"rl_attn.cpu_backward.grad_queries", "rl_attn.cpu_backward.grad_keys"} <= ran


def naive_gradients(s, grad, key_order=1):
    """One key, one query at a time, fp32, in the order of the contract; key_order -1 walks them backwards."""
    from rl_attn.reference import _EXP2, scores_reference

    rows, heads, head_dim = s.q.shape
    group = heads // s.k.shape[1]
    q, v, do = s.q.float(), s.v.float(), grad.float()
    scores = scores_reference(s.q, s.k, s.scale)
    lse2 = s.lse * torch.tensor(1.4426950408889634)
    p = torch.from_numpy(_EXP2((scores - lse2[..., None]).numpy()))  # [R, H, S]
    delta, dp = torch.zeros(rows, heads), torch.zeros(rows, heads, rows)
    for d in range(head_dim):
        delta = delta + do[..., d] * s.out.float()[..., d]
        dp = dp + do[:, :, d, None] * v.repeat_interleave(group, 1)[:, :, d].T
    ds = p * (dp - delta[..., None])
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(s.k.float()), torch.zeros_like(v)
    for j in range(rows)[::key_order]:
        dq[j:] = dq[j:] + ds[j:, :, j, None] * s.k.float().repeat_interleave(group, 1)[j]
    for i in range(rows)[::key_order]:
        for h in range(heads):
            dk[: i + 1, h // group] += ds[i, h, : i + 1, None] * q[i, h]
            dv[: i + 1, h // group] += p[i, h, : i + 1, None] * do[i, h]
    scale = torch.tensor(s.scale)
    return [x.to(s.q.dtype) for x in (dq * scale, dk * scale, dv)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_gradients_equal_reference_and_another_order_is_caught(lab, dtype):
    s = lab.sequence(150, heads=4, kv_heads=2, head_dim=24, dtype=dtype)
    grad = grad_like(s)
    mine = gradients(s.q, s.k, s.v, grad, [150], s.scale)
    for a, b in zip(mine, naive_gradients(s, grad)):
        assert compare(a, b).bitwise_equal
    # bf16 hides most differences of order behind its rounding
    if dtype == torch.float32:
        for a, b in zip(mine, naive_gradients(s, grad, key_order=-1)):
            assert compare(a, b).mismatch_count > 1000


def test_repeat_twenty_times_same_gradients(lab):
    s = lab.sequence(400)
    grad = grad_like(s)
    first = gradients(s.q, s.k, s.v, grad, [400], s.scale)
    for _ in range(19):
        assert all(torch.equal(a, b) for a, b in zip(first, gradients(s.q, s.k, s.v, grad, [400], s.scale)))


@pytest.mark.field_report("R15")
def test_batch_packing_order_and_mates_leave_gradients(lab):
    sequences = {n: lab.sequence(n, seed=n, dtype=torch.float32) for n in (1, 17, 130, 600)}
    alone = {n: gradients(s.q, s.k, s.v, grad_like(s), [n], s.scale) for n, s in sequences.items()}
    for pack in ([17, 600, 1, 130], [600, 130, 17, 1], [1, 130]):
        members = [sequences[n] for n in pack]
        q, k, v = (torch.cat([getattr(s, name) for s in members]) for name in "qkv")
        grads = gradients(q, k, v, torch.cat([grad_like(s) for s in members]), pack, members[0].scale)
        begin = 0
        for n in pack:
            assert all(torch.equal(g[begin : begin + n], a) for g, a in zip(grads, alone[n]))
            begin += n


def test_threads_and_head_split_leave_gradients(lab):
    s = lab.sequence(900, heads=8, kv_heads=4, head_dim=64)
    grad = grad_like(s)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        whole = gradients(s.q, s.k, s.v, grad, [900], s.scale)
        torch.set_num_threads(1)
        halves = [
            gradients(*(x.chunk(2, 1)[r] for x in (s.q, s.k, s.v)), grad.chunk(2, 1)[r], [900], s.scale) for r in (0, 1)
        ]
    finally:
        torch.set_num_threads(threads)
    for n in range(3):
        assert torch.equal(torch.cat([halves[0][n], halves[1][n]], 1), whole[n])


def test_rows_in_any_order_give_the_gradients_of_ascending_rows(lab):
    s = lab.sequence(300, dtype=torch.float32)
    grad = grad_like(s)
    whole = gradients(s.q, s.k, s.v, grad, [300], s.scale)
    rows = torch.randperm(300, generator=torch.Generator().manual_seed(0))
    dq, dk, dv = gradients(s.q[rows], s.k, s.v, grad[rows], [300], s.scale, positions=rows)
    assert torch.equal(dq, whole[0][rows])
    assert torch.equal(dk, whole[1])
    assert torch.equal(dv, whole[2])


def test_lse_carries_no_gradient(lab):
    s = lab.sequence(20)
    cu = torch.tensor([0, 20])
    q = s.q.clone().requires_grad_()
    out, lse = rl_attn.attention_packed(q, s.k, s.v, cu_seqlens_q=cu, cu_seqlens_k=cu, scale=s.scale, return_lse=True)
    assert out.requires_grad
    assert not lse.requires_grad


@pytest.mark.field_report("R54")
def test_compiled_gradients_equal_eager(lab):
    s = lab.sequence(130)
    grad = grad_like(s)
    cu, at = torch.tensor([0, 130]), torch.arange(130)

    def call(q, k, v):
        return torch.ops.rl_attn.packed(q, k, v, cu, cu, at, s.scale, KEY_TILE, SEGMENT)[0]

    leaves = [x.clone().requires_grad_() for x in (s.q, s.k, s.v)]
    torch.compile(call, backend="aot_eager", fullgraph=True)(*leaves).backward(grad)
    eager = gradients(s.q, s.k, s.v, grad, [130], s.scale)
    assert all(torch.equal(x.grad, e) for x, e in zip(leaves, eager))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("world", [1, 2])
def test_a_forward_that_is_done_again_gives_the_same_gradients(lab, world, reentrant):
    from torch.utils.checkpoint import checkpoint

    s, cu = lab.sequence(160), torch.tensor([0, 32, 160])
    grad, table = grad_like(s), rl_attn.rope_table(160, 32, 1e4)

    def on_rank(comm, again):
        at = rl_attn.cp_positions(cu, comm.rank, world)

        def layer(q, k, v):
            q, k = rl_attn.rotary(q, k, at, table)
            return rl_attn.context_parallel_attention(q, k, v, cu_seqlens=cu, comm=comm, scale=s.scale)

        leaves = [rl_attn.cp_split(x, cu, comm.rank, world).requires_grad_() for x in (s.q, s.k, s.v)]
        out = checkpoint(layer, *leaves, use_reentrant=reentrant) if again else layer(*leaves)
        out.backward(rl_attn.cp_split(grad, cu, comm.rank, world))
        return [x.grad for x in leaves]

    plain, again = (lab.run_ranks(world, lambda comm, x=x: on_rank(comm, x)) for x in (False, True))
    for rank, other in zip(plain, again, strict=True):
        assert all(x.any() and torch.equal(x, y) for x, y in zip(rank, other, strict=True))
