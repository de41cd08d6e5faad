"""What is kept beside tensors: values as they are now, also after inference mode; writes and gradients are counted."""

import gc
import threading
import weakref

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from rl_attn import (
    PagedKV,
    attention_paged,
    context_parallel,
    context_parallel_attention,
    fused,
    gpu,
    metadata,
    norm_rotary_write,
    rope_table,
    rotary,
)
from rl_attn.calls import Values, looks
from rl_contract import ContractError

Q, K = torch.zeros(8, 4, 32), torch.zeros(8, 2, 32)
TRUE_CALL = {"scale": 32**-0.5}


@pytest.fixture
def launched(monkeypatch):
    """The path of a GPU on tensors of the host, without launches: what they would have been given."""
    found = []

    def paged(q, k_cache, v_cache, *rest, out=None, **_):
        found.append(rest)
        return (torch.zeros_like(q) if out is None else out), torch.zeros(q.shape[:2])

    monkeypatch.setattr(gpu, "direct", lambda *tensors: all(type(x) is torch.Tensor for x in tensors))
    monkeypatch.setattr(gpu, "paged", paged)
    monkeypatch.setattr(fused, "_launch", lambda q, *rest: found.append(rest) or q)
    return found


def _cache(requires_grad=False):
    k, v = (torch.zeros(4, 2, 16, 32).requires_grad_(requires_grad) for _ in range(2))
    return PagedKV(k, v)


def _paged(**more):
    starts, lens = torch.tensor([0, 5, 8], dtype=torch.int32), torch.tensor([5, 3], dtype=torch.int32)
    return {
        "query_start_loc": starts, "seq_lens": lens, "block_table": torch.zeros(2, 4, dtype=torch.int32), **TRUE_CALL,
        **more,
    }  # fmt: skip


def _on_device(cu, positions=None):
    return metadata.on_device("test", Q, K, cu, cu, positions)


def test_kept_checks_tell_memory_that_was_given_back_and_refuse_what_has_no_shape():
    x = Q.clone()
    right = looks(Q, x)
    x.untyped_storage().resize_(0)
    assert looks(Q, Q.clone()) == right != looks(Q, x)
    for odd in (torch.nested.nested_tensor([K, K]), Q.to_sparse()):
        with pytest.raises(ContractError, match=r"rl_attn got tensor 1 as .*(nested|sparse).*; supported: "):
            looks(Q, odd)
    seen = []
    torch.func.vmap(lambda y: seen.append(looks(y)) or y)(Q)
    assert seen == [(Q.shape[1:], Q.dtype, Q.device, Q.layout)]


def test_starts_on_the_host_that_anybody_writes_to_are_looked_at_again():
    values = np.array([0, 5, 8])
    cu = torch.from_numpy(values)
    assert _on_device(cu).positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    values[1] = 2
    assert _on_device(cu).positions.tolist() == [0, 1, 0, 1, 2, 3, 4, 5]
    cu.data.copy_(torch.tensor([0, 8, 8]))
    assert _on_device(cu).positions.tolist() == [*range(8)]
    cu.data = torch.tensor([0, 1, 8])
    assert _on_device(cu).positions.tolist() == [0, *range(7)]
    cu.numpy()[1] = 99
    for _ in range(2):
        with pytest.raises(ContractError, match="never fall"):
            _on_device(cu)


def test_positions_that_anybody_writes_to_are_looked_at_again():
    cu, at = torch.tensor([0, 8]), np.arange(8)
    positions = torch.from_numpy(at)
    first = _on_device(cu, positions)
    assert _on_device(cu, positions) is first
    at[:] = [0, 0, 1, 2, 3, 4, 5, 6]
    assert _on_device(cu, positions) is not first
    at[0] = -1
    with pytest.raises(ContractError, match="position -1 in row 0"):
        _on_device(cu, positions)


