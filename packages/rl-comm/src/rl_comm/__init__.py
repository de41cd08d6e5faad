"""Collectives whose order of addition is fixed by rank."""

from rl_comm.autograd import copy_to_ranks, gather_from_ranks, reduce_from_ranks
from rl_comm.communicator import TreeCommunicator
from rl_comm.tree import tree_sum

__all__ = ["TreeCommunicator", "copy_to_ranks", "gather_from_ranks", "reduce_from_ranks", "tree_sum"]
