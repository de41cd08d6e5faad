"""The contract of RMSNorm, with and without residual."""

from rl_contract import Contract, ContractError, Settings

LANES = 16
ROW_BLOCK = 64

_MODEL_TYPES = {"cpu": ("bfloat16", "float32")}


def norm(settings: Settings) -> Contract:
    """Every RMSNorm of the model: layer norms with residual, the final norm, q/k norms."""
    if settings.dtype not in _MODEL_TYPES.get(settings.arch, ()):
        raise ContractError(
            f"norm: dtype={settings.dtype!r} on arch={settings.arch!r}, supported: {_MODEL_TYPES}; take one"
        )
    return Contract(
        boundary="norm",
        dependency="a row reads itself, its residual row and weight; no other row",
        partition=(
            f"sum of squares: lane j of {LANES} holds the elements j, j+{LANES}, ... of the row; weight gradient: "
            f"rows in packed order in blocks of {ROW_BLOCK} from row 0, for q/k norm within tree leaves of heads, "
            f"tree(min({settings.leaves}, largest power of two dividing the global heads))"
        ),
        merge=(
            f"a lane is a chain from +0, ascending, multiply rounded, then add rounded; lanes j and j+{LANES // 2} "
            f"join, then j and j+{LANES // 4}, and so on; weight gradient: a block is a chain, blocks are folded left "
            "from +0, leaves by the balanced tree, lower heads on the left, the upper levels join ranks in rank order"
        ),
        precision={
            "input": settings.dtype,
            "product": "float32",
            "accumulator": "float32",
            "state": settings.dtype,
            "output": settings.dtype,
        },
        rounding=(
            "x + residual to the model's type: this is the residual stream and the norm's input",
            "square",
            "sum",
            "mean: division by hidden size",
            f"plus eps={settings.norm_eps!r} in fp32",
            "rsqrt",
            "x * rstd",
            "times weight in fp32, before any rounding to the model's type",
            "output, nearest even",
        ),
        primitives={"rsqrt": "1/sqrt(x) in fp64, rounded once to fp32 (rl_contract.primitives.rsqrt_f32)"},
        arch=settings.arch,
    )
