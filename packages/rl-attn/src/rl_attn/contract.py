"""The contracts of the boundaries ``attention`` and ``rotary``: data, nothing else."""

from rl_contract import Contract, ContractError, Settings

SCALING_TYPES = ("default", "llama3", "yarn")


_DTYPES = {"cpu": ("bfloat16", "float32")} | dict.fromkeys(("sm90", "gfx942", "gfx950"), ("bfloat16", "float16"))
_STEP = {
    "sm90": "16 products at a time joined to the accumulator as wgmma and mma.sync m16n8k16 do (truncated to fp32)",
    "gfx942": "as v_mfma_f32_16x16x16 does (kpack 1)",
    "gfx950": "as v_mfma_f32_16x16x32 does (kpack 1)",
}
_EXP2 = {"sm90": "ex2.approx.ftz.f32", "gfx942": "v_exp_f32", "gfx950": "v_exp_f32"}


def _require(boundary: str, settings: Settings) -> None:
    if settings.arch not in _DTYPES:
        raise ContractError(f"{boundary}: arch={settings.arch!r}, supported: {sorted(_DTYPES)}; choose such a profile")
    if settings.dtype not in _DTYPES[settings.arch]:
        raise ContractError(
            f"{boundary}: dtype={settings.dtype!r}, supported on {settings.arch}: {_DTYPES[settings.arch]}"
        )


def attention(settings: Settings) -> Contract:
    """Causal attention, one order for packed training, chunked prefill, prefix hits and paged decode.

    Raises:
        ContractError: an unknown architecture or family, a dtype that the architecture does not have (bf16 and fp32
            on a CPU, bf16 and fp16 on a GPU), or a ``key_tile`` that is not a multiple of 16 (a power of two on a
            GPU).
    """
    _require("attention", settings)
    if settings.attention == "nosplit":
        return _library_attention(settings)
    if settings.key_tile % 16:
        raise ContractError(f"attention: key_tile={settings.key_tile}, supported: a multiple of 16; use 128")
    if settings.arch != "cpu":
        return _gpu_attention(settings)
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


def _gpu_attention(settings: Settings) -> Contract:
    if settings.key_tile & (settings.key_tile - 1) or settings.key_tile > 128:
        raise ContractError(
            f"attention on {settings.arch}: key_tile={settings.key_tile}, supported: 16 to 128, a power of two; use 128"
        )
    dtype = settings.dtype
    return Contract(
        boundary="attention",
        dependency=(
            "row at absolute position p sees keys 0..p of its own sequence; query head h uses kv head h // (Hq / Hkv)"
        ),
        partition=(
            f"keys in tiles of {settings.key_tile} and tiles in segments of {settings.segment}, both aligned to "
            "absolute position 0; masked keys add exact zeros"
        ),
        merge=(
            f"every chain takes its terms in ascending order from the first one on, {_STEP[settings.arch]}, "
            "short tails filled with zeros. "
            "score: chain over head_dim from +0; c = fp32(fp64(scale) * log2(e)); tile: m' = max(m, "
            "max(scores) * c), alpha = exp2(m - m') or 0 for the empty state, p_j = exp2(fma(s_j, c, -m')), "
            "O = chain over j of p_j * v_j from O * alpha, l = the same chain with v_j = 1 from l * alpha; segment: "
            "tiles ascending from the empty state (m=-inf, l=0, O=0); segments folded left, ascending, from the empty "
            "state: M' = max(M, m), "
            "a = exp2(M - M'), b = exp2(m - M'), O = fma(O, a, O_s * b), l = fma(l, a, l_s * b); out = O / l; "
            "lse = (m + log2(l)) * fp32(ln 2). Backward: delta = balanced tree over head_dim, neighbours first, of "
            "dO * O; p = exp2(fma(s, c, -fp32(lse * log2(e)))); dP chain over head_dim; dS = p * (dP - delta); "
            "dQ = scale * chain over keys ascending of dS * k; dV and dK of a key = chain over the rows (query "
            "ascending, head of the group ascending) of p * dO and dS * q (dK times scale)"
        ),
        precision={"input": dtype, "product": "exact", "accumulator": "float32", "state": "float32", "output": dtype},
        rounding=(
            "matrix step",
            f"p_j to {dtype} before both the row sum and the product with v",
            "each product and fma of the merge to fp32, never contracted otherwise",
            "O / l once to fp32",
            f"output once to {dtype}",
            f"backward: p and dS to {dtype} before their dots; dQ, dK, dV once to {dtype}",
        ),
        primitives={
            "exp2": _EXP2[settings.arch],
            "log2": "triton.language.math.log2 (once a row)",
            "divide": "IEEE fp32",
        },
        arch=settings.arch,
    )


def _library_attention(settings: Settings) -> Contract:
    from rl_attn.nosplit import library_for

    library = library_for(settings.arch)
    if settings.dtype not in library.dtypes:
        raise ContractError(f"attention: dtype={settings.dtype!r}, {library.id} is certified for {library.dtypes}")
    dtype = settings.dtype
    return Contract(
        boundary="attention",
        dependency=(
            "row at absolute position p sees keys 0..p of its own sequence; query head h uses kv head h // (Hq / Hkv)"
        ),
        partition="none: a row is one left fold over the library's key tiles, aligned to absolute position 0",
        merge=f"as {library.id} does; backward: as the family 'segments', from the library's O and LSE",
        precision={"input": dtype, "product": "exact", "accumulator": "float32", "state": "float32", "output": dtype},
        rounding=("the library's", f"output once to {dtype}"),
        primitives={"library": library.id, "sha256": library.sha256},
        arch=settings.arch,
    )


def rotary(settings: Settings) -> Contract:
    """Rotary positions, half-split layout.

    Raises:
        ContractError: an architecture or dtype without kernels, or an unknown scaling rule.
    """
    _require("rotary", settings)
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
