"""The contract of RMSNorm, with and without residual."""

from rl_contract import Contract, ContractError, Settings

LANES = 16
ROW_BLOCK = 64

_GPUS = ("sm90", "gfx942", "gfx950")
_MODEL_TYPES = {"cpu": ("bfloat16", "float32")} | dict.fromkeys(_GPUS, ("bfloat16",))


def gpu_lanes(width: int) -> int:
    """Lanes of a row on a GPU: 1024 for rows wider than 1024, else the next power of two of the width, at most 256."""
    return 1024 if width > 1024 else min(256, 1 << (width - 1).bit_length())


def _lanes(arch: str) -> str:
    return (
        f"L={LANES}"
        if arch == "cpu"
        else "L (1024 for rows wider than 1024, else the next power of two of the width, at most 256)"
    )


def _join(arch: str) -> str:
    if arch == "cpu":
        return "lanes j and j+L/2 join, then j and j+L/4, and so on"
    return "neighbouring lanes join, then lanes 2 apart, then 4, and so on"


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
            f"sum of squares: lane j of {_lanes(settings.arch)} holds the elements j, j+L, ... of the row; "
            f"weight gradient: rows in packed order in blocks of {ROW_BLOCK} from row 0, "
            "for q/k norm within tree leaves of heads, "
            f"tree(min({settings.leaves}, largest power of two dividing the global heads))"
        ),
        merge=(
            f"a lane is a chain from +0, ascending, multiply rounded, then add rounded; {_join(settings.arch)}; "
            "weight gradient: a block is a chain, blocks are folded left "
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
