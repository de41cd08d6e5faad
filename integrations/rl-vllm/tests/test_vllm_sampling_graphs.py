"""Head, draw, log-probabilities and ranks of the V2 runner as one graph: same tokens, padding, the ways around it.

No GPU needed: a CPU runs what a graph holds each time it is replayed.
"""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from sampling_helpers import CONFIG, batch, runner_of, wanted

import rl_vllm
from rl_contract import ContractError, SingleRank, build_profile
from rl_contract.testing import on_ranks

pytest.importorskip("vllm")


@pytest.fixture(scope="module")
def profile():
    return build_profile("tiny", rl_vllm.settings_from_hf(CONFIG, leaves=4))


@pytest.mark.parametrize("requests", [[0], [1, 4], [3, 0, 2], [4, 2, 1, 0], [6]])
def test_graph_equals_the_single_operators_whatever_pads_it(profile, requests):
    runner, made = runner_of(profile)
    made.capture()
    # a larger batch before it leaves nothing behind
    runner.sample(*batch([5, 1, 3, 0], seed=3))
    hidden, given = batch(requests)
    output, sampled, rejected = runner.sample(hidden, given, None)
    ids, logp, ranks = wanted(profile, runner, hidden, given)
    assert torch.equal(output.sampled_token_ids, ids[:, None])
    scores = output.logprobs_tensors
    assert torch.equal(scores.logprobs[:, 0].view(torch.int32), logp.view(torch.int32))
    assert torch.equal(scores.logprob_token_ids, ids[:, None])
    assert torch.equal(scores.selected_token_ranks, ranks)
    assert sampled.tolist() == [1] * len(requests)
    assert rejected.tolist() == [0] * len(requests)
    assert made.report() == {"sizes": [1, 2, 4], "graph": 2}


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_that_share_the_head_keep_their_logits_and_sample_alike(profile, world):
    steps = [([4, 2, 1, 0], 0), ([3, 0, 2], 3), ([0, 1, 2, 3, 4], 5), ([6], 1)]
    alone, _ = runner_of(profile)

    def rank(comm):
        runner, made = runner_of(profile, comm=comm)
        made.capture()
        made.warm(5)
        # a result is a view of what the next step leaves alone
        return [runner.sample(*batch(*step))[0] for step in steps], made.report()

    for outputs, report in on_ranks(world, rank):
        assert report == {"sizes": [1, 2, 4], "graph": 3, "direct": 1}
        for output, step in zip(outputs, steps, strict=True):
            ids, logp, ranks = wanted(profile, alone, *batch(*step))
            scores = output.logprobs_tensors
            assert torch.equal(output.sampled_token_ids[:, 0], ids)
            assert torch.equal(scores.logprobs[:, 0].view(torch.int32), logp.view(torch.int32))
            assert torch.equal(scores.selected_token_ranks, ranks)


@pytest.mark.parametrize(
    "change",
    [
        {}, {"scale": 0.5}, {"soft_cap": 30.0}, {"logits_as_input": True}, {"use_all_gather": False}, {"kind": None},
        {"world": 1}, {"vocab": 10**6},
    ],
)  # fmt: skip
def test_logits_that_are_more_than_the_heads_product_are_vllms_affair(change):
    from sampling_helpers import VOCAB, SharedModel

    from rl_vllm.sampling_graphs import has_own_columns

    model = SharedModel(SimpleNamespace(rank=0, world_size=2), "cpu", torch.float32)
    processor = model.logits_processor
    for name in ("scale", "soft_cap", "logits_as_input", "use_all_gather"):
        vars(processor)[name] = change.get(name, vars(processor)[name])
    if "kind" in change:
        processor.__class__ = type("Changed", (type(processor),), {})
    found = has_own_columns(model, change.get("world", 2), change.get("vocab", VOCAB))
    assert found == (not change)
    del model.lm_head
    assert not has_own_columns(model, 2, VOCAB)


def test_outputs_of_a_step_outlive_the_next(profile):
    runner, made = runner_of(profile)
    made.capture()
    first = runner.sample(*batch([0, 1]))[0]
    kept = first.sampled_token_ids.clone(), first.logprobs_tensors.logprobs.clone()
    runner.sample(*batch([2, 3], seed=8))
    assert torch.equal(first.sampled_token_ids, kept[0])
    assert torch.equal(first.logprobs_tensors.logprobs, kept[1])


