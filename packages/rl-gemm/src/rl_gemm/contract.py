"""The contracts of the linear layers and of SwiGLU."""

from rl_contract import Contract, ContractError, Settings

TOKEN_BLOCK = 64

_MODEL_TYPES = {"cpu": ("bfloat16", "float32")}
_STEP = {
    "cpu": "one k at a time, multiply rounded, then add rounded, never contracted",
}


def _check(settings: Settings, boundary: str) -> None:
    if settings.arch not in _MODEL_TYPES:
        raise ContractError(
            f"{boundary}: arch={settings.arch!r}, supported: {sorted(_MODEL_TYPES)}; choose one of these"
        )
    if settings.dtype not in _MODEL_TYPES[settings.arch]:
        raise ContractError(
            f"{boundary}: dtype={settings.dtype!r} on {settings.arch}, supported: {_MODEL_TYPES[settings.arch]}; "
            "convert the model to one of these"
        )


def _precision(settings: Settings) -> dict[str, str]:
    return {
        "input": settings.dtype,
        "product": "float32",
        "accumulator": "float32",
        "state": "float32",
        "output": settings.dtype,
    }


def _weight_gradient() -> str:
    return (
        f"weight and bias gradient: tokens in packed order in blocks of {TOKEN_BLOCK} from token 0, each block a chain "
        "from +0, blocks folded left from +0, kept in fp32"
    )


def column(settings: Settings) -> Contract:
    """Column-parallel linear layers: qkv, gate_up, lm_head."""
    _check(settings, "gemm.column")
    return Contract(
        boundary="gemm.column",
        dependency="output (t, n) reads row t of x and row n of weight, all K elements, no other row",
        partition=(
            f"forward: none, K is one chain; input gradient: tree({settings.leaves}) over the global N, for a fused "
            f"[gate; up] weight leaf g is the g-th part of gate, then the g-th part of up; {_weight_gradient()}"
        ),
        merge=(
            "chain: from +0, k ascending, "
            + _STEP[settings.arch]
            + "; tree: balanced binary, lower index on the left, the upper "
            "levels join ranks in rank order"
        ),
        precision=_precision(settings),
        rounding=("product", "sum", "sum of accumulator and bias", "output, nearest even"),
        arch=settings.arch,
    )


def row(settings: Settings) -> Contract:
    """Row-parallel linear layers: attention output, MLP down."""
    _check(settings, "gemm.row")
    return Contract(
        boundary="gemm.row",
        dependency="output (t, n) reads row t of x and row n of weight, all elements of the global K, no other row",
        partition=(
            f"forward: K in {settings.leaves} equal contiguous leaves, each a chain from +0; "
            f"input gradient: one chain over N; {_weight_gradient()}"
        ),
        merge=(
            "chain: k ascending, "
            + _STEP[settings.arch]
            + "; leaves: balanced binary tree in fp32, lower k on the left, the upper "
            "levels join ranks in rank order"
        ),
        precision=_precision(settings),
        rounding=("product", "sum", "sum of root and bias", "output, nearest even"),
        arch=settings.arch,
    )


def swiglu(settings: Settings) -> Contract:
    """The activation between gate_up and down."""
    _check(settings, "swiglu")
    return Contract(
        boundary="swiglu",
        dependency="output f reads gate f and up f of its own row, both materialised in the model's type",
        partition="none",
        merge="none",
        precision=_precision(settings),
        rounding=("exp(-g) to fp32", "1 + exp(-g)", "g / (1 + exp(-g))", "times up", "output, nearest even"),
        primitives={
            "exp": "e**x in fp64, rounded once to fp32 (rl_contract.primitives.exp_f32)",
            "division": "IEEE fp32",
        },
        arch=settings.arch,
    )
