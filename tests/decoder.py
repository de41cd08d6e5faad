"""A dense decoder built from the packages alone, as a trainer runs it (packed) and as a rollout runs it (paged)."""

from dataclasses import dataclass, field

import torch

from rl_attn import PagedKV, attention_packed, attention_paged, rope_table, rotary, write_paged
from rl_contract import Communicator, SingleRank
from rl_gemm import column_parallel_linear, linear, row_parallel_linear, swiglu
from rl_logprob import linear_logprob, padded_vocab_size, selected_logprob
from rl_norm import rms_norm

HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB, TILE, LEAVES = 128, 256, 2, 8, 4, 32, 203, 16, 4
EPS, SCALE, BLOCK = 1e-6, HEAD_DIM**-0.5, 16
ROPE = rope_table(4096, HEAD_DIM, 1e6)


def make_weights(seed: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Weights of realistic scale with a few outlier channels; qkv and gate_up stacked by kv group and by half."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * std).to(dtype)

    def gain(size: int) -> torch.Tensor:
        g = 1 + 0.1 * torch.randn(size, generator=generator)
        g[:: max(1, size // 3)] *= 6
        return g.to(dtype)

    rows = KV_HEADS * (HEADS // KV_HEADS + 2) * HEAD_DIM
    weights = {"embed": normal(VOCAB, HIDDEN, std=1.0), "norm": gain(HIDDEN)}
    weights["head"] = torch.zeros(padded_vocab_size(VOCAB, TILE), HIDDEN, dtype=dtype)
    weights["head"][:VOCAB] = normal(VOCAB, HIDDEN, std=0.2)
    for i in range(LAYERS):
        weights |= {
            f"{i}.norm1": gain(HIDDEN),
            f"{i}.norm2": gain(HIDDEN),
            f"{i}.q_norm": gain(HEAD_DIM),
            f"{i}.k_norm": gain(HEAD_DIM),
            f"{i}.qkv": normal(rows, HIDDEN, std=0.1),
            f"{i}.o": normal(HIDDEN, HEADS * HEAD_DIM, std=0.1),
            f"{i}.gate_up": normal(2 * FFN, HIDDEN, std=0.1),
            f"{i}.down": normal(HIDDEN, FFN, std=0.1),
        }
    return weights


def shard(weights: dict[str, torch.Tensor], rank: int, world: int) -> dict[str, torch.Tensor]:
    """The slices rank ``rank`` of ``world`` holds."""
    out = dict(weights)
    for name, w in weights.items():
        part = name.split(".")[-1]
        if part in ("qkv", "head"):
            out[name] = w.chunk(world, 0)[rank].clone()
        elif part == "gate_up":
            out[name] = torch.cat([half.chunk(world, 0)[rank] for half in w.chunk(2, 0)])
        elif part in ("o", "down"):
            out[name] = w.chunk(world, 1)[rank].clone()
    return out


@dataclass
class Decoder:
    """One rank. ``attend`` decides the phase; everything else is the same code for trainer and rollout."""

    weights: dict[str, torch.Tensor]
    comm: Communicator = field(default_factory=SingleRank)
    leaves: int = LEAVES

    def hidden(self, tokens: torch.Tensor, positions: torch.Tensor, attend) -> torch.Tensor:
        w, comm = self.weights, self.comm
        group = HEADS // KV_HEADS
        stream, delta = w["embed"][tokens], None
        for i in range(LAYERS):
            if delta is None:
                x = rms_norm(stream, w[f"{i}.norm1"], EPS)
            else:
                x, stream = rms_norm(delta, w[f"{i}.norm1"], EPS, residual=stream)
            qkv = column_parallel_linear(x, w[f"{i}.qkv"], comm=comm, leaves=LEAVES)
            qkv = qkv.view(len(tokens), -1, group + 2, HEAD_DIM)
            q, k, v = qkv[:, :, :group].reshape(len(tokens), -1, HEAD_DIM), qkv[:, :, group], qkv[:, :, group + 1]
            q = rms_norm(q, w[f"{i}.q_norm"], EPS, comm=comm, leaves=LEAVES)
            k = rms_norm(k, w[f"{i}.k_norm"], EPS, comm=comm, leaves=LEAVES)
            q, k = rotary(q, k, positions, ROPE)
            out = attend(i, q, k, v).reshape(len(tokens), -1)
            delta = row_parallel_linear(out, w[f"{i}.o"], comm=comm, leaves=self.leaves)
            x, stream = rms_norm(delta, w[f"{i}.norm2"], EPS, residual=stream)
            act = swiglu(column_parallel_linear(x, w[f"{i}.gate_up"], comm=comm, leaves=LEAVES, fused=2))
            delta = row_parallel_linear(act, w[f"{i}.down"], comm=comm, leaves=LEAVES)
        return rms_norm(delta, w["norm"], EPS, residual=stream)[0]

    def train_logprob(self, sequences: list[torch.Tensor], temperature: float = 1.0) -> list[torch.Tensor]:
        """Log-probability of tokens 1.. of every sequence, all packed into one call. Differentiable."""
        tokens = torch.cat(sequences)
        lengths = torch.tensor([len(s) for s in sequences])
        cu = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(torch.int32)
        positions = torch.cat([torch.arange(n) for n in lengths])

        def attend(_layer, q, k, v):
            return attention_packed(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, scale=SCALE)

        hidden = self.hidden(tokens, positions, attend)
        targets = torch.cat([torch.cat([s[1:], s[:1]]) for s in sequences])
        logp = linear_logprob(
            hidden, self.weights["head"], targets, vocab_size=VOCAB, temperature=temperature, vocab_tile=TILE,
            comm=self.comm, leaves=LEAVES,
        )  # fmt: skip
        return [part[:-1] for part in logp.split(lengths.tolist())]


class Rollout:
    """A paged cache with shuffled pages; ``step`` advances any mix of requests by any number of tokens each."""

    def __init__(self, decoder: Decoder, requests: int, max_length: int, seed: int = 0) -> None:
        self.decoder = decoder
        pages = (max_length + BLOCK - 1) // BLOCK
        heads = KV_HEADS // decoder.comm.world_size
        dtype = decoder.weights["embed"].dtype
        shape = (requests * pages + 1, heads, BLOCK, HEAD_DIM)
        self.caches = [
            PagedKV(torch.full(shape, torch.nan, dtype=dtype), torch.full(shape, torch.nan, dtype=dtype))
            for _ in range(LAYERS)
        ]
        order = torch.randperm(requests * pages, generator=torch.Generator().manual_seed(seed)) + 1
        self.table = order.view(requests, pages).to(torch.int32)
        self.lengths = [0] * requests

    def step(self, work: list[tuple[int, torch.Tensor]]) -> list[torch.Tensor]:
        """(request, its next tokens) -> fp32 logits [tokens, VOCAB] per entry, after writing keys and values."""
        requests = [r for r, _ in work]
        starts = [self.lengths[r] for r in requests]
        positions = torch.cat([torch.arange(s, s + len(t)) for s, (_, t) in zip(starts, work)])
        row_of = torch.cat([torch.full((len(t),), r) for r, t in work])
        slots = self.table[row_of, positions // BLOCK].to(torch.int64) * BLOCK + positions % BLOCK
        for r, t in work:
            self.lengths[r] += len(t)
        counts = torch.tensor([len(t) for _, t in work])
        query_start = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).to(torch.int32)
        seq_lens = torch.tensor([self.lengths[r] for r in requests], dtype=torch.int32)

        def attend(layer, q, k, v):
            write_paged(self.caches[layer], k, v, slots)
            return attention_paged(
                q, self.caches[layer], query_start_loc=query_start, seq_lens=seq_lens,
                block_table=self.table[requests], scale=SCALE,
            )  # fmt: skip

        hidden = self.decoder.hidden(torch.cat([t for _, t in work]), positions, attend)
        logits = linear(hidden, self.decoder.weights["head"], out_dtype=torch.float32)
        logits = self.decoder.comm.all_gather(logits, dim=1)[:, :VOCAB]
        return list(logits.split(counts.tolist()))

    def score(self, sequences: list[torch.Tensor], chunk: int, temperature: float = 1.0) -> list[torch.Tensor]:
        """Log-probability of tokens 1.. of every sequence, ``chunk`` tokens a step, all requests side by side."""
        parts: list[list[torch.Tensor]] = [[] for _ in sequences]
        for begin in range(0, max(map(len, sequences)), chunk):
            work = [(r, s[begin : begin + chunk]) for r, s in enumerate(sequences) if begin < len(s)]
            for (r, tokens), logits in zip(work, self.step(work)):
                following = sequences[r][begin + 1 : begin + 1 + len(tokens)]
                parts[r].append(
                    selected_logprob(
                        logits[: len(following)], following, vocab_size=VOCAB, temperature=temperature, vocab_tile=TILE
                    )
                )
        return [torch.cat(p) for p in parts]
