"""The head never holds a tensor of tokens times vocabulary: every output of every operator is measured."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import rl_gemm
import rl_logprob as lp
from rl_logprob import linear_cpu

TOKENS, HIDDEN, VOCAB, TILE = 512, 16, 8000, 64
PADDED = lp.padded_vocab_size(VOCAB, TILE)


class Largest(TorchDispatchMode):
    """The most elements that any operator returned, in forward and backward."""

    def __init__(self):
        super().__init__()
        self.elements, self.op = 0, ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.numel() > self.elements:
                self.elements, self.op = leaf.numel(), str(func)
        return result


def inputs():
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=g).bfloat16()
    weight = (torch.randn(PADDED, HIDDEN, generator=g) * 0.3).bfloat16()
    return hidden, weight, torch.randint(0, VOCAB, (TOKENS,), generator=g)


def step(hidden, weight, targets):
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    with Largest() as seen:
        logp, entropy = lp.linear_logprob(
            hidden, weight, targets, vocab_size=VOCAB, vocab_tile=TILE, leaves=4, return_entropy=True
        )
        (logp + entropy).sum().backward()
    return seen, (logp.detach(), entropy.detach(), hidden.grad, weight.grad)


@pytest.mark.field_report("R45")
def test_no_operator_returns_tokens_times_vocabulary(monkeypatch):
    hidden, weight, targets = inputs()
    _, whole = step(hidden, weight, targets)
    monkeypatch.setattr(linear_cpu, "CHUNK_ELEMENTS", 4 * TOKENS * TILE)
    seen, chunked = step(hidden, weight, targets)
    # a chunk of logits, or the weight itself and its gradient: 30 times less than the logits would be
    assert seen.elements <= max(4 * TOKENS * TILE, weight.numel()), seen.op
    assert seen.elements * 30 < TOKENS * VOCAB
    for a, b in zip(whole, chunked):
        assert torch.equal(a, b)


@pytest.mark.field_report("R45")
def test_the_default_chunk_bounds_a_long_sequence_of_a_large_vocabulary():
    """20000 tokens over 151936 ids are 11 GiB of fp32 logits; a chunk is 16 MiB, or one tile where that is more."""
    assert linear_cpu._chunk(1024, 155_648, 512) * 1024 == linear_cpu.CHUNK_ELEMENTS == 1 << 22
    assert linear_cpu._chunk(20_000, 155_648, 512) == 512


def test_materialised_logits_are_noticed():
    hidden, weight, targets = inputs()
    with Largest() as seen:
        lp.selected_logprob(rl_gemm.linear(hidden, weight, out_dtype=torch.float32), targets, vocab_size=VOCAB)
    assert seen.elements == TOKENS * PADDED
