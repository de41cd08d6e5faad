"""Contracts, profiles, fingerprints, bit comparison and launch evidence for bit-exact RL."""

from rl_contract.communicator import Communicator, SingleRank
from rl_contract.compare import Mismatch, Verdict, compare
from rl_contract.contract import Contract
from rl_contract.errors import ContractError, MissingSupport
from rl_contract.evidence import Launch, launches, record_launch, reset_launches
from rl_contract.profile import Profile, Settings, build_profile, check_built
from rl_contract.tokens import TokenShards

__all__ = [
    "Communicator",
    "Contract",
    "ContractError",
    "Launch",
    "Mismatch",
    "MissingSupport",
    "Profile",
    "Settings",
    "SingleRank",
    "TokenShards",
    "Verdict",
    "build_profile",
    "check_built",
    "compare",
    "launches",
    "record_launch",
    "reset_launches",
]