def test_unfinished_prompt_has_no_token_and_requests_without_logprobs_none(profile):
    runner, made = runner_of(profile)
    made.capture()
    runner.sampler.sampling_states.num_logprobs[:] = -1
    output, sampled, _ = runner.sample(*batch([0, 7]))
    assert sampled.tolist() == [1, 0]
    assert output.logprobs_tensors is None


def test_step_without_a_graph_has_the_same_bits(profile):
    runner, made = runner_of(profile)
    hidden, given = batch([3, 0, 2])
    before = runner.sample(hidden, given)[0]
    made.capture()
    after = runner.sample(hidden, given)[0]
    assert torch.equal(before.sampled_token_ids, after.sampled_token_ids)
    assert torch.equal(before.logprobs_tensors.logprobs, after.logprobs_tensors.logprobs)
    # more rows than the largest graph
    hidden, given = batch([0, 1, 2, 3, 4])
    output = runner.sample(hidden, given)[0]
    ids, logp, _ = wanted(profile, runner, hidden, given)
    assert torch.equal(output.sampled_token_ids[:, 0], ids)
    assert torch.equal(output.logprobs_tensors.logprobs[:, 0], logp)
    assert made.report() == {"sizes": [1, 2, 4], "direct": 2, "graph": 1}


def test_step_that_needs_its_logits_goes_the_runners_own_way(profile):
    runner, made = runner_of(profile)
    made.capture()
    states = runner.sampler.sampling_states
    assert runner.sample(*batch([0]), object())[0] == "stock"
    states.num_logprobs[1] = 5
    assert runner.sample(*batch([1, 0]))[0] == "stock"
    assert runner.sample(*batch([0]))[0] != "stock"
    runner.sampler.logprob_token_ids_state.max_num_token_ids = lambda rows: 2
    assert runner.sample(*batch([0]))[0] == "stock"
    assert made.report() == {"sizes": [1, 2, 4], "logits": 3, "graph": 1}
    made.reset()
    assert made.report() == {"sizes": [1, 2, 4]}


def test_head_that_lies_elsewhere_is_captured_again(profile):
    runner, made = runner_of(profile)
    made.capture()
    before = dict(made._replays)
    runner.sample(*batch([0]))
    assert made._replays == before
    runner.model.lm_head.weight.data = runner.model.lm_head.weight.data.clone() * 2
    hidden, given = batch([0])
    output = runner.sample(hidden, given)[0]
    assert torch.equal(output.sampled_token_ids[:, 0], wanted(profile, runner, hidden, given)[0])
    assert made._replays[1] is not before[1]


def test_bad_input_row_stops_the_engine_a_step_later_and_padding_never_does(profile):
    runner, made = runner_of(profile)
    made.capture()
    hidden, given = batch([0, 1, 2])
    hidden[3] = torch.nan
    output = runner.sample(hidden, given)[0]
    assert torch.isnan(output.logprobs_tensors.logprobs[:, 0]).tolist() == [False, True, False]
    with pytest.raises(ContractError, match="logits of 1 rows held a NaN"):
        runner.sample(*batch([0]))
    runner.sampler.draws.forget()
    # an engine whose weights are gone is captured without a complaint
    runner.model.lm_head.weight.data.fill_(torch.nan)
    made.capture()
    runner.sampler.draws.check()


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, [1, 8]),
        ({"seqs": 300}, [1, 8, 256]),
        ({"more": {"rl_sampling_graphs": True}}, [1, 8]),
        ({"eager": True}, []),
        ({"mode": 0}, []),
        ({"tp": 2}, [1, 8]),
        ({"more": {"rl_sampling_graphs": False}}, []),
    ],
)
def test_sizes_are_those_of_the_models_graphs(changes, found):
    from rl_vllm.sampling_graphs import sizes_for

    given = {"eager": False, "mode": 2, "tp": 1, "seqs": 100, "more": {}, **changes}
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_mode=given["mode"], cudagraph_capture_sizes=[512, 256, 8, 1]),
        model_config=SimpleNamespace(enforce_eager=given["eager"]),
        parallel_config=SimpleNamespace(tensor_parallel_size=given["tp"]),
        scheduler_config=SimpleNamespace(max_num_seqs=given["seqs"]), additional_config=given["more"],
    )  # fmt: skip
    assert sizes_for(config) == found


