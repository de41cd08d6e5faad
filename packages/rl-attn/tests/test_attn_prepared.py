"""Calls that are decided once and launched again: same bits, no stale decision, no refusal forgotten, nothing kept."""

import gc
import os
import subprocess
import sys
import textwrap
import weakref

import pytest
import torch

pytest.importorskip("triton")

from rl_attn import (
    PagedKV,
    attention_packed,
    attention_paged,
    counting,
    eager,
    gpu,
    gpu_backward,
    metadata,
    plans,
    rope_table,
    rotary,
)
from rl_attn.calls import ByTensor, right
from rl_contract import ContractError, launches, reset_launches

SCALE = 32**-0.5


class Kernel:
    """Stands for a Triton kernel: notes what it was launched with, and writes nothing."""

    def __init__(self, kernel):
        self.arg_names, self.__name__, self.pre_run_hooks = list(kernel.arg_names), kernel.__name__, []
        self.launched = []

    def __getitem__(self, grid):
        # one argument for each parameter, or this raises
        return lambda *args, **options: self.launched.append(
            (grid, dict(zip(self.arg_names, args, strict=True)) | options)
        )


def _stand_ins(*modules):
    return {n: Kernel(k) for x in modules for n, k in vars(x).items() if n.endswith("_kernel")}


@pytest.fixture
def direct(monkeypatch):
    """The path of a GPU on tensors of the host, its kernels replaced by ones that note their arguments."""
    from rl_attn import gpu_launch, gpu_rotary

    real = gpu.kernels()

    class Kernels:
        pass

    for name in ("forward", "decode", "backward", "rotary"):
        module = getattr(real, name)
        setattr(Kernels, name, type(name, (), _stand_ins(module)))
    for module in (gpu_launch, gpu_backward, gpu_rotary):
        monkeypatch.setattr(module, "kernels", lambda: Kernels)
    for kept in (gpu._packed, gpu._paged, gpu_backward._decided, gpu_rotary._decided, right):
        kept.clear()
    monkeypatch.setattr(gpu, "direct", lambda *tensors: all(type(x) is torch.Tensor for x in tensors))
    yield Kernels
    for kept in (gpu._packed, gpu._paged, gpu_backward._decided, gpu_rotary._decided, right):
        kept.clear()
    plans.plan_files.own.clear()


def _batch(*lengths, heads=4, kv_heads=2):
    cu = torch.tensor([0, *lengths]).cumsum(0)
    q, k, v = (torch.randn(int(cu[-1]), h, 32).bfloat16() for h in (heads, kv_heads, kv_heads))
    return q, k, v, {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "scale": SCALE}


def test_equal_calls_are_decided_once_and_others_anew(direct):
    kernel = direct.forward.attn_fwd_kernel
    q, k, v, call = _batch(7, 9)
    for n in (1, 2):
        attention_packed(q, k, v, **call)
        assert len(kernel.launched) == n
        assert len(gpu._packed) == 1
    (grid, one), (again, two) = kernel.launched
    assert grid == again
    assert {n: x for n, x in one.items() if not isinstance(x, torch.Tensor)} == {
        n: x for n, x in two.items() if not isinstance(x, torch.Tensor)
    }
    assert one["q"] is q
    assert two["out"] is not one["out"]
    attention_packed(q, k, v, **call | {"scale": 0.25})
    attention_packed(q, k, v, **call, key_tile=64)
    attention_packed(q[:, :2], k, v, **call)
    attention_packed(q, k[:, ::2], v[:, ::2], **call)
    assert len(gpu._packed) == 5
    assert [x[1]["KEY_TILE"] for x in kernel.launched] == [128, 128, 128, 64, 128, 128]
    assert [x[1]["sk_h"] for x in kernel.launched] == [32, 32, 32, 32, 32, 64]
    assert [x[1]["GROUP"] for x in kernel.launched] == [2, 2, 2, 2, 1, 4]


