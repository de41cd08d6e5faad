"""Which bytes of each Hugging Face tensor a vLLM worker holds, so that the trainer can state every worker's digests.

vLLM stacks q, k, v of a rank into one qkv_proj and gate, up into gate_up_proj, replicates a key/value head where the
tensor-parallel size exceeds their number, and pads the vocabulary to a multiple of 64 with zero rows.
"""

from collections.abc import Iterator, Mapping

import torch

from rl_contract import ContractError
from vime_sync.digest import WEIGHT_DIGEST, digests
from vime_sync.shape import ModelShape

VOCAB_PADDING = 64


def vllm_shards(
    hf_tensors: Mapping[str, torch.Tensor], shape: ModelShape, tp_rank: int, tp: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``(hf_name, slice held by this rank)`` in canonical order; padded vocabulary rows are there, as zeros.

    A lazy mapping is read one tensor at a time.

    Raises:
        ContractError: ``tp`` does not fit, or a tensor is missing: at once; a tensor is mis-shaped: when reached.
    """
    shape.check_tp(tp, tp_rank)
    return ((name, shard) for (rank, name), shard in _all_shards(hf_tensors, shape, tp, range(tp_rank, tp_rank + 1)))


def shard_digests(
    hf_tensors: Mapping[str, torch.Tensor], shape: ModelShape, tp: int, algorithm: str = WEIGHT_DIGEST
) -> dict[tuple[int, str], str]:
    """``{(rank, hf_name): digest}`` over all ranks: what every worker of an engine of this ``tp`` must report."""
    shape.check_tp(tp)
    return digests(algorithm, _all_shards(hf_tensors, shape, tp, range(tp)))


def _all_shards(
    hf_tensors: Mapping[str, torch.Tensor], shape: ModelShape, tp: int, ranks: range
) -> Iterator[tuple[tuple[int, str], torch.Tensor]]:
    expected = dict(shape.hf_shapes())
    if missing := [name for name in expected if name not in hf_tensors]:
        raise ContractError(f"{shape.architecture} weights lack {', '.join(missing)}; give the whole model")

    def shards() -> Iterator[tuple[tuple[int, str], torch.Tensor]]:
        for name, want in expected.items():
            tensor = hf_tensors[name]
            if tuple(tensor.shape) != want:
                raise ContractError(f"{name} has shape {tuple(tensor.shape)}, {shape.architecture} needs {want}")
            for rank in ranks:
                yield (rank, name), _shard(name, tensor, shape, rank, tp)

    return shards()


def from_vllm(
    parameters: Mapping[str, torch.Tensor], shape: ModelShape, tp_rank: int, tp: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """The inverse, run inside a worker: its live parameters under Hugging Face names, as views where possible.

    Args:
        parameters: ``dict(model.named_parameters())`` of a vLLM Llama or Qwen model on rank ``tp_rank``.

    Raises:
        ContractError: a parameter is unknown, missing or has a shape other than this rank's (an engine that packed its
            weights away shows up here); a head that should be tied holds other bytes than the embedding.
    """
    shape.check_tp(tp, tp_rank)
    expected = {name: _shard_shape(name, want, shape, tp) for name, want in shape.hf_shapes()}
    found: dict[str, torch.Tensor] = {}
    problems = []
    for name, tensor in parameters.items():
        if name == "lm_head.weight" and shape.tied:
            embed = parameters.get("model.embed_tokens.weight")
            if embed is not tensor and (embed is None or not torch.equal(embed, tensor)):
                problems.append("lm_head.weight differs from model.embed_tokens.weight although the model ties them")
            continue
        stacked = _stacked(name, expected)
        if stacked is None:
            problems.append(f"unknown {name}")
            continue
        rows = [expected[part][0] for part in stacked]
        if tensor.dim() == 0 or tensor.shape[0] != sum(rows):
            problems.append(f"{name} has shape {tuple(tensor.shape)}, needed are {sum(rows)} rows")
            continue
        found.update(zip(stacked, tensor.detach().split(rows)))
    for name, want in expected.items():
        if name not in found:
            problems.append(f"missing {name}")
        elif tuple(found[name].shape) != want:
            problems.append(f"{name} has shape {tuple(found[name].shape)}, needed is {want}")
    if problems:
        raise ContractError(f"vLLM rank {tp_rank} of {tp}, {shape.architecture}: " + "; ".join(problems))
    return ((name, found[name]) for name in expected)


def padded_vocab(shape: ModelShape) -> int:
    return -(-shape.vocab_size // VOCAB_PADDING) * VOCAB_PADDING


def _stacked(name: str, expected: Mapping[str, object]) -> list[str] | None:
    if ".qkv_proj." in name:
        parts = [name.replace(".qkv_proj.", f".{p}_proj.") for p in "qkv"]
    elif ".gate_up_proj." in name:
        parts = [name.replace(".gate_up_proj.", f".{p}_proj.") for p in ("gate", "up")]
    else:
        parts = [name]
    return parts if all(part in expected for part in parts) else None


def _kv_rows_per_rank(shape: ModelShape, tp: int) -> int:
    return shape.head_dim * max(1, shape.kv_heads // tp)


def _shard(name: str, tensor: torch.Tensor, shape: ModelShape, rank: int, tp: int) -> torch.Tensor:
    if name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows = _vocab_rows(shape, tp)
        real = tensor[rank * rows : (rank + 1) * rows]
        if real.shape[0] == rows:
            return real
        return torch.cat([real, real.new_zeros(rows - real.shape[0], tensor.shape[1])])
    if ".k_proj." in name or ".v_proj." in name:
        rows = _kv_rows_per_rank(shape, tp)
        # with more ranks than heads, tp // kv_heads neighbours hold the same head
        at = rank // max(1, tp // shape.kv_heads)
        return tensor[at * rows : (at + 1) * rows]
    if ".q_proj." in name or ".gate_proj." in name or ".up_proj." in name:
        return tensor.chunk(tp)[rank]
    if ".o_proj." in name or ".down_proj." in name:
        return tensor.chunk(tp, 1)[rank]
    return tensor


def _shard_shape(name: str, whole: tuple[int, ...], shape: ModelShape, tp: int) -> tuple[int, ...]:
    if name in ("model.embed_tokens.weight", "lm_head.weight"):
        return (_vocab_rows(shape, tp), whole[1])
    if ".k_proj." in name or ".v_proj." in name:
        return (_kv_rows_per_rank(shape, tp), *whole[1:])
    if ".q_proj." in name or ".gate_proj." in name or ".up_proj." in name:
        return (whole[0] // tp, *whole[1:])
    if ".o_proj." in name or ".down_proj." in name:
        return (whole[0], whole[1] // tp)
    return whole


def _vocab_rows(shape: ModelShape, tp: int) -> int:
    padded = padded_vocab(shape)
    if padded % tp:
        raise ContractError(f"tp={tp} does not divide the padded vocabulary {padded}; choose a tp that divides 64")
    return padded // tp
