"""Log-probabilities of a Hugging Face checkpoint from the operators alone: one rank, packed, as a trainer computes."""

import torch

from rl_attn import attention_packed, rope_table, rotary
from rl_contract import Settings
from rl_gemm import column_parallel_linear, linear, swiglu
from rl_logprob import greedy_sample, gumbel_sample, selected_logprob
from rl_norm import rms_norm
from rl_vllm.settings import rope_scaling
from vime_sync import ModelShape


def packed_logprobs(
    weights: dict[str, torch.Tensor],
    shape: ModelShape,
    settings: Settings,
    sequences: list[list[int]],
    temperature: float = 1.0,
) -> list[torch.Tensor]:
    """fp32 log-probability of tokens 1.. of every sequence, on the CPU; computed where the weights lie."""
    lengths = [len(s) for s in sequences]
    logits = packed_logits(weights, shape, settings, sequences)
    targets = torch.cat([torch.tensor([*s[1:], s[0]]) for s in sequences]).to(logits.device)
    logp = selected_logprob(
        logits, targets, vocab_size=shape.vocab_size, temperature=temperature, vocab_tile=settings.vocab_tile
    )
    return [part[:-1] for part in logp.cpu().split(lengths)]


def packed_logits(
    weights: dict[str, torch.Tensor],
    shape: ModelShape,
    settings: Settings,
    sequences: list[list[int]],
    last: bool = False,
) -> torch.Tensor:
    """fp32 logits [T, V] of all tokens, or [sequences, V] of the last ones."""
    device = weights["model.embed_tokens.weight"].device
    tokens = torch.tensor([t for s in sequences for t in s], device=device)
    lengths = [len(s) for s in sequences]
    positions = torch.cat([torch.arange(n) for n in lengths]).to(device)
    cu = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    family = {} if settings.attention == "segments" else {"family": settings.attention}
    table = rope_table(4096, settings.rope["rotary_dim"], settings.rope["theta"], rope_scaling(settings.rope))
    eps, d = settings.norm_eps, shape.head_dim
    stream = weights["model.embed_tokens.weight"][tokens]
    delta = None
    for layer in range(shape.layers):
        at = f"model.layers.{layer}."

        def w(name: str, at: str = at) -> torch.Tensor:
            return weights[f"{at}{name}.weight"]

        if delta is None:
            x = rms_norm(stream, w("input_layernorm"), eps)
        else:
            x, stream = rms_norm(delta, w("input_layernorm"), eps, residual=stream)
        q, k, v = (column_parallel_linear(x, w(f"self_attn.{p}_proj")).view(len(tokens), -1, d) for p in "qkv")
        if shape.qk_norm:
            q, k = rms_norm(q, w("self_attn.q_norm"), eps), rms_norm(k, w("self_attn.k_norm"), eps)
        q, k = rotary(q, k, positions, table)
        out = attention_packed(
            q,
            k,
            v,
            cu_seqlens_q=cu,
            cu_seqlens_k=cu,
            scale=d**-0.5,
            key_tile=settings.key_tile,
            segment=settings.segment,
            **family,
        )
        delta = linear(out.reshape(len(tokens), -1), w("self_attn.o_proj"), leaves=settings.leaves)
        x, stream = rms_norm(delta, w("post_attention_layernorm"), eps, residual=stream)
        gate_up = torch.cat([w("mlp.gate_proj"), w("mlp.up_proj")])
        delta = linear(swiglu(column_parallel_linear(x, gate_up)), w("mlp.down_proj"), leaves=settings.leaves)
    hidden, _ = rms_norm(delta, weights["model.norm.weight"], eps, residual=stream)
    head = weights["model.embed_tokens.weight" if shape.tied else "lm_head.weight"]
    if last:
        hidden = hidden[cu[1:].long().to(device) - 1]
    return column_parallel_linear(hidden, head, out_dtype=torch.float32)


def rollout(
    weights: dict[str, torch.Tensor],
    shape: ModelShape,
    settings: Settings,
    requests: list[tuple[list[int], int, float]],
    tokens: int,
) -> list[tuple[list[int], torch.Tensor]]:
    """What an engine must say to ``(prompt, seed, temperature)``: each token from a forward pass over all before it."""
    sequences = [list(prompt) for prompt, _, _ in requests]
    device = weights["model.embed_tokens.weight"].device
    seeds = torch.tensor([seed for _, seed, _ in requests], device=device)
    cold = torch.tensor([t == 0 for _, _, t in requests], device=device)
    temperature = torch.tensor([t or 1.0 for _, _, t in requests], device=device)
    values: list[torch.Tensor] = []
    for _ in range(tokens):
        logits = packed_logits(weights, shape, settings, sequences, last=True)
        positions = torch.tensor([len(s) for s in sequences], device=device)
        scaled = {"vocab_size": shape.vocab_size, "temperature": temperature}
        drawn = gumbel_sample(logits, seeds, positions, **scaled)
        ids = torch.where(cold, greedy_sample(logits, vocab_size=shape.vocab_size), drawn)
        values.append(selected_logprob(logits, ids, vocab_tile=settings.vocab_tile, **scaled).cpu())
        for sequence, token in zip(sequences, ids.tolist()):
            sequence.append(token)
    per_request = torch.stack(values, 1)
    return [(s[-tokens:], row) for s, row in zip(sequences, per_request)]
