"""One frozen object holds everything that a run was asked to do."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from rl_contract import ContractError

ARMS = ("strict", "native", "both")
LAUNCHERS = ("ray", "local")
DEVICES = ("cpu", "cuda")
FAMILIES = ("segments", "nosplit")
NATIVE_OPERATORS = ("auto", "te", "local")
PLACEMENTS = ("auto", "colocated", "split", "shared")
TRANSPORTS = ("auto", "ipc", "host", "file")
SLEEP_LEVELS = ("auto", "0", "1", "2")


# how a run is carried out, as opposed to what it computes
CHANGEABLE = (
    "steps",
    "timeout",
    "launcher",
    "save_every",
    "limit",
    "gpus",
    "placement",
    "gpu_memory_utilization",
    "sleep",
    "weights",
)


@dataclass(frozen=True, kw_only=True)
class TrainLayout:
    """Megatron ranks: ``tp * cp`` processes."""

    tp: int = 1
    cp: int = 1

    @property
    def world_size(self) -> int:
        return self.tp * self.cp

    def __str__(self) -> str:
        return f"tp={self.tp},cp={self.cp}"


@dataclass(frozen=True, kw_only=True)
class RolloutLayout:
    """vLLM engines, each of ``tp`` workers."""

    tp: int = 1
    engines: int = 1

    @property
    def world_size(self) -> int:
        return self.tp * self.engines

    def __str__(self) -> str:
        return f"tp={self.tp},engines={self.engines}"


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything ``rl-parity run`` was asked for.

    Attributes:
        arm: ``strict`` (our operators on both sides), ``native`` (the engines' own), ``both`` one after the other.
        device: ``cpu`` or ``cuda``, for trainer and engines alike.
        gpus: indices of the GPUs to use, ``0,1``; empty means all that are visible.
        placement: ``colocated`` (trainer and engines take turns on the same GPUs), ``split`` (each has its own),
            ``shared`` (ranks share GPUs, over gloo, for tests); ``auto`` splits where there are GPUs enough.
        gpu_memory_utilization: share of a GPU that one engine takes; 0 takes what the trainer leaves.
        sleep: level that colocated engines sleep at while the trainer works; ``auto`` is 1 there and 0 elsewhere.
        weights: how a push travels: ``ipc`` (engines copy out of the trainer's GPU), ``host`` (out of memory that both
            map), ``file`` (written, read and checked by each side); ``auto`` is ``ipc`` on GPUs, ``host`` where that
            is forbidden, and ``file`` on a CPU.
        eager: no compilation and no graphs in the engines; on a CPU they are always eager.
        attention: family of the attention contract: ``segments`` (ours) or ``nosplit`` (a certified library, on GPUs).
        native_operators: what the native arm's trainer runs: ``te`` (Megatron-core with TransformerEngine), ``local``
            (Megatron's own modules); ``auto`` takes ``te`` on GPUs where it is installed.
        token_budget: most tokens of a trainer's micro-batch; 0 packs a step at once.
        save_every: save the trainer's state after every so many steps and at the end; 0 never does.
        limit: seconds after whose passing no step begins, for each sitting; 0 has no limit.
        model: path of a Hugging Face checkpoint, ``tiny-qwen3`` / ``tiny-llama``, or ``random:NAME``.
        prompts: JSONL file, ``arithmetic`` / ``easy``, or ``random:LENGTH`` / ``random:SHORTEST-LONGEST``.
        batch: prompts a step; ``group`` samples of each.
        kl: weight of the KL term to the frozen reference.
        clip: half-width of the clipped ratio.
        leaves: G of ``tree(G)``; 0 means the larger TP size of the two engines.
        plant: name of a deliberately mis-ordered kernel on the trainer side, for testing the check itself.
    """

    arm: str = "strict"
    train: TrainLayout = field(default_factory=TrainLayout)
    rollout: RolloutLayout = field(default_factory=RolloutLayout)
    steps: int = 5
    device: str = "cpu"
    gpus: str = ""
    placement: str = "auto"
    gpu_memory_utilization: float = 0.0
    sleep: str = "auto"
    weights: str = "auto"
    eager: bool = False
    attention: str = "segments"
    native_operators: str = "auto"
    token_budget: int = 0
    save_every: int = 0
    limit: float = 0.0
    model: str = "tiny-qwen3"
    out: str = "runs/latest"
    seed: int = 0
    prompts: str = "arithmetic"
    batch: int = 8
    group: int = 8
    max_new_tokens: int = 16
    max_model_len: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    reward: str = "exact"
    lr: float = 4e-4
    kl: float = 0.001
    clip: float = 0.2
    max_grad_norm: float = 1.0
    weight_decay: float = 0.0
    launcher: str = "ray"
    leaves: int = 0
    plant: str | None = None
    timeout: float = 600.0

    @property
    def arms(self) -> tuple[str, ...]:
        # native first: its verdict is the baseline that the strict verdict is read against
        return ("native", "strict") if self.arm == "both" else (self.arm,)

    @property
    def tree_leaves(self) -> int:
        return self.leaves or max(self.train.tp, self.rollout.tp)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "RunConfig":
        """From ``to_dict``; a field that is not there has its default.

        Raises:
            ContractError: fields that are unknown or of another type; all are named.
        """
        problems = list(_field_problems(cls, data))
        layouts = {name: kind for name, kind in (("train", TrainLayout), ("rollout", RolloutLayout)) if name in data}
        for name, kind in layouts.items():
            if isinstance(data[name], Mapping):
                problems += [f"{name}: {problem}" for problem in _field_problems(kind, data[name], least=1)]
            else:
                problems.append(f"{name}={data[name]!r}, supported: a mapping")
        if problems:
            raise ContractError(f"config: {'; '.join(problems)}")
        return cls(**{**data, **{name: kind(**data[name]) for name, kind in layouts.items()}})


