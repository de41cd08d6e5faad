class CudaRNGStatesTracker:
    def reset(self) -> None: ...


def activation_recompute_forward(*_: object, **__: object) -> None:
    raise NotImplementedError
