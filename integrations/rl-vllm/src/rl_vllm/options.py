"""What a user may say about a strict engine in vLLM's ``additional_config``, which vLLM itself reads nothing of.

A key that is spelled like one of ours and is none would be passed over in silence, so it is refused by name.
"""

from collections.abc import Mapping
from typing import Any

from rl_contract import ContractError
from rl_vllm.fusing import KEY as FUSED

SAMPLING_GRAPHS = "rl_sampling_graphs"
PREFILL_GRAPHS = "rl_prefill_graphs"
NAMES = (FUSED, SAMPLING_GRAPHS, PREFILL_GRAPHS)
# written by apply_strict: the profile's fingerprint
FINGERPRINT = "rl_strict"


# the letters of each, and of an option also those behind rl_
_OURS = {name.replace("_", "") for name in (*NAMES, FINGERPRINT, *(name[3:] for name in NAMES))}


def problems(additional_config: Any, fingerprint: str | None = None) -> list[str]:
    """Every key that is no option, but no text either, starts with rl_ or is spelled like one; every option that is no
    bool.

    Args:
        fingerprint: of the profile; an engine's arguments that were made strict before carry it.
    """
    if additional_config is None:
        return []
    if not isinstance(additional_config, Mapping):
        return [f"additional_config={additional_config!r}, supported: a mapping"]
    found = []
    for key, value in additional_config.items():
        spelled = str(key).strip().lower().replace("-", "_")
        if key in NAMES:
            if not isinstance(value, bool):
                found.append(f"additional_config has {key}={value!r}, supported: True or False")
        elif key == FINGERPRINT:
            if value != fingerprint:
                found.append(f"additional_config has {key}={value!r}, which strict mode writes itself; leave it out")
        elif not isinstance(key, str) or spelled.startswith("rl_") or spelled.replace("_", "") in _OURS:
            found.append(f"additional_config has {key!r}, supported: {', '.join(NAMES)}; correct it or leave it out")
    return found


def asked(additional_config: Any, name: str) -> bool | None:
    """What the user said about an option, None where nothing; ContractError for another value than True or False."""
    if found := problems({name: (additional_config or {}).get(name, True)}):
        raise ContractError(found[0])
    value: bool | None = (additional_config or {}).get(name)
    return value
