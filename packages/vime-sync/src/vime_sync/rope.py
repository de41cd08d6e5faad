"""How a model turns positions into angles, read from its Hugging Face configuration in one place for both engines."""

import math
from collections.abc import Mapping
from typing import Any

from rl_contract import ContractError

ROPE_TYPES = ("default", "llama3")
"""The rules both engines serve. rl-attn's table knows more, which a run has no second engine for."""

# transformers 5 keeps theta and the rule in the second, older files have rope_theta and the first
_PLACES = ("rope_scaling", "rope_parameters")
_LENGTH = "original_max_position_embeddings"


def rope_settings(config: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """What ``rl_contract.Settings.rope`` holds: ``theta``, ``rotary_dim`` and the keys of a rule that scales.

    Raises:
        ContractError: every entry that is no value, contradicts another or asks for what no engine serves, in one list.
    """
    if problems := rope_problems(config) or unsupported_rope(config):
        raise ContractError(f"the model config has {'; '.join(problems)}")
    rule = _effective(config, _stated(config))
    rope: dict[str, Any] = {"theta": rule.pop("rope_theta"), "rotary_dim": head_dim}
    del rule["partial_rotary_factor"]
    return rope if rule["rope_type"] == "default" else rope | rule


def unsupported_rope(config: Mapping[str, Any]) -> list[str]:
    """What of the rule no engine serves, one line each; for a ``config`` without ``rope_problems``."""
    rule = _effective(config, _stated(config))
    found = []
    if rule["rope_type"] not in ROPE_TYPES:
        found.append(f"rope type {rule['rope_type']!r} is not supported; supported: {ROPE_TYPES}; use such a model")
    if rule["partial_rotary_factor"] != 1.0:
        found.append(f"partial_rotary_factor={rule['partial_rotary_factor']}, supported: 1.0; use such a model")
    return found


def rope_problems(config: Mapping[str, Any]) -> list[str]:
    """Entries about positions that no model can have, or that contradict each other, one line each."""
    found = []
    rules = [("config.json", config)]
    for key in _PLACES:
        rule = config.get(key)
        if isinstance(rule, Mapping):
            rules.append((key, rule))
        elif rule is not None:
            found.append(f"{key}={rule!r}, supported: an object or null; correct config.json")
    for place, rule in rules:
        if rule.get("rope_theta") is not None and not finite_above(rule["rope_theta"], 1):
            found.append(f"rope_theta={rule['rope_theta']!r} in {place}, supported: a number above 1; correct it")
        partial = rule.get("partial_rotary_factor")
        if partial is not None and not finite_above(partial, 0):
            found.append(f"partial_rotary_factor={partial!r} in {place}, supported: 1.0; correct it")
    return found or [problem for place, rule in rules[1:] for problem in _inside(config, place, rule)] or _apart(config)


def finite_above(value: object, floor: float) -> bool:
    """A number, neither bool nor infinite, above ``floor``."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and floor < value < math.inf


def _inside(config: Mapping[str, Any], place: str, rule: Mapping[str, Any]) -> list[str]:
    kind, older = rule.get("rope_type"), rule.get("type")
    if kind and older and kind != older:
        return [f"rope_type={kind!r} and type={older!r} in {place}, supported: one rule; drop one of them"]
    read = _effective(config, rule)
    unused = sorted(set(read) - {"rope_type", "rope_theta", "partial_rotary_factor"})
    if read["rope_type"] == "default" and unused:
        return [
            f"{', '.join(unused)} in {place}, which the default rule does not read; supported: rope_type, rope_theta; "
            f"name the rule they belong to ({', '.join(ROPE_TYPES[1:])}) or remove them"
        ]
    # transformers lets the outer one win
    outer, own = config.get(_LENGTH), read.get(_LENGTH)
    if None not in (outer, own) and outer != own:
        return [f"{_LENGTH}={outer!r} and {own!r} in {place}, supported: one length; drop one of them"]
    return []


def _apart(config: Mapping[str, Any]) -> list[str]:
    """Both spellings with different rules: transformers lets rope_scaling win, others read rope_parameters."""
    scaling, parameters = (config.get(key) for key in _PLACES)
    if not scaling or not parameters or _effective(config, scaling) == _effective(config, parameters):
        return []
    return [
        f"rope_scaling={dict(scaling)} beside rope_parameters={dict(parameters)}, which say different rules "
        "(rope_theta included); supported: one of them, or both alike; keep the one the model was trained with"
    ]


def _stated(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config.get(_PLACES[0]) or config.get(_PLACES[1]) or {}


def _effective(config: Mapping[str, Any], rule: Mapping[str, Any]) -> dict[str, Any]:
    """The rule with its defaults, in one spelling."""
    kept = {k: v for k, v in sorted(rule.items()) if v is not None and k not in ("rope_type", "type")}
    return kept | {
        "rope_type": rule.get("rope_type") or rule.get("type") or "default",
        "rope_theta": float(rule.get("rope_theta") or config.get("rope_theta") or 10000.0),
        "partial_rotary_factor": float(rule.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0),
    }