def test_plans_in_use_and_counting_decide_anew(direct):
    kernel = direct.forward.attn_fwd_kernel
    q, k, v, call = _batch(5)
    attention_packed(q, k, v, **call)
    own = plans.Row(kernel="forward", head_dim=256, block_m=32, warps=2)
    plans.use(plans.Plans(arch="generic", rows=(own, *plans.shipped("generic").rows)))
    reset_launches()
    attention_packed(q, k, v, **call)
    assert kernel.launched[-1][1]["BLOCK_M"] == 32 != kernel.launched[0][1]["BLOCK_M"]
    assert "forward-m32w2" in launches()[0]["plan"]
    with counting.count_segments() as calls:
        attention_packed(q, k, v, **call)
    assert kernel.launched[-1][1]["begun"].data_ptr() == calls[0].data_ptr()
    attention_packed(q, k, v, **call)
    assert kernel.launched[-1][1]["begun"] is None
    plans.plan_files.own.clear()
    attention_packed(q, k, v, **call)
    assert kernel.launched[-1][1]["BLOCK_M"] == kernel.launched[0][1]["BLOCK_M"]


def test_refusals_are_refused_every_time_and_by_the_type_of_a_number(direct):
    q, k, v, call = _batch(5)
    attention_packed(q, k, v, **call, key_tile=128, segment=1024)
    table = rope_table(16, 32, 1e4)
    rotary(q, k, torch.arange(5), table)
    for _ in range(2):
        for bad in (
            {"key_tile": 128.0},
            {"segment": True},
            {"scale": -1.0},
            {"family": ["segments"]},
            {"softcap": 2.0},
        ):
            with pytest.raises(ContractError):
                attention_packed(q, k, v, **call | bad)
        for tile in (48, 512):
            with pytest.raises(ContractError, match=f"attention_packed on a GPU got key_tile={tile}; supported: 16 to"):
                attention_packed(q, k, v, **call, key_tile=tile, segment=3072)
        with pytest.raises(ContractError, match="kv heads"):
            attention_packed(q[:, :3], k, v, **call)
        with pytest.raises(ContractError, match="ndarray"):
            attention_packed(q.float().numpy(), k, v, **call)
        with pytest.raises(ContractError, match="positions"):
            rotary(q, k, torch.arange(4), table)
        with pytest.raises(ContractError, match="rotary_dim=64"):
            rotary(q, k, torch.arange(5), rope_table(16, 64, 1e4))
    assert len(direct.forward.attn_fwd_kernel.launched) == 1


def test_backward_finds_positions_of_keys_once_and_launches_three_kernels(direct, monkeypatch):
    q, k, v, call = _batch(7, 9)
    call["cu_seqlens_k"] = call["cu_seqlens_q"].clone()
    found = []
    real = metadata.positions_of_all_keys
    monkeypatch.setattr(metadata, "positions_of_all_keys", lambda *a: found.append(1) or real(*a))
    for _ in range(3):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out, lse = attention_packed(*leaves, **call, return_lse=True)
        assert out.requires_grad
        assert not lse.requires_grad
        out.backward(torch.ones_like(out))
        assert all(x.grad.shape == x.shape for x in leaves)
    assert len(found) == 1
    launched = [getattr(direct.backward, f"attn_{x}_kernel").launched for x in ("delta", "grad_queries", "grad_keys")]
    assert [len(x) for x in launched] == [3, 3, 3]
    at = launched[2][-1][1]["key_positions"]
    assert at.tolist() == [*range(7), *range(9)]


def test_sequences_that_change_before_the_backward_are_noticed(direct):
    q, k, v, call = _batch(7, 9)
    out = attention_packed(q.requires_grad_(), k, v, **call)
    call["cu_seqlens_q"][1] = 8
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(torch.ones_like(out))
    # and the next call is one of other sequences
    attention_packed(q, k, v, **call)
    assert direct.forward.attn_fwd_kernel.launched[-1][1]["positions"].tolist() == [*range(8), *range(8)]


def test_gradients_of_gradients_are_refused(direct):
    q, k, v, call = _batch(5)
    out = attention_packed(q.requires_grad_(), k, v, **call)
    with pytest.raises(ContractError, match="has no gradient"):
        torch.autograd.grad(out, q, torch.ones_like(out), create_graph=True)


def test_batch_is_forgotten_with_its_tensor_and_starts_with_gaps_are_taken(direct):
    q, k, _, call = _batch(7, 9)
    wide = torch.stack([call["cu_seqlens_q"], torch.full((3,), 99)], 1)[:, 0]
    assert not wide.is_contiguous()
    batch = metadata.on_device("test", q, k, wide, wide, None)
    assert batch.cu_q.is_contiguous()
    assert batch.cu_q.tolist() == [0, 7, 16]
    cu = call["cu_seqlens_q"].clone()
    batch = metadata.on_device("test", q, k, cu, cu, None)
    assert metadata.on_device("test", q, k, cu, cu, None) is batch
    assert batch.positions_of_keys() is batch.positions
    assert all(x is y and x.dtype == torch.int32 for x, y in zip(batch.narrow(), batch.narrow(), strict=True))
    gone, held = weakref.ref(cu), weakref.ref(batch)
    del cu, batch
    gc.collect()
    assert gone() is None
    assert held() is None


