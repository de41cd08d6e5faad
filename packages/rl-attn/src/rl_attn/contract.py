"""The contracts of the boundaries ``attention`` and ``rotary``: data, nothing else."""

from rl_contract import Contract, ContractError, Settings

SCALING_TYPES = ("default", "llama3", "yarn")


def _require_cpu(boundary: str, settings: Settings) -> None:
    if settings.arch != "cpu":
        raise ContractError(f"{boundary}: arch={settings.arch!r}, supported: 'cpu'; choose a CPU profile")
    if settings.dtype not in ("bfloat16", "float32"):
        raise ContractError(f"{boundary}: dtype={settings.dtype!r}, supported on a CPU: 'bfloat16', 'float32'")


def attention(settings: Settings) -> Contract:
    """Causal attention, one order for packed training, chunked prefill, prefix hits and paged decode.

    Raises:
        ContractError: an architecture, dtype or family other than ``segments`` on a CPU in bf16 or fp32, or a
            ``key_tile`` that is not a multiple of 16.
    """
    _require_cpu("attention", settings)
    if settings.attention != "segments":
        raise ContractError(
            f"attention: family {settings.attention!r}, supported: 'segments'; set Settings.attention='segments'"
        )
    if settings.key_tile % 16:
        raise ContractError(f"attention: key_tile={settings.key_tile}, supported: a multiple of 16; use 64")
    dtype = settings.dtype
    return Contract(
        boundary="attention",
        dependency=(
            "row at absolute position p sees keys 0..p of its own sequence; query head h uses kv head h // (Hq / Hkv)"
        ),
        partition=(
            f"keys in tiles of {settings.key_tile} and tiles in segments of {settings.segment}, both aligned to "
            "absolute position 0; masked keys take no part"
        ),
        merge=(
            "score: chain over head_dim ascending from +0, then one product with c = fp32(fp64(scale) * log2(e)); "
            "tile: m' = max(m, scores), alpha = exp2(m - m') or 0 for the empty state, p_j = exp2(s_j - m') or 0 for "
            "s_j = -inf, O = O * alpha then + p_j * v_j, l = l * alpha then + p_j, j ascending; segment: tiles "
            "ascending from the empty state (m=-inf, l=0, O=0); segments folded left, ascending, from the empty state: "
            "m' = max(M, m), a = exp2(M - m'), b = exp2(m - m'), O = O * a + O_s * b, l = l * a + l_s * b; "
            "out = O / l; lse = m * fp32(ln 2) + ln(l). Backward: delta = chain over head_dim of dO * O; "
            "p = exp2(s - fp32(lse * log2(e))); dP chain over head_dim; dS = p * (dP - delta); dQ = scale * chain over "
            "keys ascending of dS * k; dV and dK of a key = chain over its queries in ascending position, heads of the "
            "group ascending, of p * dO and dS * q (dK times scale)"
        ),
        precision={"input": dtype, "product": "float32", "accumulator": "float32", "state": "float32", "output": dtype},
        rounding=(
            "every product and every sum to fp32, never contracted",
            f"p_j to {dtype} before both the row sum and the product with v",
            "O / l once to fp32",
            f"output once to {dtype}",
            f"backward: dQ, dK, dV once to {dtype}; p and dS stay fp32",
        ),
        primitives={
            "exp2": "rl_contract.primitives.exp2_f32",
            "log": "rl_contract.primitives.log_f32",
            "divide": "IEEE fp32",
        },
        arch=settings.arch,
    )


def rotary(settings: Settings) -> Contract:
    """Rotary positions, half-split layout.

    Raises:
        ContractError: an architecture or dtype outside CPU bf16 and fp32, or an unknown scaling rule.
    """
    _require_cpu("rotary", settings)
    rope = dict(settings.rope)
    scaling = {k: v for k, v in rope.items() if k not in ("theta", "rotary_dim")}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in SCALING_TYPES:
        raise ContractError(f"rotary: rope_type={kind!r}, supported: {SCALING_TYPES}; use a model with one of these")
    dtype = settings.dtype
    rule = ", ".join(f"{k}={rope[k]!r}" for k in sorted(rope))
    return Contract(
        boundary="rotary",
        dependency=(
            "element i of the first rotary_dim of a head pairs with i + rotary_dim/2; the rest of the head is copied"
        ),
        partition=f"per token and head; absolute int64 positions; {rule}",
        merge="y1 = x1 * cos - x2 * sin; y2 = x2 * cos + x1 * sin; backward: the same with -sin",
        precision={"input": dtype, "product": "float32", "accumulator": "float32", "state": "float32", "output": dtype},
        rounding=(
            "inverse frequency to fp64, angle = position * inverse frequency to fp64",
            "cos and sin, times the attention factor, from fp64 once to fp32",
            "each product to fp32, their sum or difference to fp32, never contracted",
            f"output once to {dtype}",
        ),
        primitives={
            "cos, sin": "rl_attn.rope table in fp64: three-part pi/2 reduction, Taylor series, no libm",
            "inverse frequency": "theta ** (-2i / rotary_dim) in 50 decimal digits, rounded to fp64",
        },
        arch=settings.arch,
    )
