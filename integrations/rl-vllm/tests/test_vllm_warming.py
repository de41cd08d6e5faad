"""What a strict GPU engine runs before it serves: batches of every kind, and nothing of them stays. No GPU needed."""

from types import SimpleNamespace

import pytest
import torch
from tiny_checkpoint import tiny_config

import rl_vllm
from rl_contract import build_profile, launches, reset_launches

pytest.importorskip("vllm")
from rl_vllm import gpu_worker, warming

SEGMENT, PAGE, HEADS, KV_HEADS, D = 64, 16, 4, 2, 32


def settings(**changes):
    given = {"max_num_batched_tokens": 2048, "max_num_seqs": 256, "sizes": [1, 8, 512], "mode": 1, "eager": False}
    given |= changes
    return SimpleNamespace(
        compilation_config=SimpleNamespace(
            cudagraph_capture_sizes=given["sizes"], cudagraph_mode=given["mode"], static_forward_context={}
        ),
        model_config=SimpleNamespace(
            enforce_eager=given["eager"], max_model_len=1000, dtype=torch.float32, get_hidden_size=lambda: 8
        ),
        scheduler_config=SimpleNamespace(
            max_num_batched_tokens=given["max_num_batched_tokens"], max_num_seqs=given["max_num_seqs"]
        ),
    )


def test_forward_passes_fill_what_lies_between_captured_sizes_and_the_largest_step():
    assert warming.forward_sizes(settings()) == [1023, 1024, 2047]
    large = [1023, 1024, 2047, 2048, 4095, 4096]
    assert warming.forward_sizes(settings(max_num_batched_tokens=8000)) == large
    # a multiple of 16 and another number of every power of two that has both
    assert warming.forward_sizes(settings(eager=True, max_num_batched_tokens=33)) == [1, 2, 3, 4, 7, 8, 15, 16, 31, 32]
    assert warming.forward_sizes(settings(mode=0, max_num_batched_tokens=5)) == [1, 2, 3, 4]
    assert warming.forward_sizes(settings(sizes=None, max_num_batched_tokens=3)) == [1, 2]
    # vLLM's dummy requests share the tokens, and the last has the rest; a block table here has room for 1,000
    assert warming.forward_sizes(settings(max_num_batched_tokens=8000, max_num_seqs=2)) == [1023, 1024]
    assert warming.forward_sizes(settings(max_num_batched_tokens=8000, max_num_seqs=1)) == []


@pytest.mark.parametrize("most", [1, 2, 7, 16, 100, 256])
def test_batches_hold_every_number_of_requests_and_of_queries_that_launches_tell_apart(most):
    found = warming.batches(most, 2048, 1000)
    assert all(0 < sum(x) <= 2048 and max(x) <= 1000 and len(x) <= most for x in found)
    # kernels hold the requests of a batch in room for a power of two of them
    rooms = {max(16, 1 << (n - 1).bit_length()) for n in range(1, most + 1)}
    assert {max(16, 1 << (len(x) - 1).bit_length()) for x in found} == rooms
    assert {max(x) for x in found} >= {1, 2, 4, 8, 16, 32, 64}
    # beside requests of no query the kernels of short ones are launched, without them the walk alone
    assert {min(x) > 0 for x in found if max(x) == 64} == ({True} if most == 1 else {True, False})
    for requests in {len(x) for x in found}:
        queries = [sum(x) for x in found if len(x) == requests]
        assert max(queries) == min(64 * requests + 1, 2048, 1000 * requests)


def a_layer(fused=True):
    from rl_attn import rope_table
    from rl_vllm.fusing import Before
    from rl_vllm.gpu_attention import StrictGPUAttentionImpl

    impl = StrictGPUAttentionImpl.__new__(StrictGPUAttentionImpl)
    impl.num_heads, impl.num_kv_heads, impl.head_size, impl.scale, impl.layout = HEADS, KV_HEADS, D, 0.2, "vllm_split"
    impl.strict = SimpleNamespace(
        profile=SimpleNamespace(settings=SimpleNamespace(key_tile=32, segment=SEGMENT, attention="segments"))
    )
    cache = torch.randn((2, 3, PAGE, KV_HEADS, D), generator=torch.Generator().manual_seed(0)).bfloat16()
    if fused:
        table = rope_table(64, D, 1e4)
        rotary = torch.nn.Module()
        rotary.register_buffer("rl_cos", table.cos)
        rotary.register_buffer("rl_sin", table.sin)
        impl.before = Before(rotary)
    return SimpleNamespace(impl=impl, kv_cache=cache)


