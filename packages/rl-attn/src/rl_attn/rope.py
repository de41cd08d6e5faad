"""Rotary table: built once in fp64 on the CPU, kept in fp32, with Llama-3 and YaRN scaling as data."""

import math
from collections.abc import Mapping
from decimal import Decimal, localcontext
from typing import Any

import numpy as np
import torch

from rl_attn import cpu_rotary
from rl_attn.contract import SCALING_TYPES
from rl_contract import ContractError
from rl_contract.checks import require_tensor, whole_number

MAX_POSITIONS = 2**20


class RopeTable:
    """cos and sin, fp32 ``[P, rotary_dim / 2]``, by absolute position.

    Deliberately neither a module, a buffer nor a dataclass: ``.to(bfloat16)`` of an enclosing module, FSDP's casting of
    forward arguments and a state dict all pass it by, so the table keeps its fp32 values.
    """

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor) -> None:
        for name, x in (("cos", cos), ("sin", sin)):
            require_tensor("RopeTable", name, x)
            if x.dtype != torch.float32 or x.dim() != 2 or x.shape != cos.shape:
                raise ContractError(
                    f"RopeTable {name} is {tuple(x.shape)} {x.dtype}; supported: two equal [positions, rotary_dim/2] "
                    "float32 tensors, build them with rope_table"
                )
            # a table on a GPU is taken on trust: looking would stop the stream
            if x.device.type == "cpu" and not bool(x.isfinite().all()):
                raise ContractError(
                    f"RopeTable {name} holds a NaN or infinity; supported: finite values, check the scaling parameters"
                )
        # whoever trains saves the table for a gradient, which a tensor of inference mode forbids
        with torch.inference_mode(False):
            cos, sin = (x.clone() if x.is_inference() else x for x in (cos, sin))
        self._tables = {cos.device: (cos.contiguous(), sin.contiguous())}
        self._first = cos.device

    @property
    def cos(self) -> torch.Tensor:
        return self._tables[self._first][0]

    @property
    def sin(self) -> torch.Tensor:
        return self._tables[self._first][1]

    @property
    def max_positions(self) -> int:
        return self.cos.shape[0]

    @property
    def rotary_dim(self) -> int:
        return 2 * self.cos.shape[1]

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """cos, sin on ``device``, copied there once."""
        if device not in self._tables:
            with torch.inference_mode(False):
                self._tables[device] = (self.cos.to(device), self.sin.to(device))
        return self._tables[device]