@pytest.mark.parametrize("arch", ["generic", "sm90"])
def test_every_kernel_of_a_paged_call_is_given_every_parameter_once_and_again(direct, monkeypatch, arch):
    from rl_attn import gpu_launch

    real = gpu.hopper()
    hopper = type(
        "Hopper", (), {x: type(x, (), _stand_ins(getattr(real, x))) for x in ("walk", "decode", "few", "fold")}
    )
    hopper.tiles = real.tiles
    monkeypatch.setattr(gpu_launch, "hopper", lambda: hopper)
    monkeypatch.setattr(gpu, "current_plans", lambda x: plans.shipped(arch))
    cache = torch.zeros(2, 200, 16, 2, 64).bfloat16()
    kv = PagedKV.from_vllm_split(cache, num_kv_heads=2, head_dim=64)
    q = torch.zeros(40, 8, 64).bfloat16()
    table = torch.zeros((2, 100), dtype=torch.int32)
    for starts, width, most in (
        ([0, 1, 2], 100, 1),
        ([0, 1, 2], 40, 1),
        ([0, 20, 40], 100, None),
        ([0, 1, 40], 9, None),
    ):
        reset_launches()
        found = []
        for _ in range(2):
            attention_paged(
                q[: starts[-1]], kv, query_start_loc=torch.tensor(starts), seq_lens=torch.tensor([100, 130]),
                block_table=table[:, :width], scale=SCALE, max_query_len=most,
            )  # fmt: skip
            found.append({x["kernel"]: x["count"] for x in launches()})
        assert found[1] == {kernel: 2 * count for kernel, count in found[0].items()}
    attention_packed(q, q[:, :2], q[:, :2], **_batch(40)[3])
    rooms = (direct.forward, direct.decode, hopper.walk, hopper.decode, hopper.few, hopper.fold)
    counts = {
        n: len(x.launched) for room in rooms for n, x in vars(room).items() if n.endswith("_kernel") and x.launched
    }
    if arch == "generic":
        assert set(counts) == {"attn_fwd_kernel", "attn_segments_kernel", "attn_fold_kernel"}
    else:
        assert {"attn_fwd_sm90_kernel", "attn_segments_sm90_kernel", "attn_few_sm90_kernel"} <= set(counts)
        assert set(counts) & {"attn_fold_sm90_kernel", "attn_fold_kernel"}
        described = hopper.walk.attn_fwd_sm90_kernel.launched[-1][1]["k_desc"]
        assert described.base.data_ptr() == q.data_ptr()


def test_values_beside_tensors_are_those_of_the_tensor():
    kept = ByTensor()
    for n in range(50):
        x = torch.zeros(1)
        assert kept.get(x) is None
        kept.keep(x, n)
        assert kept.get(x) == n
    del x
    gc.collect()
    assert not kept._found


def test_rotation_of_one_output_alone_goes_back_alone(direct):
    q, k, _, _ = _batch(6)
    table, at = rope_table(16, 32, 1e4), torch.arange(6)
    q.requires_grad_()
    k.requires_grad_()
    rotary(q, k, at, table)[0].backward(torch.ones_like(q))
    assert q.grad is not None
    assert k.grad is None
    kernel = direct.rotary.rotary_kernel
    assert [(x[0], x[1]["sign"], x[1]["heads"], x[1]["kv_heads"]) for x in kernel.launched] == [
        ((6, 2, 1), 1.0, 4, 2),
        ((6, 1, 1), -1.0, 4, 0),
    ]


