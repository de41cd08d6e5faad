from contextlib import nullcontext
from typing import Any


def get_cpu_offload_context(enabled: bool = False, *_: Any, **__: Any) -> Any:
    assert not enabled
    return nullcontext(), lambda x: x
