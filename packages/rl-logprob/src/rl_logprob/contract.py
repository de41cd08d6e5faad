"""The contract of the boundary ``logprob``."""

from rl_contract import Contract, ContractError, Settings

# A term exp(x - tile maximum) <= 1 is held in steps of 2**-40: a tile of n ids is off by at most n * 2**-41 of its
# largest term, and a tile of 2**22 ids still fits an int64.
FIXED_POINT_BITS = 40
MAX_VOCAB_TILE = 1 << 22

_MODEL_TYPES = {"cpu": ("bfloat16", "float32")}


def logprob(settings: Settings) -> Contract:
    """Log-probability of a token under ``softmax(logits / temperature)`` over the real vocabulary."""
    if settings.arch not in _MODEL_TYPES:
        raise ContractError(f"logprob: arch={settings.arch!r}, supported: {sorted(_MODEL_TYPES)}; choose one of these")
    if settings.dtype not in _MODEL_TYPES[settings.arch]:
        raise ContractError(f"logprob: dtype={settings.dtype!r}, supported: {_MODEL_TYPES[settings.arch]}")
    if settings.vocab_tile > MAX_VOCAB_TILE:
        raise ContractError(f"logprob: vocab_tile={settings.vocab_tile}, supported: up to {MAX_VOCAB_TILE}")
    return Contract(
        boundary="logprob",
        dependency=(
            f"ids 0..{settings.vocab_size - 1} of the token's own row, later ids are -inf before the maximum; "
            "logits are the fp32 accumulators of the lm_head chain (gemm.column), never rounded"
        ),
        partition=(
            f"forward: global ids in tiles of {settings.vocab_tile} from id 0; "
            f"gradient of hidden: the padded vocabulary in {settings.leaves} equal contiguous leaves, "
            f"each in blocks of {settings.vocab_tile} ids; gradient of weight: as gemm.column"
        ),
        merge=(
            f"in a tile: exact maximum, and the exact int64 sum of round(exp(x - maximum) * 2**{FIXED_POINT_BITS}), "
            "order-free; over tiles: maximum M, then sum of tile sums times exp(tile maximum - M), left in id order "
            "from +0 in fp64, a fully masked tile being +0; gradient of hidden: each block a chain, blocks folded left "
            "in id order in fp32, leaves by the balanced tree, the upper levels over ranks in rank order"
        ),
        precision={
            "input": "float32",
            "product": "float64",
            "accumulator": "int64",
            "state": "float64",
            "output": "float32",
        },
        rounding=(
            "temperature to float32",
            "x = logit / temperature to float32",
            "x - maximum, times log2(e), 2**that: each float64",
            f"term to a multiple of 2**-{FIXED_POINT_BITS}, half up",
            "tile weight, product and sum: each float64",
            "(x - M) - log(sum): each float64",
            "logp to float32, nearest even",
            "gradient of logits: float64 to float32 to the model's type, before both GEMMs",
        ),
        primitives={
            "exp2": "rl_contract.primitives.exp2_f64",
            "log": "rl_contract.primitives.log_f64",
            "division": "IEEE float32",
        },
        arch=settings.arch,
    )