@pytest.mark.parametrize("value", ["False", "no", 0, 1, None])
def test_bad_input_another_word_than_true_or_false_never_decides_about_graphs(value):
    from rl_contract import ContractError
    from rl_vllm.sampling_graphs import sizes_for

    with pytest.raises(ContractError, match=r"rl_sampling_graphs=.*supported: True or False"):
        sizes_for(SimpleNamespace(additional_config={"rl_sampling_graphs": value}))


def test_runner_captures_after_its_own_graphs_and_tells_the_memory(profile, monkeypatch):
    from rl_vllm import sampling_graphs

    runner, _ = runner_of(profile)
    runner.capture_model = lambda: 100
    monkeypatch.setattr(sampling_graphs, "sizes_for", lambda config: [1, 2])
    free = iter([1000, 970])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (next(free), 0))
    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=8))
    made = sampling_graphs.install(runner, config, SingleRank())
    assert made.report() == {"sizes": []}
    assert runner.capture_model() == 130
    assert made.report() == {"sizes": [1, 2]}
    assert runner.sample(*batch([0]))[0] != "stock"
    # a later runner that shares this work among ranks keeps its own way
    runner.batch_sharder = object()
    assert sampling_graphs.install(runner, config, SingleRank()) is None


def test_kernel_that_picks_rows_does_what_the_cpu_does(tmp_path):
    """In the interpreter, which is chosen when a kernel is defined: in a process of its own."""
    pytest.importorskip("triton")
    program = """
import torch
from rl_vllm.triton_rows import pick_rows_kernel
g = torch.Generator().manual_seed(0)
for rows, size, width in ((3, 4, 40), (1, 1, 1030), (4, 4, 8)):
    wide = torch.randn(9, width + 8, generator=g)
    hidden_states, indices = wide[:, :width], torch.randperm(9, generator=g)[:rows]
    positions, mapping = torch.arange(9) * 5, torch.randperm(6, generator=g)[:rows].int()
    seeds = torch.randint(-(2**62), 2**62, (6,), generator=g)
    temperatures = torch.tensor([0.0, 0.5, 1.0, 1e-7, 1.5, 0.0])
    seq_lens, prefill = torch.tensor([7, 7, 7, 7]).int(), torch.tensor([7, 8, 3, 9, 1, 7]).int()
    hidden, arena = torch.full((5, width), torch.nan), torch.full((20,), -9)
    counts = torch.full((2, size), -9, dtype=torch.int32)
    pick_rows_kernel[(size,)](
        hidden_states, indices, positions, mapping, seeds, temperatures, seq_lens, prefill, hidden, arena, counts,
        rows, hidden_states.stride(0), width, size, COLD=1e-5, BLOCK=1024,
    )
    at = mapping.long()
    assert torch.equal(hidden[:rows], hidden_states[indices])
    assert not hidden[rows:size].any() and hidden[size:].isnan().all()
    found = arena[: 4 * size].view(4, size)
    cold = temperatures[at] < 1e-5
    assert torch.equal(found[0, :rows], seeds[at]) and torch.equal(found[1, :rows], positions[indices] + 1)
    assert torch.equal(found[2, :rows], cold.long()) and (found[2, rows:] == -1).all()
    temperature = found[3].view(torch.float32)[:size]
    assert torch.equal(temperature[:rows], torch.where(cold, 1.0, temperatures[at])) and (temperature[rows:] == 1).all()
    assert torch.equal(counts[0, :rows], (seq_lens[:rows] >= prefill[at]).int()) and not counts[1].any()
    assert (arena[4 * size :] == -9).all()
"""
    script = tmp_path / "interpreted.py"
    script.write_text(program)
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-W", "ignore", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_kernel_that_picks_rows_compiles_without_a_gpu():
    pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from rl_vllm.triton_rows import pick_rows_kernel

    n, i = "*i64", "*i32"
    signature = {
        "hidden_states": "*bf16", "logits_indices": n, "positions": n, "mapping": i, "seeds": n,
        "temperatures": "*fp32", "seq_lens": i, "prefill_lens": i, "hidden": "*bf16", "arena": n,
        "counts": i, "rows": "i32", "stride": "i32", "H": "i32", "S": "i32",
    }  # fmt: skip
    constants = {"COLD": 1e-5, "BLOCK": 1024}
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=pick_rows_kernel, signature=signature, constexprs=constants)
    assert "entry" in compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
