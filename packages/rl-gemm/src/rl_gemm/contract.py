"""The contracts of the linear layers and of SwiGLU."""

from rl_contract import Contract, ContractError, Settings

TOKEN_BLOCK = 64
# a GPU keeps one accumulator over a longer block: its chain costs nothing there, a join would
GPU_TOKEN_BLOCK = 8192
# k taken by one matrix instruction
MATRIX_STEP = {"sm90": 16, "gfx942": 16, "gfx950": 32}

_MODEL_TYPES = {"cpu": ("bfloat16", "float32")} | dict.fromkeys(MATRIX_STEP, ("bfloat16",))
_STEP = {
    "cpu": "one k at a time, multiply rounded, then add rounded, never contracted",
    "sm90": (
        "16 k at a time: the accumulator and the 16 exact products are truncated toward zero to 25 fraction bits below "
        "the largest of their exponents, added exactly, truncated to fp32 (rl_gemm.mma); a short tail gets zeros"
    ),
    "gfx942": "one v_mfma_f32_16x16x16_bf16 at a time (kpack 1), a short tail is filled with zeros",
    "gfx950": "one v_mfma_f32_16x16x32_bf16 at a time (kpack 1), a short tail is filled with zeros",
}
_EXP = {
    "cpu": "e**x in fp64, rounded once to fp32 (rl_contract.primitives.exp_f32)",
}
_GPU_EXP = "e**x in fp32: degree 6 polynomial with explicit fma (rl_gemm.triton_swiglu.exp_f32)"


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
        "product": "float32" if settings.arch == "cpu" else "exact",
        "accumulator": "float32",
        "state": "float32",
        "output": settings.dtype,
    }


def _rounding(settings: Settings, *ends: str) -> tuple[str, ...]:
    inside = ("product", "sum") if settings.arch == "cpu" else ("matrix step",)
    return (*inside, *ends, "output, nearest even")


def _weight_gradient(settings: Settings) -> str:
    cpu = settings.arch == "cpu"
    start = "from +0" if cpu else "onto main_grad, from +0 where there is none"
    return (
        f"weight and bias gradient: tokens in packed order in blocks of {TOKEN_BLOCK if cpu else GPU_TOKEN_BLOCK} "
        f"from token 0, each block a chain from +0, blocks folded left {start}, kept in fp32"
    )


def column(settings: Settings) -> Contract:
    """Column-parallel linear layers: qkv, gate_up, lm_head."""
    _check(settings, "gemm.column")
    return Contract(
        boundary="gemm.column",
        dependency="output (t, n) reads row t of x and row n of weight, all K elements, no other row",
        partition=(
            f"forward: none, K is one chain; input gradient: tree({settings.leaves}) over the global N, for a fused "
            f"[gate; up] weight leaf g is the g-th part of gate, then the g-th part of up; {_weight_gradient(settings)}"
        ),
        merge=(
            "chain: from +0, k ascending, "
            + _STEP[settings.arch]
            + "; tree: balanced binary, lower index on the left, the upper "
            "levels join ranks in rank order"
        ),
        precision=_precision(settings),
        rounding=_rounding(settings, "sum of accumulator and bias"),
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
            f"input gradient: one chain over N; {_weight_gradient(settings)}"
        ),
        merge=(
            "chain: k ascending, "
            + _STEP[settings.arch]
            + "; leaves: balanced binary tree in fp32, lower k on the left, the upper "
            "levels join ranks in rank order"
        ),
        precision=_precision(settings),
        rounding=_rounding(settings, "sum of root and bias"),
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
            "exp": _EXP.get(settings.arch, _GPU_EXP),
            "division": "IEEE fp32",
        },
        arch=settings.arch,
    )
