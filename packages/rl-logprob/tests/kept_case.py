"""A head whose padding holds what would win, its logits, and a generator that goes on from there."""

import torch

import rl_gemm
import rl_logprob as lp

VOCAB, TILE = 700, 32


def make(tokens=37, hidden=24, seed=0):
    g = torch.Generator().manual_seed(seed)
    h = torch.randn(tokens, hidden, generator=g).bfloat16()
    w = torch.full((lp.padded_vocab_size(VOCAB, TILE), hidden), 9.0, dtype=torch.bfloat16)
    w[:VOCAB] = (torch.randn(VOCAB, hidden, generator=g) * 0.6).bfloat16()
    return h, w, rl_gemm.linear(h, w, out_dtype=torch.float32), g
