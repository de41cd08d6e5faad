"""What ``TrainerRank`` is made with: looked at before anything heavy happens, and compared over ranks."""

from typing import TYPE_CHECKING

import torch

from rl_contract import Profile
from rl_megatron import checks, te
from rl_megatron.batch import token_budget_problem
from rl_megatron.config import ParallelConfig
from rl_megatron.loss import LossConfig
from rl_megatron.model import recompute_problem
from rl_megatron.optimizer import OptimizerConfig
from rl_megatron.rendezvous import url_problem

if TYPE_CHECKING:
    from rl_megatron.trainer import TrainerRank


def problems(trainer: "TrainerRank") -> list[str]:
    """What is wrong with each of them, in words."""
    found = [
        token_budget_problem(trainer.token_budget),
        url_problem("init_method", trainer.init_method),
        checks.folder_problem("hf_path", trainer.hf_path),
        checks.instance_problem("profile", trainer.profile, Profile),
        checks.instance_problem("parallel", trainer.parallel, ParallelConfig),
        checks.instance_problem("optimizer", trainer.optimizer_config, OptimizerConfig),
        checks.instance_problem("loss", trainer.loss_config, LossConfig),
        checks.instance_problem("share_gpu", trainer.share_gpu, bool),
        recompute_problem(trainer.recompute, trainer.recompute_modules),
    ]
    if trainer.share_gpu is True and str(trainer.device) == "cpu":
        found.append("share_gpu=True, supported: with a GPU; leave it out on device='cpu'")
    found.append(checks.choice_problem("mode", trainer.mode, ("strict", "native")))
    found.append(te.option_problem(trainer.native_operators, trainer.mode))
    for name, value, least, other in (
        ("rank", trainer.rank, 0, ""),
        ("threads", trainer.threads, 1, ", or None to leave torch's"),
        ("keep_logits", trainer.keep_logits, 0, ""),
    ):
        whole = isinstance(value, int) and not isinstance(value, bool) and value >= least
        if not whole and not (value is None and other):
            found.append(f"{name}={value!r}, supported: an integer of {least} and above{other}")
    return [problem for problem in found if problem]


def identity(trainer: "TrainerRank") -> dict[str, object]:
    """What all ranks must have been given alike."""
    return {
        "profile": trainer.profile.fingerprint,
        "parallel": trainer.parallel,
        "mode": trainer.mode,
        "optimizer": trainer.optimizer_config,
        "loss": trainer.loss_config,
        "token_budget": trainer.token_budget,
        "device": torch.device(trainer.device).type,
        "recompute": trainer.recompute,
        "recompute_modules": trainer.recompute_modules,
    }
