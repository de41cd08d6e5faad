"""``rl-parity run | doctor | compare | contracts | report``. Imports nothing heavy until a command needs it."""

import argparse
import io
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from typing import Any

from rl_parity.config import (
    ARMS,
    DEVICES,
    FAMILIES,
    LAUNCHERS,
    NATIVE_OPERATORS,
    PLACEMENTS,
    SLEEP_LEVELS,
    TRANSPORTS,
    RolloutLayout,
    RunConfig,
    TrainLayout,
    parse_layout,
)
from rl_parity.launch import signals
from rl_parity.status import EQUAL, FAILURE, INTERRUPTED, MISMATCH, USAGE


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status.

    0 equal, 1 a mismatch, 2 usage or a failed preflight, 3 an engine or sync failure, 130 interrupted.
    """
    args = _parser().parse_args(argv)
    signals.install()
    try:
        return _command(args)
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        if argv is None:
            signals.ignore()


def _command(args: argparse.Namespace) -> int:
    from rl_contract import ContractError, MissingSupport

    try:
        status: int = args.command(args)
    except (ContractError, MissingSupport) as error:
        print(f"rl-parity: {error}", file=sys.stderr)
        return USAGE
    except Exception as error:
        # 1 would read as a mismatch
        print(f"rl-parity: {type(error).__name__}: {error}", file=sys.stderr)
        return FAILURE
    return status


class _Parser(argparse.ArgumentParser):
    """An option must be written out: an abbreviation could name another option in the next version."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{**kwargs, "allow_abbrev": False})


def _integer(text: str) -> int:
    # int alone takes other scripts' digits and underscores too
    if not re.fullmatch(r"[+-]?[0-9]{1,40}", text.strip(" ")):
        raise argparse.ArgumentTypeError(f"{text[:60]!r} is no whole number; give digits 0 to 9")
    return int(text)


def _number(text: str) -> float:
    try:
        if not text.isascii() or "_" in text:
            raise ValueError
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:60]!r} is no number; give e.g. 0.5 or 1e-3") from None


