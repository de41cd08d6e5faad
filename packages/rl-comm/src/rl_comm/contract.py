"""The contract of the boundary ``collective``."""

from rl_comm.tree import WORLD_SIZES
from rl_contract import Contract, ContractError, Settings


def collective(settings: Settings) -> Contract:
    """The contract under ``settings``; ``leaves`` bounds the world a tree can be cut over."""
    if settings.leaves > max(WORLD_SIZES):
        raise ContractError(
            f"collective: leaves={settings.leaves}, supported: 1, 2, 4, 8; "
            "set leaves to the larger tensor-parallel size of the two engines"
        )
    return Contract(
        boundary="collective",
        dependency="one element of every rank's partial; no other element takes part",
        partition="by rank, one part a rank; world sizes 1, 2, 4, 8",
        merge="balanced binary tree over ranks, lower rank on the left; all_gather moves bytes",
        precision={"input": "float32", "accumulator": "float32", "state": "float32", "output": settings.dtype},
        rounding=("root of the tree to the output type, nearest even",),
        arch=settings.arch,
    )
