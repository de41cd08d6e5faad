"""Deliberately mis-ordered kernels, to show that a run notices one. For tests of the check; never part of a real run.

``rl-parity run --plant NAME`` installs one on the trainer side of the strict arm. The sums are mathematically the same,
added in another order; the manifest, the summary and the report say that it was planted.
"""

from collections.abc import Callable

from rl_contract import ContractError


def _gemm_row() -> None:
    """Row-parallel layers add K from the last element down instead of from the first up."""
    import rl_gemm

    honest = rl_gemm.row_parallel_linear

    def misordered(x, weight, *args, **kwargs):  # type: ignore[no-untyped-def]
        return honest(x.flip(-1), weight.flip(-1), *args, **kwargs)

    rl_gemm.row_parallel_linear = misordered


PLANTS: dict[str, Callable[[], None]] = {"gemm.row": _gemm_row}


def install(name: str) -> None:
    """Put the named kernel into this process.

    Raises:
        ContractError: no such plant.
    """
    if name not in PLANTS:
        raise ContractError(f"--plant {name}: supported are {', '.join(PLANTS)}")
    PLANTS[name]()
