"""``rl-parity run | doctor | compare | contracts | report``. Imports nothing heavy until a command needs it."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from typing import Any

from rl_parity.config import ARMS, LAUNCHERS, RolloutLayout, RunConfig, TrainLayout, parse_layout
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


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="rl-parity", description="RL training whose two engines compute the same bits.")
    parser.add_argument("--version", action="version", version=f"rl-parity {metadata.version('rl-parity')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="train, and compare every log-probability bit for bit")
    doctor = commands.add_parser("doctor", help="list every violated precondition of a run; starts nothing")
    for sub, command in ((run, _run), (doctor, _doctor)):
        _run_options(sub)
        sub.set_defaults(command=command)
    compare = commands.add_parser("compare", help="compare two run directories bit for bit")
    compare.add_argument("a", type=Path)
    compare.add_argument("b", type=Path)
    compare.set_defaults(command=_compare)
    contracts = commands.add_parser("contracts", help="print the contracts of a model as a Markdown table")
    contracts.add_argument("--model", default="tiny-qwen3", help="checkpoint folder, tiny-qwen3 or tiny-llama")
    contracts.add_argument("--leaves", type=int, default=1, help="G of tree(G)")
    contracts.set_defaults(command=_contracts)
    report = commands.add_parser("report", help="write report.html of a run directory again")
    report.add_argument("directory", type=Path)
    report.set_defaults(command=_report)
    return parser


def _run_options(p: argparse.ArgumentParser) -> None:
    d = RunConfig()
    p.add_argument(
        "--arm", choices=ARMS, default=d.arm, help="strict: our operators on both sides; native: the engines' own"
    )
    p.add_argument("--train", default="tp=1,cp=1", metavar="tp=N,cp=N", help="Megatron ranks")
    p.add_argument("--rollout", default="tp=1,engines=1", metavar="tp=N,engines=N", help="vLLM engines")
    p.add_argument("--steps", type=int, default=d.steps)
    p.add_argument("--model", default=d.model, metavar="PATH", help="Hugging Face folder, tiny-qwen3 or tiny-llama")
    p.add_argument("--out", default=d.out, metavar="DIR", help="new directory of this run")
    p.add_argument("--seed", type=int, default=d.seed)
    p.add_argument(
        "--prompts", default=d.prompts, metavar="JSONL", help='lines {"prompt", "answer"}; or arithmetic, easy'
    )
    p.add_argument("--reward", choices=("exact", "partial"), default=d.reward)
    p.add_argument("--batch", type=int, default=d.batch, help="prompts a step")
    p.add_argument("--group", type=int, default=d.group, help="samples a prompt")
    p.add_argument("--max-new-tokens", type=int, default=d.max_new_tokens)
    p.add_argument("--max-model-len", type=int, default=d.max_model_len, help="0: the model's own")
    p.add_argument("--temperature", type=float, default=d.temperature)
    p.add_argument("--lr", type=float, default=d.lr)
    p.add_argument("--kl", type=float, default=d.kl, help="weight of the KL term to the frozen reference")
    p.add_argument("--clip", type=float, default=d.clip, help="half-width of the clipped ratio")
    p.add_argument("--max-grad-norm", type=float, default=d.max_grad_norm)
    p.add_argument("--weight-decay", type=float, default=d.weight_decay)
    p.add_argument("--launcher", choices=LAUNCHERS, default=d.launcher)
    p.add_argument("--leaves", type=int, default=d.leaves, help="G of tree(G); 0: the larger TP size")
    p.add_argument("--timeout", type=float, default=d.timeout, help="seconds that any one call to a worker may take")
    for name in ("top-p", "min-p", "repetition-penalty", "presence-penalty", "frequency-penalty"):
        p.add_argument(f"--{name}", type=float, default=getattr(d, name.replace("-", "_")), help="neutral value only")
    p.add_argument("--top-k", type=int, default=d.top_k, help="neutral value only")
    p.add_argument("--plant", default=None, help=argparse.SUPPRESS)


def _config(args: argparse.Namespace) -> RunConfig:
    values: dict[str, Any] = {f.name: getattr(args, f.name) for f in fields(RunConfig)}
    values["train"] = TrainLayout(**parse_layout(args.train, "--train", ("tp", "cp")))
    values["rollout"] = RolloutLayout(**parse_layout(args.rollout, "--rollout", ("tp", "engines")))
    return RunConfig(**values)


def _run(args: argparse.Namespace) -> int:
    from rl_parity.runner import run

    return run(_config(args))


def _doctor(args: argparse.Namespace) -> int:
    from rl_parity import preflight

    config = _config(args)
    for name, version in preflight.versions().items():
        print(f"{name:<16} {version or 'missing'}")
    violations = preflight.check(config)
    if violations:
        print(preflight.Preflight(violations), file=sys.stderr)
        return USAGE
    print("every precondition holds")
    return EQUAL


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
