"""Which graph serves a step once a V2 runner's graph manager is extended by those of few requests that prefill."""

import inspect
from types import SimpleNamespace

import pytest
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers

from rl_contract import ContractError
from rl_vllm import prefill_graphs

SIZES = [1, 8, 64, 72, 256, 512]
FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE


def manager(mode=CUDAGraphMode.FULL_AND_PIECEWISE, dp=1, longest=4096, requests=256, sizes=SIZES):
    """vLLM's own, as far as it chooses graphs."""

    class Manager(cudagraph_utils.CudaGraphManager):
        dp_size = dp

    made = Manager.__new__(Manager)
    parallel = SimpleNamespace(data_parallel_size=dp)
    made.vllm_config = SimpleNamespace(
        parallel_config=parallel,
        speculative_config=None,
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
        model_config=SimpleNamespace(max_model_len=longest),
    )
    made.compilation_config = SimpleNamespace(cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=max(sizes))
    made.max_num_reqs, made.cudagraph_mode, made.decode_query_len = requests, mode, 1
    made.lora_capture_cases, made._lora_dispatch_map, made._max_lora_case = [0], {}, 0
    made.ubatch_runner, made.varlen_decode = None, False
    made._candidates, made._capture_descs = {}, {}
    made._graphs_captured = True
    made._init_candidates()
    return made


def served(made, requests, tokens, most=None):
    """(mode, tokens, requests) of the graph that serves so many requests, of which one has ``most`` tokens."""
    most = most or -(-tokens // requests)
    uniform = most if most * requests == tokens else None
    given = {"num_reqs": requests, "num_tokens": tokens, "uniform_token_count": uniform, "num_active_loras": 0}
    # a later request of vLLM's
    given |= {"max_query_len": most} if "max_query_len" in inspect.signature(made.dispatch).parameters else {}
    found = made.dispatch(**given)
    return found.cg_mode, found.num_tokens, found.num_reqs


def test_one_prompt_and_few_requests_take_full_graphs_and_decode_keeps_its_own():
    made = manager()
    before = {n: served(made, n, n) for n in (1, 8, 64, 256)}
    assert prefill_graphs.extend(made) == 2 * 3
    assert {n: served(made, n, n) for n in (1, 8, 64, 256)} == before
    assert {m for m, _, _ in before.values()} == {FULL}
    assert served(made, 1, 512) == (FULL, 512, 1)
    assert served(made, 1, 300) == (FULL, 512, 1)
    assert served(made, 2, 512) == (FULL, 512, 8)
    assert served(made, 8, 500, 400) == (FULL, 512, 8)
    assert served(made, 9, 500, 400) == (PIECEWISE, 512, None)
    # of 72 there is none, and the next is far
    assert served(made, 2, 70, 60) == (PIECEWISE, 72, None)
    assert served(made, 2, 60, 50) == (FULL, 64, 8)
    assert served(made, 1, 513) == (NONE, 513, 1)


def test_every_graph_that_serves_is_captured_once_the_largest_first():
    made = manager()
    prefill_graphs.extend(made)
    assert prefill_graphs.extend(made) == 0
    captured = made._capture_descs[FULL]
    assert len(set(captured)) == len(captured)
    assert [d.num_tokens for d in captured] == sorted((d.num_tokens for d in captured), reverse=True)
    everything = {d for descs in made._capture_descs.values() for d in descs}
    assert {d for descs in made._candidates.values() for d in descs} == everything
    # the builder tells a graph of mixed batches by its requests being fewer than its tokens
    assert all(d.num_reqs < d.num_tokens for d in captured if d.uniform_token_count is None)


def test_no_graph_has_more_tokens_than_its_requests_can_have():
    made = manager(longest=100)
    assert prefill_graphs.extend(made) == 4
    captured = {(d.num_tokens, d.num_reqs) for d in made._capture_descs[FULL] if d.uniform_token_count is None}
    assert captured == {(64, 1), (64, 8), (256, 8), (512, 8)}
    # one of more requests serves
    assert served(made, 1, 100) == (FULL, 256, 8)


@pytest.mark.parametrize("requests", [1, 4, 7])
def test_no_graph_has_more_requests_than_the_engine(requests):
    made = manager(requests=requests)
    prefill_graphs.extend(made)
    captured = made._capture_descs[FULL]
    assert len(set(captured)) == len(captured)
    mixed = {d.num_reqs for d in captured if d.uniform_token_count is None}
    assert mixed == {1, requests}
    assert served(made, 1, 300) == (FULL, 512, 1)
    assert served(made, requests, 500, 450) == (FULL, 512, requests)
    # vLLM's own dummy batch of each, which writes into buffers of so many requests
    for desc in captured:
        buffers = InputBuffers(requests, 512, torch.device("cpu"))
        count = desc.num_reqs or min(desc.num_tokens, requests)
        assert int(InputBatch.make_dummy(count, desc.num_tokens, buffers).seq_lens.sum()) == desc.num_tokens


@pytest.mark.parametrize(("longest", "there"), [(49, False), (50, True)])
def test_no_request_of_a_dummy_batch_is_longer_than_a_block_table(longest, there):
    """Of 320 tokens seven requests have 45, and the last 50 where vLLM gives it all that is left."""
    made = manager(requests=7, longest=longest, sizes=[1, 7, 320])
    prefill_graphs.extend(made)
    graphs = [(d.num_tokens, d.num_reqs) for d in made._capture_descs[FULL] if d.uniform_token_count is None]
    assert graphs == [(320, 7)] * there
    lengths = InputBatch.make_dummy(7, 320, InputBuffers(7, 320, torch.device("cpu"))).seq_lens
    assert 46 <= int(lengths.max()) <= 50


@pytest.mark.parametrize("given", [{"mode": FULL}, {"mode": PIECEWISE}, {"dp": 2}])
def test_other_modes_and_data_parallel_engines_are_left_alone(given):
    made = manager(**given)
    before = {key: list(value) for key, value in made._candidates.items()}
    assert prefill_graphs.extend(made) == 0
    assert made._candidates == before


def test_option_leaves_the_manager_alone_and_is_refused_where_it_is_no_bool():
    calls = []
    runner = SimpleNamespace(capture_model=lambda: calls.append("captured") or 7, cudagraph_manager=manager())
    prefill_graphs.install(runner, SimpleNamespace(additional_config={"rl_prefill_graphs": False}))
    assert runner.capture_model() == 7
    assert served(runner.cudagraph_manager, 1, 512) == (PIECEWISE, 512, None)
    prefill_graphs.install(runner, SimpleNamespace(additional_config={}))
    assert runner.capture_model() == 7
    assert served(runner.cudagraph_manager, 1, 512) == (FULL, 512, 1)
    with pytest.raises(ContractError, match="rl_prefill_graphs"):
        prefill_graphs.install(runner, SimpleNamespace(additional_config={"rl_prefill_graphs": 1}))


def test_descriptors_have_the_fields_that_are_set():
    assert {"cg_mode", "num_tokens", "num_reqs", "uniform_token_count"} <= set(
        BatchExecutionDescriptor.__dataclass_fields__
    )