def test_direct_calls_in_the_interpreter_have_the_bits_of_the_operators():
    program = textwrap.dedent(
        """
        import torch
        from rl_attn import attention_packed, checks, gpu, gpu_backward, rope_table, rotary
        checks.DTYPES["cpu"] = (torch.bfloat16, torch.float32, torch.float16)
        torch.manual_seed(0)
        def equal(a, b):
            return torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))
        def turn(x, cos, sin):
            # each product and their sum rounded to fp32, the result once to the model's type
            half = cos.shape[1]
            a, b, c, s = x[..., :half].float(), x[..., half : 2 * half].float(), cos[:, None], sin[:, None]
            return torch.cat([(a * c - b * s).half(), (b * c + a * s).half(), x[..., 2 * half :]], -1)
        for heads, kv_heads, dim, turned in ((9, 2, 24, 16), (2, 3, 16, 16)):
            table, at = rope_table(40, turned, 1e4), torch.randint(0, 40, (5,))
            q, k = (torch.randn(5, h, dim + 8).half()[..., :dim] for h in (heads, kv_heads))
            want = [turn(x, table.cos[at], table.sin[at]) for x in (q, k)]
            back = [turn(x, table.cos[at], -table.sin[at]) for x in (q, k)]
            gpu.direct = lambda *tensors: True
            for _ in range(2):
                assert all(map(equal, rotary(q, k, at, table), want)), "rotary"
                a, b = q.clone().requires_grad_(), k.clone().requires_grad_()
                torch.autograd.backward(rotary(a, b, at, table), (q.contiguous(), k))
                assert equal(a.grad, back[0]) and equal(b.grad, back[1]), "rotary backward"
                wide = torch.stack([at, at + 100], 1)[:, 0]
                assert all(map(equal, rotary(q, k, wide, table), want)), "positions with gaps"
            outside = rotary(q, k, at + 36, table)[0]
            lost = outside[..., :turned].isnan().all(-1).all(-1)
            assert torch.equal(lost, at + 36 >= 40), "positions outside the table"
            gpu.direct = lambda *tensors: False
        cu = torch.tensor([0, 20, 21, 37])
        q, k, v, d = (torch.randn(37, h, 32).half() for h in (4, 2, 2, 4))
        call = dict(cu_seqlens_q=cu, cu_seqlens_k=cu, scale=32 ** -0.5, key_tile=16, segment=32)
        at = torch.cat([torch.arange(n) for n in (20, 1, 16)])
        out, lse = gpu.packed(q, k, v, cu, cu, at, call["scale"], 16, 32)
        delta = gpu_backward.row_delta(d, out)
        dq = gpu_backward.grad_queries(d, q, k, v, lse, delta, cu, cu, at, call["scale"])
        dk, dv = gpu_backward.grad_keys(d, q, k, v, lse, delta, cu, cu, at, at, call["scale"])
        gpu.direct = lambda *tensors: True
        for n in range(3):
            if n == 2:
                gpu._packed.clear()
                gpu_backward._decided.clear()
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            found, found_lse = attention_packed(*leaves, **call, return_lse=True)
            assert equal(found, out) and torch.equal(found_lse, lse), "forward"
            found.backward(d)
            assert all(map(equal, [x.grad for x in leaves], [dq, dk, dv])), "backward"
        wide = torch.stack([d, d], -1)[..., 0]
        again = [x.clone().requires_grad_() for x in (q, k, v)]
        attention_packed(*again, **call).backward(wide)
        assert all(map(equal, [x.grad for x in again], [dq, dk, dv])), "dO with gaps"
        """
    )
    result = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr[-2000:]


def test_direct_is_for_plain_tensors_that_nobody_watches():
    assert not gpu.direct(torch.zeros(1))
    assert eager._unseen(torch.zeros(1)) is False


def test_lengths_and_tables_with_gaps_reach_kernels_without(direct):
    cache = PagedKV.from_vllm_split(torch.zeros(2, 8, 16, 2, 32).bfloat16(), num_kv_heads=2, head_dim=32)
    q = torch.zeros(8, 4, 32).bfloat16()
    starts, lens = torch.tensor([0, 5, 8], dtype=torch.int32), torch.tensor([5, 3], dtype=torch.int32)
    table = torch.arange(8, dtype=torch.int32).view(2, 4)
    wide = [torch.stack([x, x + 77], -1)[..., 0] for x in (starts, lens, table)]
    for _ in range(2):
        for given in ((starts, lens, table), wide):
            names = ("query_start_loc", "seq_lens", "block_table")
            attention_paged(q, cache, **dict(zip(names, given, strict=True)), scale=SCALE)
            found = direct.forward.attn_fwd_kernel.launched[-1][1]
            for name, want in (("cu_q", starts), ("seq_lens", lens), ("table", table)):
                place = torch.as_strided(found[name], want.shape, want.stride())
                assert torch.equal(place, want), name