@pytest.mark.parametrize("fused", [True, False])
def test_attention_serves_every_batch_and_leaves_the_cache_as_it_is(fused):
    layer = a_layer(fused)
    before = layer.kv_cache.clone()
    table = torch.full((20, 8), 7, dtype=torch.int32)
    shapes = warming.batches(20, 150, 100)
    reset_launches()
    assert warming.attention(layer, table, shapes) == len(shapes)
    assert torch.equal(layer.kv_cache.view(torch.int16), before.view(torch.int16))
    assert (table == 7).all()
    counted = sum(x["count"] for x in launches() if x["boundary"] == "attention" and x["layout"] == "paged")
    assert counted >= len(shapes)
    reset_launches()
    # a table of fewer requests than a batch has is none of the engine's
    assert warming.attention(layer, table[:1], shapes) == sum(len(x) == 1 for x in shapes)


def test_attention_is_asked_as_a_step_asks_it(monkeypatch):
    layer, seen = a_layer(), []
    monkeypatch.setattr(layer.impl, "forward", lambda *args: seen.append(args))
    table = torch.zeros((4, 8), dtype=torch.int32)
    warming.attention(layer, table, [[3, 0], [2, 2, 2]])
    for (_, q, k, v, cache, m, out), lengths in zip(seen, [[3, 0], [2, 2, 2]]):
        tokens = sum(lengths)
        assert (q.shape, k.shape, v.shape) == ((tokens, HEADS, D), (tokens, KV_HEADS, D), (tokens, KV_HEADS, D))
        # rows as the projection leaves them
        assert q.stride() == k.stride() == v.stride() == ((HEADS + 2 * KV_HEADS) * D, D, 1)
        assert out.shape == q.shape
        assert cache is layer.kv_cache
        assert (m.max_query_len, m.min_query_len, m.num_actual_tokens) == (max(lengths), min(lengths), tokens)
        assert m.query_start_loc.diff().tolist() == m.seq_lens.tolist() == lengths
        assert m.query_start_loc.dtype == m.seq_lens.dtype == torch.int32
        assert m.block_table.stride() == table.stride()
        assert (m.slot_mapping == -1).all()


def test_scores_of_every_number_of_rows_are_drawn_and_none_of_them_is_bad():
    from rl_vllm.gpu_sampling import Draws

    profile = build_profile("tiny", rl_vllm.settings_from_hf(tiny_config(), leaves=4))
    draws, seen = Draws(profile, torch.device("cpu")), []
    head = torch.randn(8, profile.settings.vocab_size, generator=torch.Generator().manual_seed(1))

    def compute_logits(hidden):
        seen.append(len(hidden))
        return hidden @ head

    warming.score(compute_logits, torch.ones(1, 8), draws, 9, 20)
    assert seen == [20, 19, 16, 15, 8, 7, 4, 3, 2, 1]
    assert int(draws._bad) == 0
    # the engine's ranks without logits call the head as often
    warming.score(lambda hidden: seen.append(len(hidden)), torch.ones(1, 8), draws, 9, 20)
    assert seen[10:] == seen[:10]


def test_row_counts_begin_with_the_largest_and_end_with_one():
    assert warming.row_counts(1) == [1]
    assert warming.row_counts(10) == [10, 9, 8, 7, 4, 3, 2, 1]


def test_a_worker_that_has_warmed_up_has_counted_no_launch_and_no_draw(monkeypatch):
    from triton import knobs

    from rl_contract import Launch, record_launch

    order = []
    hook = object()
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", hook)

    class Runner:
        model = SimpleNamespace(compute_logits=lambda hidden: order.append("head"))

        def _dummy_run(self, size, skip_eplb):
            assert knobs.runtime.jit_post_compile_hook is None
            assert torch.is_inference_mode_enabled()
            record_launch(Launch("attention", "k", "p", "-", "eager"))
            order.append(size)

    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: order.append(name))
    monkeypatch.setattr(warming.gc, "freeze", lambda: order.append("freeze"))
    monkeypatch.setattr(warming.gc, "collect", lambda: None)
    worker = gpu_worker.StrictGPUWorker.__new__(gpu_worker.StrictGPUWorker)
    worker.model_runner, worker.vllm_config, worker.use_v2_model_runner = Runner(), settings(), False
    worker._draws = SimpleNamespace(forget=lambda: order.append("forget"), device=torch.device("cpu"))
    monkeypatch.setattr(gpu_worker.Worker, "compile_or_warm_up_model", lambda self: order.append("vLLM") or "times")
    reset_launches()
    assert worker.compile_or_warm_up_model() == "times"
    assert launches() == []
    assert knobs.runtime.jit_post_compile_hook is hook
    assert [x for x in order if x != "head"] == [
        "vLLM", "synchronize", "forget", 1023, 1024, 2047, "empty_cache", "synchronize", "freeze", "forget"
    ]  # fmt: skip
    assert worker._rl_forwards == 0


def test_a_step_that_fails_while_warming_leaves_the_watch_of_kernels_on(monkeypatch):
    from triton import knobs

    hook = object()
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", hook)

    def fail():
        with warming._unwatched():
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        fail()
    assert knobs.runtime.jit_post_compile_hook is hook
