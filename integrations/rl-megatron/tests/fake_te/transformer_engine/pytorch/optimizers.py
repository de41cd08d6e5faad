from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

CALLS: Counter[str] = Counter()
"""How often each of these ran."""


class FusedAdam(torch.optim.AdamW):
    def __init__(self, params: Any, *, adam_w_mode: bool = True, capturable: bool = False, **rest: Any) -> None:
        assert adam_w_mode
        super().__init__(params, **rest)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        CALLS["FusedAdam"] += 1
        return super().step(*args, **kwargs)


class FusedSGD(torch.optim.SGD):
    pass


def multi_tensor_applier(op: Callable[..., Any], flag: Any, lists: Any, *args: Any) -> Any:
    CALLS["multi_tensor_applier"] += 1
    return op(2048 * 32, flag, lists, *args)


def multi_tensor_l2norm(chunk: int, flag: Any, lists: Any, per_tensor: bool) -> Any:
    CALLS["multi_tensor_l2norm"] += 1
    return torch.cat([t.flatten() for t in lists[0]]).norm().reshape(1), None


def multi_tensor_scale(chunk: int, flag: Any, lists: Any, scale: float) -> None:
    CALLS["multi_tensor_scale"] += 1
    for source, out in zip(*lists):
        out.copy_(source * scale)


def multi_tensor_scale_tensor(chunk: int, flag: Any, lists: Any, scale: Any) -> None:
    CALLS["multi_tensor_scale_tensor"] += 1
    for source, out in zip(*lists):
        out.copy_(source * scale)
