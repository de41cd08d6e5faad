"""The contract of the boundary ``logprob``."""

from rl_contract import Contract, ContractError, Settings

# A term exp(x - tile maximum) <= 1 is held in steps of 2**-40: a tile of n ids is off by at most n * 2**-41 of its
# largest term, and a tile of 2**22 ids still fits an int64.
FIXED_POINT_BITS = 40
MAX_VOCAB_TILE = 1 << 22

GPU_ARCHS = ("sm90", "gfx942", "gfx950")
# weights that top-p adds up, on every device: steps of 2**-42, so that 2**20 ids fit an int64
SUPPORT_BITS = 42
SUPPORT_MAX_VOCAB = 1 << 20
# a smaller min-p than this acts as this: ids it would drop weigh nothing by far
SUPPORT_MIN_P = 1e-300

# ids whose terms a GPU sums against one maximum
GPU_TILE = 128
# a row's sum over tiles is held in steps of 2**-42: 2**20 ids fit an int64
GPU_MERGE_BITS = 42
GPU_MAX_VOCAB = 1 << 20
# ids of one chain in the gradient of hidden, tokens of one chain in the gradient of weight
GPU_GRAD_BLOCK = 4096
GPU_TOKEN_BLOCK = 8192

_MODEL_TYPES = {"cpu": ("bfloat16", "float32")} | dict.fromkeys(GPU_ARCHS, ("bfloat16",))


def logprob(settings: Settings) -> Contract:
    """Log-probability of a token under ``softmax(logits / temperature)`` over the real vocabulary."""
    if settings.arch not in _MODEL_TYPES:
        raise ContractError(f"logprob: arch={settings.arch!r}, supported: {sorted(_MODEL_TYPES)}; choose one of these")
    if settings.dtype not in _MODEL_TYPES[settings.arch]:
        raise ContractError(f"logprob: dtype={settings.dtype!r}, supported: {_MODEL_TYPES[settings.arch]}")
    if settings.vocab_tile > MAX_VOCAB_TILE:
        raise ContractError(f"logprob: vocab_tile={settings.vocab_tile}, supported: up to {MAX_VOCAB_TILE}")
    return _cpu(settings) if settings.arch == "cpu" else _gpu(settings)


def _dependency(settings: Settings) -> str:
    return (
        f"ids 0..{settings.vocab_size - 1} of the token's own row, later ids are -inf before the maximum; "
        "logits are the fp32 accumulators of the lm_head chain (gemm.column), never rounded"
    )


def _cpu(settings: Settings) -> Contract:
    return Contract(
        boundary="logprob",
        dependency=_dependency(settings),
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


def _gpu(settings: Settings) -> Contract:
    if settings.vocab_tile % GPU_TILE:
        raise ContractError(
            f"logprob: vocab_tile={settings.vocab_tile} on {settings.arch}, supported: multiples of {GPU_TILE}; use 512"
        )
    if settings.vocab_size > GPU_MAX_VOCAB:
        raise ContractError(
            f"logprob: vocab_size={settings.vocab_size} on {settings.arch}, supported: up to {GPU_MAX_VOCAB}"
        )
    return Contract(
        boundary="logprob",
        dependency=_dependency(settings),
        partition=(
            f"forward: global ids in tiles of {GPU_TILE} from id 0, shards are whole multiples of "
            f"{settings.vocab_tile}; gradient of hidden: the padded vocabulary in {settings.leaves} equal contiguous "
            f"leaves, each in blocks of {GPU_GRAD_BLOCK} ids from its start; gradient of weight: tokens in packed "
            f"order in blocks of {GPU_TOKEN_BLOCK}"
        ),
        merge=(
            f"in a tile: exact maximum, and the exact integer sum of exp(x - maximum) in steps of "
            f"2**-{FIXED_POINT_BITS}; over tiles and ranks: exact maximum M, and the exact int64 sum of tile sum times "
            f"exp(tile maximum - M) in steps of 2**-{GPU_MERGE_BITS}; all order-free; gradient of hidden: each block "
            "a chain, blocks folded left in id order in fp32, leaves by the balanced tree, the upper levels over "
            "ranks in rank order; gradient of weight: each block a chain, folded left in fp32 onto main_grad, or +0"
        ),
        precision={
            "input": "float32",
            "product": "float32 in a tile, float64 over tiles",
            "accumulator": "int64",
            "state": "float64",
            "output": "float32",
        },
        rounding=(
            "temperature to float32",
            "x = logit / temperature to float32",
            "x - maximum to float32, at least -30; exp to float32",
            f"term to a multiple of 2**-{FIXED_POINT_BITS}, nearest even",
            f"tile sum times weight in float64, to a multiple of 2**-{GPU_MERGE_BITS}, half up",
            "(x - M) - log(sum): each float64",
            "logp to float32, nearest even",
            "gradient of logits: every step float32, M and log(sum) too, then to the model's type, before both GEMMs",
        ),
        primitives={
            "exp": "rl_logprob.triton_tiles.exp_f32: degree 6 polynomial with explicit fma",
            "exp2 over tiles": "rl_contract.primitives.exp2_f64",
            "log": "rl_contract.primitives.log_f64",
            "division": "IEEE float32",
        },
        arch=settings.arch,
    )
