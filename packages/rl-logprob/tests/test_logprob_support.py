"""Which ids take part: the real vocabulary, no more and no less, on the side with logits and on the side without."""

import math

import pytest
import torch

import rl_gemm
import rl_logprob as lp
from rl_contract import ContractError

# a tokenizer of 151669 ids under a head of 151936 rows; these ids were seen in rollouts
TOKENIZER, MODEL, TILE = 151_669, 151_936, 512
SEEN = (151_687, 151_700, 151_708, 151_791, 151_908)


def bits(x):
    return x.contiguous().view(torch.int32)


@pytest.fixture(scope="module")
def head():
    """Hidden states and a head whose rows beyond the tokenizer would win every draw."""
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(6, 8, generator=g).bfloat16()
    weight = torch.zeros(lp.padded_vocab_size(MODEL, TILE), 8, dtype=torch.bfloat16)
    weight[:MODEL] = torch.randn(MODEL, 8, generator=g).bfloat16()
    weight[TOKENIZER:MODEL] *= 8
    return hidden, weight, torch.randint(0, TOKENIZER, (6,), generator=g)


@pytest.mark.field_report("R79")
def test_ids_beyond_the_tokenizer_take_no_part_on_either_side(head):
    hidden, weight, targets = head
    logits = rl_gemm.linear(hidden, weight[:MODEL], out_dtype=torch.float32)
    assert int(logits.argmax(1).min()) >= TOKENIZER, "without the mask every draw would be one of these ids"
    rollout = lp.selected_logprob(logits, targets, vocab_size=TOKENIZER, vocab_tile=TILE)
    train = lp.linear_logprob(hidden, weight, targets, vocab_size=TOKENIZER, vocab_tile=TILE)
    assert torch.equal(bits(rollout), bits(train))
    exact = torch.log_softmax(logits[:, :TOKENIZER].double(), 1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(rollout.double(), exact, rtol=1e-6, atol=0)
    other = lp.selected_logprob(logits, targets, vocab_size=MODEL, vocab_tile=TILE)
    assert float((other - rollout).abs().min()) > 0.1


@pytest.mark.field_report("R79")
def test_ids_beyond_the_tokenizer_are_neither_drawn_nor_scored(head):
    hidden, weight, _ = head
    logits = rl_gemm.linear(hidden, weight[:MODEL], out_dtype=torch.float32)
    seeds, positions = torch.zeros(6, dtype=torch.int64), torch.arange(6)
    for seed in range(20):
        assert int(lp.gumbel_sample(logits, seeds + seed, positions, vocab_size=TOKENIZER).max()) < TOKENIZER
    assert int(lp.greedy_sample(logits, vocab_size=TOKENIZER).max()) < TOKENIZER
    for bad in SEEN:
        targets = torch.tensor([0, 1, 2, bad, 4, 5])
        with pytest.raises(ContractError, match=f"target {bad} in row 3"):
            lp.selected_logprob(logits, targets, vocab_size=TOKENIZER)
        with pytest.raises(ContractError, match=f"target {bad} in row 3"):
            lp.linear_logprob(hidden, weight, targets, vocab_size=TOKENIZER)


@pytest.mark.field_report("R04")
@pytest.mark.parametrize(("top_p", "bias"), [(0.95, 0.0513), (0.9, 0.1053), (0.8, 0.2231)])
def test_renormalising_over_a_nucleus_shifts_every_value_by_the_kept_mass(top_p, bias):
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(8, 32_000, generator=g) * 2.5
    full = lp.full_logprob(logits, vocab_size=32_000)
    order = full.argsort(1, descending=True)
    mass = full.double().exp().gather(1, order).cumsum(1)
    # the smallest set of the likeliest ids whose mass reaches top_p
    count = (mass < top_p).sum(1) + 1
    keep = torch.zeros_like(full, dtype=torch.bool).scatter(1, order, torch.arange(32_000) < count[:, None])
    kept = lp.full_logprob(torch.where(keep, logits, -torch.inf), vocab_size=32_000)
    shift = (kept - full)[keep]
    assert float((shift - bias).abs().max()) < 2e-3
    assert abs(bias + math.log(top_p)) < 1e-4