def _field_problems(kind: Any, data: Mapping[str, Any], least: int | None = None) -> Iterator[str]:
    known: dict[str, Any] = {f.name: f.type for f in fields(kind)}
    if unknown := [name for name in data if name not in known]:
        yield f"unknown {', '.join(map(str, unknown))}, which another rl-parity wrote; use that version"
    # bool is an int to isinstance
    fits: dict[Any, tuple[type, ...]] = {
        int: (int,),
        float: (float, int),
        str: (str,),
        bool: (bool,),
        str | None: (str, type(None)),
    }
    for name, value in data.items():
        wanted = fits.get(known.get(name))
        if wanted is not None and type(value) not in wanted:
            yield f"{name}={value!r}, supported: {' or '.join(w.__name__ for w in wanted)}"
        elif wanted is not None and least is not None and value < least:
            yield f"{name}={value!r}, supported: at least {least}"


# larger counts than this are no counts; also what the engines hold them in
MOST = 2**31 - 1


def is_count(text: str) -> bool:
    """Whether ``text`` is a whole number from 0 to ``MOST`` in the digits 0 to 9, which ``int`` alone does not say."""
    return text.isascii() and text.isdecimal() and len(text) <= 10 and int(text) <= MOST


def parse_layout(text: str, option: str, supported: tuple[str, ...]) -> dict[str, int]:
    """``"tp=2,cp=2"`` as a dict.

    Raises:
        ContractError: an empty part, an unknown key, a repeated key, or a value that is not a positive integer.
    """
    out: dict[str, int] = {}
    example = ",".join(f"{s}=2" for s in supported)
    for part in (p.strip() for p in text.split(",")):
        key, _, value = part.partition("=")
        if key not in supported:
            raise ContractError(
                f"{option} got {part!r}; supported keys are {', '.join(supported)}, e.g. {option} {example}"
            )
        if key in out:
            raise ContractError(f"{option} got {key} twice in {text!r}; give each key once")
        if not is_count(value) or int(value) < 1:
            raise ContractError(f"{option} got {part!r}; {key} must be a positive integer")
        out[key] = int(value)
    return out
