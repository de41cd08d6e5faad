"""What is wrong with a run's options by themselves, without a look at the machine or the model."""

import threading
from collections.abc import Iterator

from rl_parity import data, metrics
from rl_parity.config import (
    ARMS,
    DEVICES,
    FAMILIES,
    LAUNCHERS,
    MOST,
    NATIVE_OPERATORS,
    PLACEMENTS,
    SLEEP_LEVELS,
    TRANSPORTS,
    RunConfig,
)
from rl_parity.gpus import misspelled
from rl_parity.random_models import PREFIX as RANDOM_MODELS

# below it vLLM samples at this temperature instead of the given one
LOWEST_TEMPERATURE = 0.01
HIGHEST_TEMPERATURE = 3.4e38
LEAVES = (1, 2, 4, 8)


def options(c: RunConfig) -> Iterator[str]:
    """Every option whose value is not supported, or not together with another one."""
    if c.arm not in ARMS:
        yield f"--arm {c.arm}: supported are {', '.join(ARMS)}"
    if c.launcher not in LAUNCHERS:
        yield f"--launcher {c.launcher}: supported are {', '.join(LAUNCHERS)}"
    for name, known in (
        ("device", DEVICES),
        ("placement", PLACEMENTS),
        ("attention", FAMILIES),
        ("native_operators", NATIVE_OPERATORS),
        ("weights", TRANSPORTS),
        ("sleep", SLEEP_LEVELS),
        ("reward", (*data.REWARDS, *data.TOKEN_REWARDS)),
    ):
        if getattr(c, name) not in known:
            yield f"--{name.replace('_', '-')} {getattr(c, name)}: supported are {', '.join(known)}"
    textless = c.model.startswith(RANDOM_MODELS) or c.prompts.startswith(data.RANDOM)
    if textless and c.reward in data.REWARDS:
        which = f"--model {c.model}" if c.model.startswith(RANDOM_MODELS) else f"--prompts {c.prompts}"
        yield (
            f"--reward {c.reward} with {which}: random text never answers, so every reward and gradient would be zero; "
            f"use --reward {', '.join(data.TOKEN_REWARDS)}"
        )
    if c.weights == "ipc" and c.device == "cpu":
        yield "--weights ipc: there is no GPU's memory to lend with --device cpu; use host or file"
    if c.native_operators == "te" and c.device == "cpu":
        yield "--native-operators te: TransformerEngine computes on GPUs, not with --device cpu; use local or auto"
    elif c.native_operators == "te" and c.placement == "shared":
        yield "--native-operators te: its collectives need a GPU for each rank, not --placement shared; use another"
    if c.native_operators != "auto" and c.arm == "strict":
        yield f"--native-operators {c.native_operators}: --arm strict runs operators of its own; leave it out"
    for name in ("token_budget", "save_every"):
        if getattr(c, name) < 0:
            yield f"--{name.replace('_', '-')} {getattr(c, name)}: must be at least 0, which turns it off"
    if c.gpu_memory_utilization and not 0.05 <= c.gpu_memory_utilization <= 0.95:
        yield (
            f"--gpu-memory-utilization {c.gpu_memory_utilization}: must be from 0.05 to 0.95, or 0 for what the "
            "trainer leaves"
        )
    if c.device == "cuda" and (problem := misspelled(c.gpus)):
        yield problem
    if c.device == "cpu":
        neutral = RunConfig()
        for name in ("gpus", "placement", "gpu_memory_utilization", "sleep", "attention"):
            if getattr(c, name) != getattr(neutral, name):
                yield f"--{name.replace('_', '-')} {getattr(c, name)}: --device cpu has no GPUs; leave it out"
    for name in ("steps", "batch", "max_new_tokens"):
        if getattr(c, name) < 1:
            yield f"--{name.replace('_', '-')} {getattr(c, name)}: must be at least 1"
    for name in ("steps", "batch", "group", "max_new_tokens", "max_model_len", "token_budget", "save_every"):
        if getattr(c, name) > MOST:
            yield f"--{name.replace('_', '-')} {getattr(c, name)}: must be at most {MOST}"
    for name in ("model", "out", "prompts"):
        if not getattr(c, name).strip():
            yield f"--{name} {getattr(c, name)!r} is empty; give a path or leave the option out"
        if "\0" in getattr(c, name):
            yield f"--{name} {getattr(c, name)!r} holds a null byte, which no path can; give another"
    if c.group < 2:
        yield f"--group {c.group}: GRPO compares samples of one prompt; give at least 2"
    for name in ("lr", "kl", "weight_decay"):
        if not 0 <= getattr(c, name) < float("inf"):
            yield f"--{name.replace('_', '-')} {getattr(c, name)}: must be a finite number >= 0"
    if not 0 < c.max_grad_norm < float("inf"):
        yield f"--max-grad-norm {c.max_grad_norm}: must be a finite number > 0"
    if not 0 < c.clip < 1:
        yield f"--clip {c.clip}: must be a number above 0 and below 1, e.g. 0.2"
    if not 0 <= c.limit < float("inf"):
        yield f"--limit {c.limit}: must be a finite number of seconds >= 0; 0 has no limit"
    if not 0 < c.timeout <= threading.TIMEOUT_MAX:
        yield f"--timeout {c.timeout}: must be a number of seconds above 0 and at most {threading.TIMEOUT_MAX:.0f}"
    if not -(2**63) <= c.seed < 2**63:
        yield f"--seed {c.seed}: must fit into 64 bits with sign; give a number from {-(2**63)} to {2**63 - 1}"
    if c.leaves and c.leaves not in LEAVES:
        yield f"--leaves {c.leaves}: must be a power of two up to {LEAVES[-1]}, or 0 for the larger TP size"
    elif c.leaves and c.leaves < max(c.train.tp, c.rollout.tp):
        yield (
            f"--leaves {c.leaves} is smaller than the larger TP size {max(c.train.tp, c.rollout.tp)}; "
            "every rank needs at least one leaf, raise it or leave it out"
        )
    if c.plant is not None:
        from rl_parity.plant import PLANTS

        if c.plant not in PLANTS:
            yield f"--plant {c.plant}: supported are {', '.join(PLANTS)}"
        if c.arm == "native":
            yield f"--plant {c.plant} with --arm native: it is planted in the strict arm; use --arm strict or both"


def sampling(c: RunConfig) -> Iterator[str]:
    """Every sampling option that gives another distribution than the one a log-probability is of."""
    yield from (f"sampling: {violation}" for violation in metrics.semantics(c).violations())
    if 0 < c.temperature < LOWEST_TEMPERATURE or HIGHEST_TEMPERATURE < c.temperature < float("inf"):
        yield (
            f"--temperature {c.temperature}: supported are {LOWEST_TEMPERATURE} (below it the engine samples at that) "
            f"to {HIGHEST_TEMPERATURE} (fp32); give one in between"
        )