def test_a_cut_over_ranks_is_made_anew_after_any_write_on_the_host():
    cu = torch.tensor([0, 4, 8])
    device = torch.device("cpu")
    first = context_parallel._cut(cu, 0, 2, "contiguous", device)
    assert context_parallel._cut(cu, 0, 2, "contiguous", device) is first
    cu.numpy()[1] = 2
    again = context_parallel._cut(cu, 0, 2, "contiguous", device)
    assert again.cu.tolist() == [0, 2, 8]
    assert again.every_position.tolist() == [0, 1, 0, 1, 2, 3, 4, 5]
    gone = weakref.ref(cu)
    del cu
    gc.collect()
    assert gone() is None


def test_tensors_of_inference_mode_cut_a_batch_every_time():
    q, k = torch.randn(8, 4, 32), torch.randn(8, 2, 32)
    with torch.inference_mode():
        cu = torch.tensor([0, 5, 8])
    found = [
        context_parallel_attention(q, k, k, cu_seqlens=x, comm=None, layout="contiguous", **TRUE_CALL)
        for x in (cu, cu, cu.clone())
    ]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_what_a_pass_in_inference_mode_leaves_behind_serves_one_with_gradients():
    for dtype in (torch.int32, torch.int64):
        cu = torch.tensor([0, 5, 8], dtype=dtype)
        with torch.inference_mode():
            batch = _on_device(cu)
            found = [batch.cu_q, batch.cu_k, batch.positions, batch.positions_of_keys(), *batch.narrow()]
            other = metadata.on_device("test", Q, K, cu, cu.clone(), None)
            found += [other.positions_of_keys(), *other.narrow()]
            inside = torch.tensor([0, 8])
            cut = context_parallel._cut(cu, 0, 1, "contiguous", torch.device("cpu"))
        assert _on_device(cu) is batch
        found += [_on_device(inside).cu_q, cut.cu, cut.positions, cut.order]
        assert not any(x.is_inference() for x in found)
    with torch.inference_mode():
        table = rope_table(16, 32, 1e4)
        rotary(Q, K, torch.arange(8), table)
    q = Q.clone().requires_grad_()
    rotary(q, K, torch.arange(8), table)[0].sum().backward()
    assert q.grad is not None


def test_gradients_that_a_paged_call_would_lose_are_refused(launched):
    for q, cache in ((Q.clone().requires_grad_(), _cache()), (Q, _cache(True))):
        for _ in range(2):
            with pytest.raises(ContractError, match="requires grad"):
                attention_paged(q, cache, **_paged())
        with torch.no_grad():
            assert attention_paged(q, cache, **_paged()).shape == Q.shape
    assert len(launched) == 2


def test_autograd_sees_what_launches_write(launched):
    cache, out = _cache(), torch.zeros_like(Q)
    weight = torch.ones_like(Q).requires_grad_()
    used = (weight * out).sum(), (weight[:4, :2] * cache.k[:, :, 0]).sum()
    attention_paged(Q, cache, **_paged(out=out))
    norm_rotary_write(Q, K, K, torch.arange(8), rope_table(16, 32, 1e4), cache, torch.arange(8))
    for total in used:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            total.backward()


def test_weights_of_other_kinds_are_checked_every_time(launched):
    class Weight(torch.Tensor):
        pass

    given = (Q, K, K, torch.arange(8), rope_table(16, 32, 1e4), _cache(), torch.arange(8))
    plain = torch.ones(32)
    norm_rotary_write(*given, q_weight=plain, k_weight=plain, eps=1e-6)
    looked = []
    real = fused._check
    try:
        fused._check = lambda *args: looked.append(1) or real(*args)
        norm_rotary_write(*given, q_weight=plain, k_weight=plain, eps=1e-6)
        assert not looked
        for _ in range(2):
            norm_rotary_write(*given, q_weight=plain.as_subclass(Weight), k_weight=plain, eps=1e-6)
        assert len(looked) == 2
    finally:
        fused._check = real


def test_values_tell_tensors_apart_by_number_and_by_place():
    x, y = torch.arange(3), torch.arange(3)
    held = Values(x, y)
    assert held.hold(x, y)
    assert not held.hold(x)
    assert not held.hold(y, x)
    found = []
    threads = [threading.Thread(target=lambda: found.append(held.hold(x, y))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True, True]