def rope_table(
    max_positions: int, rotary_dim: int, theta: float, scaling: Mapping[str, Any] | None = None
) -> RopeTable:
    """Build the table of positions ``0 .. max_positions - 1``.

    Args:
        max_positions: at most 2**20.
        rotary_dim: rotated part of a head, even.
        theta: base of the inverse frequencies ``theta ** (-2i / rotary_dim)``.
        scaling: ``rope_type`` (``default``, ``llama3``, ``yarn``) and its parameters, by the key names of Hugging Face
            configurations; formulas as published with Llama 3.1 and in the YaRN paper (arXiv 2309.00071).

    Raises:
        ContractError: sizes out of range, an unknown rule, a missing or unknown parameter.
    """
    if not whole_number(max_positions) or not 1 <= max_positions <= MAX_POSITIONS:
        raise ContractError(f"rope_table got max_positions={max_positions!r}; supported: 1 to {MAX_POSITIONS}")
    inv_freq, factor = inverse_frequencies(rotary_dim, theta, scaling)
    cos = np.empty((max_positions, rotary_dim // 2), np.float32)
    sin = np.empty_like(cos)
    cpu_rotary.fill_table(inv_freq, factor, cos, sin)
    return RopeTable(torch.from_numpy(cos), torch.from_numpy(sin))


def inverse_frequencies(
    rotary_dim: int, theta: float, scaling: Mapping[str, Any] | None = None
) -> tuple[np.ndarray, float]:
    """Inverse frequencies fp64 ``[rotary_dim / 2]`` after scaling, and the factor on cos and sin."""
    if not whole_number(rotary_dim) or rotary_dim < 2 or rotary_dim % 2:
        raise ContractError(f"rope got rotary_dim={rotary_dim!r}; supported: a positive even number")
    if not _positive(theta) or not theta > 1.0:
        raise ContractError(f"rope got theta={theta!r}; supported: a finite number above 1")
    plain = _plain_inverse_frequencies(rotary_dim, theta)
    if scaling is not None and not isinstance(scaling, Mapping):
        raise ContractError(
            f"rope got scaling={scaling!r}; supported: None, or a mapping as in the model's config.json"
        )
    rule = dict(scaling or {})
    # both spellings occur in checkpoints, and newer configurations repeat the base here
    kind, older = rule.pop("rope_type", None), rule.pop("type", None)
    if kind and older and kind != older:
        raise ContractError(f"rope got rope_type={kind!r} and type={older!r}; supported: one rule, drop one of them")
    kind = kind or older or "default"
    base = rule.pop("rope_theta", None)
    if base is not None and base != theta:
        raise ContractError(f"rope got theta={theta} and rope_theta={base!r} in scaling; supported: equal, drop one")
    if kind not in SCALING_TYPES:
        raise ContractError(f"rope got rope_type={kind!r}; supported: {SCALING_TYPES}; use a model with one of these")
    if kind == "default":
        _take(kind, rule, (), ())
        return plain, 1.0
    if kind == "llama3":
        return _llama3(plain, rule), 1.0
    return _yarn(plain, rotary_dim, theta, rule)


def _plain_inverse_frequencies(rotary_dim: int, theta: float) -> np.ndarray:
    # libm's pow may differ in the last bit between machines, and 2**20 positions would show it
    with localcontext() as context:
        context.prec = 50
        base = Decimal(repr(float(theta)))
        return np.array([float(base ** (Decimal(-2 * i) / rotary_dim)) for i in range(rotary_dim // 2)], np.float64)


def _ln(x: float) -> float:
    with localcontext() as context:
        context.prec = 50
        return float(Decimal(repr(float(x))).ln())


def _positive(value: Any) -> bool:
    real = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    return real and 0.0 < value < float("inf")


def _take(kind: str, rule: dict[str, Any], needed: tuple[str, ...], optional: tuple[str, ...]) -> None:
    missing = [k for k in needed if rule.get(k) is None]
    unknown = sorted(set(rule) - set(needed) - set(optional))
    if missing or unknown:
        raise ContractError(
            f"rope scaling {kind!r}: missing {missing}, unknown {unknown}; needed {list(needed)}, "
            f"optional {list(optional)}"
        )
    for name, value in rule.items():
        # 0 switches the magnitude of YaRN off, as a missing one does
        off = value is None or (name in ("mscale", "mscale_all_dim") and value == 0)
        if name == "truncate":
            if value is not None and not isinstance(value, bool):
                raise ContractError(f"rope scaling {kind!r}: {name}={value!r}; supported: True or False")
        elif not off and not _positive(value):
            raise ContractError(
                f"rope scaling {kind!r}: {name}={value!r}; supported: a positive finite number; "
                "take it from the model's configuration"
            )


def _llama3(plain: np.ndarray, rule: dict[str, Any]) -> np.ndarray:
    needed = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    _take("llama3", rule, needed, ())
    factor, low, high, original = (float(rule[k]) for k in needed)
    if not high > low:
        raise ContractError(f"rope scaling 'llama3': high_freq_factor={high} must be above low_freq_factor={low}")
    wavelength = 2.0 * math.pi / plain
    smooth = (original / wavelength - low) / (high - low)
    blended = (1.0 - smooth) * plain / factor + smooth * plain
    return np.where(wavelength > original / low, plain / factor, np.where(wavelength < original / high, plain, blended))


def _yarn(plain: np.ndarray, rotary_dim: int, theta: float, rule: dict[str, Any]) -> tuple[np.ndarray, float]:
    optional = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")
    _take("yarn", rule, ("factor", "original_max_position_embeddings"), optional)
    factor, original = float(rule["factor"]), float(rule["original_max_position_embeddings"])

    def correction_dim(rotations: float) -> float:
        return rotary_dim * _ln(original / (rotations * 2.0 * math.pi)) / (2.0 * _ln(theta))

    def magnitude(scale: float) -> float:
        return 0.1 * scale * _ln(factor) + 1.0 if factor > 1.0 else 1.0

    fast, slow = float(rule.get("beta_fast") or 32), float(rule.get("beta_slow") or 1)
    if not fast > slow:
        raise ContractError(f"rope scaling 'yarn': beta_fast={fast} must be above beta_slow={slow}")
    low, high = correction_dim(fast), correction_dim(slow)
    if rule.get("truncate", True):
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, float(rotary_dim - 1))
    if low > high:
        raise ContractError(
            f"rope scaling 'yarn': original_max_position_embeddings={original} with beta_fast={fast}, "
            f"beta_slow={slow} and theta={theta} leaves no frequency between them; supported: a context in which some "
            "frequency turns beta_slow to beta_fast times"
        )
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(rotary_dim // 2, dtype=np.float64) - low) / (high - low), 0.0, 1.0)
    inv_freq = plain / factor * ramp + plain * (1.0 - ramp)
    attention_factor = rule.get("attention_factor")
    if attention_factor is None:
        both = rule.get("mscale") and rule.get("mscale_all_dim")
        attention_factor = (
            magnitude(float(rule["mscale"])) / magnitude(float(rule["mscale_all_dim"])) if both else magnitude(1.0)
        )
    return inv_freq, float(attention_factor)