def _filled(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is empty; give a value or leave the option out")
    return text


def _directory(text: str) -> Path:
    if "\0" in text:
        raise argparse.ArgumentTypeError(f"{text!r} holds a null byte, which no path can; give another directory")
    # the path of nothing would be the working directory
    return Path(_filled(text))


def _version() -> str:
    try:
        return metadata.version("rl-parity")
    except metadata.PackageNotFoundError:
        return "of a checkout, not installed"


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="rl-parity", description="RL training whose two engines compute the same bits.")
    parser.add_argument("--version", action="version", version=f"rl-parity {_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="train, and compare every log-probability bit for bit")
    doctor = commands.add_parser("doctor", help="list every violated precondition of a run; starts nothing")
    run.add_argument("--resume", type=_directory, metavar="DIR", help="go on with the run in DIR, up to --steps in all")
    for sub, command in ((run, _run), (doctor, _doctor)):
        _run_options(sub)
        sub.set_defaults(command=command)
    compare = commands.add_parser("compare", help="compare two run directories bit for bit")
    compare.add_argument("a", type=_directory)
    compare.add_argument("b", type=_directory)
    compare.set_defaults(command=_compare)
    contracts = commands.add_parser("contracts", help="print the contracts of a model as a Markdown table")
    contracts.add_argument(
        "--model", default="tiny-qwen3", help="checkpoint folder, tiny-qwen3, tiny-llama or random:NAME"
    )
    contracts.add_argument("--leaves", type=_integer, default=1, help="G of tree(G)")
    contracts.set_defaults(command=_contracts)
    report = commands.add_parser("report", help="write report.html of a run directory again")
    report.add_argument("directory", type=_directory)
    report.set_defaults(command=_report)
    return parser


def _run_options(p: argparse.ArgumentParser) -> None:
    # an option that was not given is not in the result: a resumed run asks what was
    def add(name: str, **how: Any) -> None:
        p.add_argument(f"--{name}", default=argparse.SUPPRESS, **how)

    add("arm", choices=ARMS, help="strict: our operators on both sides; native: the engines' own")
    add("device", choices=(*DEVICES, "auto"), help="auto, the default, takes GPUs where torch sees some")
    add("gpus", type=_filled, metavar="0,1", help="indices of the GPUs to use; default: all visible ones")
    add("placement", choices=PLACEMENTS, help="trainer and engines on the same GPUs in turns, or each on its own")
    add("gpu-memory-utilization", type=_number, help="share of a GPU an engine takes; 0: what the trainer leaves")
    add("sleep", choices=SLEEP_LEVELS, help="level at which colocated engines sleep while the trainer works")
    add("weights", choices=TRANSPORTS, help="how a push travels: CUDA IPC, memory of the host, or files")
    add("attention", choices=FAMILIES, help="segments: our kernels; nosplit: the certified library, on GPUs")
    add("native-operators", choices=NATIVE_OPERATORS, help="of the native trainer: te is TransformerEngine")
    add("eager", action="store_true", help="engines without compilation and graphs")
    add("train", metavar="tp=N,cp=N", help="Megatron ranks")
    add("rollout", metavar="tp=N,engines=N", help="vLLM engines")
    add("steps", type=_integer)
    add("model", metavar="PATH", help="Hugging Face folder, tiny-qwen3, tiny-llama or random:NAME")
    add("out", metavar="DIR", help="new directory of this run")
    add("save-every", type=_integer, metavar="K", help="keep the trainer's state every K steps, for --resume; 0: never")
    add("limit", type=_number, metavar="S", help="begin no step after S seconds, save the state and end; 0: no limit")
    add("seed", type=_integer)
    add("prompts", metavar="JSONL", help='lines {"prompt", "answer"}; or arithmetic, easy, random:LENGTH')
    add("reward", choices=("exact", "partial", "even", "repeat"))
    add("batch", type=_integer, help="prompts a step")
    add("group", type=_integer, help="samples a prompt")
    add("max-new-tokens", type=_integer)
    add("max-model-len", type=_integer, help="0: the model's own")
    add("token-budget", type=_integer, help="most tokens of a trainer's micro-batch; 0: a step at once")
    add("temperature", type=_number)
    add("lr", type=_number)
    add("kl", type=_number, help="weight of the KL term to the frozen reference")
    add("clip", type=_number, help="half-width of the clipped ratio")
    add("max-grad-norm", type=_number)
    add("weight-decay", type=_number)
    add("launcher", choices=LAUNCHERS)
    add("leaves", type=_integer, help="G of tree(G); 0: the larger TP size")
    add("timeout", type=_number, help="seconds that any one call to a worker may take")
    for name in ("top-p", "min-p", "repetition-penalty", "presence-penalty", "frequency-penalty"):
        add(name, type=_number, help="neutral value only")
    add("top-k", type=_integer, help="neutral value only")
    add("plant", help=argparse.SUPPRESS)


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """The options that were given, by field of ``RunConfig``."""
    from rl_parity.gpus import choose_device

    given = {f.name: getattr(args, f.name) for f in fields(RunConfig) if hasattr(args, f.name)}
    if "train" in given:
        given["train"] = TrainLayout(**parse_layout(given["train"], "--train", ("tp", "cp")))
    if "rollout" in given:
        given["rollout"] = RolloutLayout(**parse_layout(given["rollout"], "--rollout", ("tp", "engines")))
    if "device" in given:
        given["device"] = choose_device(given["device"])
    return given


def options_of(words: Sequence[str]) -> dict[str, Any] | None:
    """What the words after ``rl-parity run`` give, by field of ``RunConfig``; None where this version lacks an option.

    ``--device auto`` is left out: another machine may choose otherwise.
    """
    from rl_contract import ContractError

    try:
        with redirect_stderr(io.StringIO()):
            args = _parser().parse_args(["run", *words])
        if getattr(args, "device", None) == "auto":
            del args.device
        return _given(args)
    except (SystemExit, ContractError):
        return None


def _config(args: argparse.Namespace) -> RunConfig:
    from rl_parity.gpus import choose_device

    given = _given(args)
    given.setdefault("device", choose_device("auto"))
    return RunConfig(**completed(given))


def completed(options: Mapping[str, Any]) -> dict[str, Any]:
    """``options`` with the defaults that depend on others."""
    from rl_parity.data import RANDOM
    from rl_parity.random_models import PREFIX

    given = dict(options)
    if given.get("model", "").startswith(PREFIX) or given.get("prompts", "").startswith(RANDOM):
        # nothing else can be rewarded where there is no language
        given.setdefault("reward", "even")
    return given


def _run(args: argparse.Namespace) -> int:
    from rl_parity.runner import run

    if args.resume is None:
        return run(_config(args))
    from rl_parity.resume import config_of
    from rl_parity.rundir import RunDirectory

    return run(config_of(RunDirectory(args.resume), _given(args)), again=True)


def _doctor(args: argparse.Namespace) -> int:
    from rl_parity import preflight

    config = _config(args)
    for name, version in preflight.versions().items():
        print(f"{name:<16} {version or 'missing'}")
    for line in _devices(config):
        print(line)
    violations = preflight.check(config)
    if violations:
        print(preflight.Preflight(violations), file=sys.stderr)
        return USAGE
    for note in preflight.notes(config):
        print(f"note: {note}")
    print("every precondition holds")
    return EQUAL


def _devices(config: RunConfig) -> list[str]:
    """GPUs, and who would run on each; empty on a CPU. What is wrong with them is listed with the violations."""
    from rl_contract import ContractError, MissingSupport
    from rl_parity import preflight
    from rl_parity.placement import GIB, place, spread

    try:
        gpus = preflight.gpus_of(config)
        placed = place(config, gpus)
    except (ContractError, MissingSupport):
        return []
    who = spread(placed)
    return [
        f"GPU {gpu.index:<12} {gpu.name}, {gpu.memory / GIB:.0f} GiB, compute capability {gpu.capability}, driver "
        f"{gpu.driver}, {placed.kind}: {', '.join(who.get(i, ['unused']))}"
        for i, gpu in enumerate(gpus)
    ]


def _compare(args: argparse.Namespace) -> int:
    from rl_parity.compare import compare_runs
    from rl_parity.rundir import RunDirectory

    comparison = compare_runs(RunDirectory(args.a), RunDirectory(args.b))
    print("\n".join(comparison.lines()))
    print("verdict: EQUAL, bit for bit" if comparison.equal else "verdict: DIFFERENT")
    return EQUAL if comparison.equal else MISMATCH


def _contracts(args: argparse.Namespace) -> int:
    from rl_parity import preflight
    from rl_parity.contracts import markdown

    config = RunConfig(model=args.model, leaves=args.leaves)
    print(markdown(preflight.profile(config, preflight.model_config(config))), end="")
    return EQUAL


def _report(args: argparse.Namespace) -> int:
    from rl_parity.report import write_report
    from rl_parity.rundir import RunDirectory

    print(write_report(RunDirectory(args.directory)))
    return EQUAL


if __name__ == "__main__":
    sys.exit(main())
