from contextlib import nullcontext
from typing import Any


class FP8GlobalStateManager:
    @staticmethod
    def is_fp8_enabled() -> bool:
        return False


def fp8_autocast(*_: Any, **__: Any) -> Any:
    return nullcontext()


fp8_model_init = fp8_autocast
