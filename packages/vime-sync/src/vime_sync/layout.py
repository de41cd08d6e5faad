"""Megatron-core <-> Hugging Face names and layouts of dense Llama and Qwen models, as pure permutations of bytes.

No value is computed or cast, hence a digest taken in Hugging Face coordinates is that of the trainer's own weights.
Megatron's linear_qkv is interleaved by key/value group ([q.., k, v] per group), linear_fc1 is [gate_r; up_r] per rank,
the vocabulary is padded with rows that are trimmed on the way out and zero on the way in.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import torch

from rl_contract import ContractError
from vime_sync.shape import ModelShape
from vime_sync.vllm_layout import from_vllm, shard_digests, vllm_shards

__all__ = [
    "ModelShape",
    "from_hf",
    "from_vllm",
    "megatron_shapes",
    "shard_digests",
    "to_hf",
    "vllm_shards",
]

NormSpelling = Literal["local", "fused"]
Tensors = Mapping[str, torch.Tensor]

_EMBED, _HEAD, _NORM = "embedding.word_embeddings.weight", "output_layer.weight", "decoder.final_layernorm.weight"
# where the local layer spec and the fused one (norm inside the linear layer) keep a layer's two norms
_NORMS = {
    "local": ("input_layernorm.weight", "pre_mlp_layernorm.weight"),
    "fused": ("self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight"),
}


def _norm_names(norms: str) -> tuple[str, str]:
    if norms not in _NORMS:
        raise ContractError(f"norms={norms!r}; supported: {sorted(_NORMS)}, as the trainer's layer spec keeps them")
    return _NORMS[norms]


def megatron_shapes(
    shape: ModelShape, tp: int, *, padded_vocab: int | None = None, norms: NormSpelling = "local"
) -> dict[str, tuple[int, ...]]:
    """Megatron name -> shape of one rank's tensor, for every parameter, in canonical order."""
    rows = _padded_vocab(shape, tp, padded_vocab) // tp
    qkv = shape.q_rows + 2 * shape.kv_rows
    input_norm, mlp_norm = _norm_names(norms)
    found: dict[str, tuple[int, ...]] = {_EMBED: (rows, shape.hidden)}
    for layer in range(shape.layers):
        at = f"decoder.layers.{layer}."
        found[at + input_norm] = (shape.hidden,)
        found[at + "self_attention.linear_qkv.weight"] = (qkv // tp, shape.hidden)
        if shape.qkv_bias:
            found[at + "self_attention.linear_qkv.bias"] = (qkv // tp,)
        if shape.qk_norm:
            found[at + "self_attention.q_layernorm.weight"] = (shape.head_dim,)
            found[at + "self_attention.k_layernorm.weight"] = (shape.head_dim,)
        found[at + "self_attention.linear_proj.weight"] = (shape.hidden, shape.q_rows // tp)
        found[at + mlp_norm] = (shape.hidden,)
        found[at + "mlp.linear_fc1.weight"] = (2 * shape.ffn // tp, shape.hidden)
        found[at + "mlp.linear_fc2.weight"] = (shape.hidden, shape.ffn // tp)
    found[_NORM] = (shape.hidden,)
    if not shape.tied:
        found[_HEAD] = (rows, shape.hidden)
    return found


def to_hf(
    tensors: Tensors | Sequence[Tensors], shape: ModelShape, tp: int | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``(hf_name, tensor)`` in canonical order (``ModelShape.hf_shapes``).

    Args:
        tensors: one mapping per tensor-parallel rank, in rank order; or a single mapping whose sharded tensors are the
            ranks' shards joined in rank order along the partitioned dimension (what a TP all-gather gives). Names carry
            global layer numbers, with or without ``module.`` in front; ``_extra_state`` entries are passed over.
        shape: the model; both spellings of the layer norms are accepted.
        tp: the trainer's tensor-parallel size; defaults to the number of mappings.

    Raises:
        ContractError: a name unknown to the model, a missing, doubled or mis-shaped tensor, ranks that disagree on a
            replicated tensor: all of them listed, before anything is yielded.
    """
    ranks = [tensors] if isinstance(tensors, Mapping) else list(tensors)
    joined = isinstance(tensors, Mapping)
    tp = len(ranks) if tp is None else tp
    if not joined and len(ranks) != tp:
        raise ContractError(f"to_hf got {len(ranks)} rank mappings for tp={tp}; give one mapping per rank")
    shape.check_tp(tp)
    if joined and tp > 1:
        ranks = [_JoinedShard(ranks[0], rank, tp) for rank in range(tp)]
    names = [_canonical_names(rank) for rank in ranks]
    _check_megatron(ranks, names, shape, tp)
    return _emit(ranks, names, shape, tp)


def from_hf(
    hf_tensors: Tensors,
    shape: ModelShape,
    tp_rank: int,
    tp: int,
    *,
    padded_vocab: int | None = None,
    norms: NormSpelling = "local",
) -> dict[str, torch.Tensor]:
    """This rank's Megatron tensors, contiguous copies in the type they came in.

    Args:
        hf_tensors: the whole checkpoint by Hugging Face name; a lazy mapping is read one tensor at a time.
        padded_vocab: rows of the trainer's embedding over all ranks; those beyond ``vocab_size`` are zero. Defaults to
            ``vocab_size``, which must then divide by ``tp``.
        norms: ``local`` (``input_layernorm.weight``) or ``fused`` (``self_attention.linear_qkv.layer_norm_weight``).

    Raises:
        ContractError: an unknown spelling of the norms; missing, unknown or mis-shaped tensors, all listed.
    """
    input_norm, mlp_norm = _norm_names(norms)
    shape.check_tp(tp, tp_rank)
    check_hf(hf_tensors, shape)
    padded = _padded_vocab(shape, tp, padded_vocab)
    local: dict[str, torch.Tensor] = {}

    def part(tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return tensor.chunk(tp, dim)[tp_rank].clone(memory_format=torch.contiguous_format)

    def whole(name: str) -> torch.Tensor:
        return hf_tensors[name].clone(memory_format=torch.contiguous_format)

    local[_EMBED] = _vocab_part(hf_tensors["model.embed_tokens.weight"], padded, tp_rank, tp)
    for layer in range(shape.layers):
        at, hf = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        local[at + input_norm] = whole(hf + "input_layernorm.weight")
        for kind in ("weight", "bias") if shape.qkv_bias else ("weight",):
            q, k, v = (hf_tensors[f"{hf}self_attn.{p}_proj.{kind}"] for p in "qkv")
            local[f"{at}self_attention.linear_qkv.{kind}"] = part(_interleave_qkv(q, k, v, shape))
        if shape.qk_norm:
            local[at + "self_attention.q_layernorm.weight"] = whole(hf + "self_attn.q_norm.weight")
            local[at + "self_attention.k_layernorm.weight"] = whole(hf + "self_attn.k_norm.weight")
        local[at + "self_attention.linear_proj.weight"] = part(hf_tensors[hf + "self_attn.o_proj.weight"], 1)
        local[at + mlp_norm] = whole(hf + "post_attention_layernorm.weight")
        gate, up = hf_tensors[hf + "mlp.gate_proj.weight"], hf_tensors[hf + "mlp.up_proj.weight"]
        local[at + "mlp.linear_fc1.weight"] = torch.cat([gate.chunk(tp)[tp_rank], up.chunk(tp)[tp_rank]])
        local[at + "mlp.linear_fc2.weight"] = part(hf_tensors[hf + "mlp.down_proj.weight"], 1)
    local[_NORM] = whole("model.norm.weight")
    if not shape.tied:
        local[_HEAD] = _vocab_part(hf_tensors["lm_head.weight"], padded, tp_rank, tp)
    return local


def check_hf(hf_tensors: Tensors, shape: ModelShape) -> None:
    """Raise one ContractError that lists every missing, unknown or mis-shaped Hugging Face tensor."""
    problems = shape.problems({name: tuple(tensor.shape) for name, tensor in hf_tensors.items()})
    if shape.tied and "lm_head.weight" in hf_tensors and "model.embed_tokens.weight" in hf_tensors:
        head, embed = hf_tensors["lm_head.weight"], hf_tensors["model.embed_tokens.weight"]
        if head.dtype != embed.dtype or head.shape != embed.shape or not _same_bytes(head, embed):
            problems.append("lm_head.weight differs from model.embed_tokens.weight although the model ties them")
    if problems:
        raise ContractError(f"{shape.architecture} checkpoint: " + "; ".join(problems))


class _JoinedShard(Mapping[str, torch.Tensor]):
    """Rank ``rank``'s view of a mapping that holds shards joined in rank order."""

    def __init__(self, joined: Tensors, rank: int, tp: int) -> None:
        self.joined, self.rank, self.tp = joined, rank, tp

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self.joined[name]
        dim = _partition_dim(_strip(name))
        if dim is None or tensor.shape[dim] % self.tp:
            return tensor
        return tensor.chunk(self.tp, dim)[self.rank]

    def __iter__(self) -> Iterator[str]:
        return iter(self.joined)

    def __len__(self) -> int:
        return len(self.joined)


def _strip(name: str) -> str:
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def _canonical_names(tensors: Tensors) -> dict[str, str]:
    # canonical local spelling -> the name in this mapping; wrappers and both norm spellings fall together
    respell = dict(zip(_NORMS["fused"], _NORMS["local"]))
    names: dict[str, str] = {}
    for given in tensors:
        name = _strip(given)
        if name.endswith("_extra_state"):
            continue
        for fused, local in respell.items():
            if name.endswith("." + fused):
                name = name.removesuffix(fused) + local
        if name in names:
            raise ContractError(f"{given} and {names[name]} both name {name}; give each weight once")
        names[name] = given
    return names


def _partition_dim(name: str) -> int | None:
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return 1
    if name in (_EMBED, _HEAD) or name.endswith(("linear_qkv.weight", "linear_qkv.bias", "linear_fc1.weight")):
        return 0
    return None


def _check_megatron(ranks: Sequence[Tensors], names: Sequence[dict[str, str]], shape: ModelShape, tp: int) -> None:
    problems = []
    # the trainer's own padding is free; its first rank tells it, the other ranks must agree
    rows = ranks[0][names[0][_EMBED]].shape[0] if _EMBED in names[0] else shape.vocab_size // tp
    if rows * tp < shape.vocab_size:
        problems.append(f"{_EMBED} has {rows * tp} rows over {tp} ranks, the vocabulary needs {shape.vocab_size}")
        rows = -(-shape.vocab_size // tp)
    expected = megatron_shapes(shape, tp, padded_vocab=rows * tp)
    for rank, (tensors, given) in enumerate(zip(ranks, names)):
        known = expected.keys() | ({_HEAD} if shape.tied else set())
        problems += [f"rank {rank}: unknown {given[name]}" for name in given if name not in known]
        problems += [f"rank {rank}: missing {name}" for name in expected if name not in given]
        for name, want in expected.items():
            if name in given and tuple(tensors[given[name]].shape) != want:
                got = tuple(tensors[given[name]].shape)
                problems.append(f"rank {rank}: {given[name]} has shape {got}, needed is {want}")
    if not problems:
        for name in expected:
            first = ranks[0][names[0][name]]
            for rank in range(1, tp):
                other = ranks[rank][names[rank][name]]
                if other.dtype != first.dtype:
                    problems.append(f"rank {rank}: {name} is {other.dtype}, rank 0 has {first.dtype}")
                elif _partition_dim(name) is None and not _same_bytes(first, other):
                    problems.append(f"rank {rank}: {name} is replicated but its bytes differ from rank 0")
        if shape.tied:
            for rank in range(tp):
                if _HEAD in names[rank]:
                    head, embed = ranks[rank][names[rank][_HEAD]], ranks[rank][names[rank][_EMBED]]
                    if head.shape != embed.shape or head.dtype != embed.dtype or not _same_bytes(head, embed):
                        problems.append(f"rank {rank}: {_HEAD} differs from {_EMBED} although the model ties them")
    if problems:
        raise ContractError(f"Megatron weights of {shape.architecture} at tp={tp}: " + "; ".join(problems))


def _emit(
    ranks: Sequence[Tensors], names: Sequence[dict[str, str]], shape: ModelShape, tp: int
) -> Iterator[tuple[str, torch.Tensor]]:
    def shards(name: str) -> list[torch.Tensor]:
        return [tensors[given[name]].detach() for tensors, given in zip(ranks, names)]

    def joined(name: str) -> torch.Tensor:
        dim = _partition_dim(name)
        found = shards(name)
        return found[0].contiguous() if dim is None or tp == 1 else torch.cat(found, dim)

    yield "model.embed_tokens.weight", joined(_EMBED)[: shape.vocab_size].contiguous()
    for layer in range(shape.layers):
        at, hf = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        yield hf + "input_layernorm.weight", joined(at + _NORMS["local"][0])
        split = {
            kind: _split_qkv(joined(f"{at}self_attention.linear_qkv.{kind}"), shape)
            for kind in (("weight", "bias") if shape.qkv_bias else ("weight",))
        }
        for i, letter in enumerate("qkv"):
            for kind, parts in split.items():
                yield f"{hf}self_attn.{letter}_proj.{kind}", parts[i]
        if shape.qk_norm:
            yield hf + "self_attn.q_norm.weight", joined(at + "self_attention.q_layernorm.weight")
            yield hf + "self_attn.k_norm.weight", joined(at + "self_attention.k_layernorm.weight")
        yield hf + "self_attn.o_proj.weight", joined(at + "self_attention.linear_proj.weight").contiguous()
        yield hf + "post_attention_layernorm.weight", joined(at + _NORMS["local"][1])
        halves = [shard.chunk(2) for shard in shards(at + "mlp.linear_fc1.weight")]
        yield hf + "mlp.gate_proj.weight", torch.cat([gate for gate, _ in halves])
        yield hf + "mlp.up_proj.weight", torch.cat([up for _, up in halves])
        yield hf + "mlp.down_proj.weight", joined(at + "mlp.linear_fc2.weight").contiguous()
    yield "model.norm.weight", joined(_NORM)
    if not shape.tied:
        yield "lm_head.weight", joined(_HEAD)[: shape.vocab_size].contiguous()


def _split_qkv(qkv: torch.Tensor, shape: ModelShape) -> list[torch.Tensor]:
    # [Hkv, (q per group + 2) * D, ...] -> q [Hq*D, ...], k [Hkv*D, ...], v [Hkv*D, ...]
    per_group, d = shape.heads // shape.kv_heads, shape.head_dim
    grouped = qkv.reshape(shape.kv_heads, (per_group + 2) * d, *qkv.shape[1:])
    return [p.reshape(-1, *qkv.shape[1:]).contiguous() for p in grouped.split([per_group * d, d, d], dim=1)]


def _interleave_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shape: ModelShape) -> torch.Tensor:
    groups = [x.reshape(shape.kv_heads, -1, *x.shape[1:]) for x in (q, k, v)]
    return torch.cat(groups, dim=1).reshape(-1, *q.shape[1:])


def _padded_vocab(shape: ModelShape, tp: int, padded_vocab: int | None) -> int:
    padded = shape.vocab_size if padded_vocab is None else padded_vocab
    if padded < shape.vocab_size or padded % tp:
        raise ContractError(
            f"padded_vocab {padded} does not serve a vocabulary of {shape.vocab_size} at tp={tp}; give padded_vocab >= "
            f"{shape.vocab_size} and a multiple of {tp}"
        )
    return padded


def _vocab_part(weight: torch.Tensor, padded: int, rank: int, tp: int) -> torch.Tensor:
    rows = padded // tp
    part = weight.new_zeros(rows, weight.shape[1])
    real = weight[rank * rows : (rank + 1) * rows]
    part[: real.shape[0]] = real
    return part


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = a.detach().contiguous().reshape(-1), b.detach().contiguous().reshape(-1)
    return torch.equal(a.view(torch.uint8), b.to(a.device).view(torch.uint8))
