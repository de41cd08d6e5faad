"""Weights that change while requests decode, and prefixes around a block's end: one small engine serves all of it."""

from typing import Any

import pytest
import torch
from engine_helpers import assert_same, engine, metric, prompt, raw_generate, sampled, tokens_and_logprobs
from hf_reference import packed_logprobs
from tiny_checkpoint import tiny_config, tiny_weights, write_checkpoint

import rl_vllm
from rl_contract import build_profile
from vime_sync import Manifest, ModelShape, PolicyVersion, Publisher, StepLedger, write_weights

pytestmark = pytest.mark.engine
pytest.importorskip("vllm")

CONFIG = tiny_config()
SHAPE = ModelShape.from_hf_config(CONFIG)
WEIGHTS = [tiny_weights(CONFIG, seed=seed) for seed in (0, 9)]
TOKENS = 160


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("qwen3"), CONFIG, WEIGHTS[0])


@pytest.fixture(scope="module")
def profile(checkpoint):
    return build_profile("tiny", rl_vllm.settings_from_hf(checkpoint, leaves=4))


@pytest.fixture(scope="module")
def llm(checkpoint, profile):
    with engine(profile, checkpoint, max_num_batched_tokens=1024, max_num_seqs=8) as llm:
        yield llm


@pytest.fixture(scope="module")
def pushes(tmp_path_factory):
    """(directory, version) of both sets of weights, as steps 0 and 1 of one run."""
    made = []
    for step, weights in enumerate(WEIGHTS):
        manifest = Manifest.from_tensors(weights)
        version = PolicyVersion("run", step, manifest.digest)
        made.append((write_weights(tmp_path_factory.mktemp("push") / "v", weights, version, manifest), version))
    return made


@pytest.mark.field_report("R49")
@pytest.mark.parametrize("shared", [511, 512, 513])
def test_phase_prefix_of_511_512_513_tokens_cold_warm_and_after_a_flush(llm, shared):
    start = prompt(shared, shared)
    prompts = [start + prompt(1000 + i, 9) for i in range(3)]
    params = [sampled(40 + i) for i in range(3)]

    def answers() -> tuple[list[Any], int]:
        outputs = raw_generate(llm, prompts, params)
        return [tokens_and_logprobs(o) for o in outputs], sum(o.num_cached_tokens for o in outputs)

    assert llm.reset_prefix_cache()
    hits = metric(llm, "vllm:prefix_cache_hits")
    cold = [tokens_and_logprobs(raw_generate(llm, [p], [s])[0]) for p, s in zip(prompts[:1], params)]
    warm, cached = answers()
    assert cached >= 3 * (shared - shared % 32)
    assert metric(llm, "vllm:prefix_cache_hits") > hits
    assert_same(cold, warm[:1])
    assert llm.reset_prefix_cache()
    flushed, _ = answers()
    assert_same(warm, flushed)


def run_until(llm, wanted: int, done: dict[str, Any]) -> None:
    """Step until every request still running has ``wanted`` tokens; finished ones go to ``done``."""
    seen: dict[str, int] = {}
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            seen[output.request_id] = len(output.outputs[0].token_ids)
            if output.finished:
                done[output.request_id] = output
        if len(seen) == 4 and min(seen.values()) >= wanted:
            return


@pytest.mark.field_report("R61", "R62")
def test_push_while_four_requests_decode_gives_each_token_the_version_and_bits_of_its_weights(llm, profile, pushes):
    publisher = Publisher([rl_vllm.VllmEngineClient(llm)], SHAPE)
    (first_path, first), (second_path, second) = pushes
    publisher.publish(first_path, first)
    prompts = [prompt(70 + i, 5 + 40 * i) for i in range(4)]
    for i, p in enumerate(prompts):
        llm.llm_engine.add_request(str(i), {"prompt_token_ids": p}, sampled(300 + i, tokens=TOKENS))
    done: dict[str, Any] = {}
    run_until(llm, 5, done)
    assert not done, "every request must still be decoding when the weights change"
    publisher.publish(second_path, second)
    run_until(llm, TOKENS + 1, done)
    assert set(done) == {"0", "1", "2", "3"}

    outputs = [done[str(i)].outputs[0] for i in range(4)]
    spans = [rl_vllm.version_spans(o) for o in outputs]
    for s in spans:
        assert [version for version, _, _ in s] == [str(first), str(second)]
        (_, a, cut), (_, b, end) = s
        assert (a, b, end) == (0, cut, TOKENS)
        assert cut >= 5
    # each token has the bits of its own weights over the whole text before it, and of no mixture
    got = [tokens_and_logprobs(done[str(i)]) for i in range(4)]
    sequences = [p + ids for p, (ids, _) in zip(prompts, got)]
    scores = [packed_logprobs(w, SHAPE, profile.settings, sequences, temperature=0.7) for w in WEIGHTS]
    for i, (p, (_, values), s) in enumerate(zip(prompts, got, spans)):
        cut = s[0][2]
        before, after = (score[i][len(p) - 1 :] for score in scores)
        want = torch.cat([before[:cut], after[cut:]])
        assert torch.equal(values.view(torch.int32), want.view(torch.int32)), i
        assert not torch.equal(before, after)

    # the ledger, one training step later, counts such a sample from its oldest token
    ledger = StepLedger(run_id="run", max_staleness=1)
    ledger.add_version(first)
    ledger.add_sample("short", generated=1, spans=[(str(first), 0, 1)])
    ledger.consume(0, ["short"])
    ledger.add_version(second)
    ledger.add_sample("0", generated=TOKENS, spans=spans[0])
    assert (ledger.staleness("0"), ledger.mismatched_tokens("0")) == (1, spans[0][0][2])
