"""One arm of a run: push, rollout, reward, score, check, update, step after step."""

import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rl_contract import ContractError, Profile
from rl_parity import data, metrics
from rl_parity.checks import Identity, StepVerdict, compare_logprobs, describe_mismatch, judge
from rl_parity.config import RunConfig
from rl_parity.data import Prompt
from rl_parity.fleet import Fleet
from rl_parity.launch import WorkerFailure
from rl_parity.progress import Progress
from rl_parity.rundir import RunDirectory, StepSamples, is_equal, write_json
from rl_parity.vocabulary import FolderTokenizer
from vime_sync import PolicyVersion, Publisher, StepLedger
from vime_sync.layout import ModelShape


class MismatchFound(Exception):
    """A step of the strict arm is not exactly equal, or one of either arm could not be compared; see the message."""


@dataclass
class Arm:
    """Everything one arm needs; ``run`` does it and returns the arm's step records.

    Attributes:
        model: checkpoint folder that engines and trainer start from.
        model_config: its config.json.
        profile: contracts of the strict arm; the native arm's reports carry none.
    """

    name: str
    config: RunConfig
    run_id: str
    directory: RunDirectory
    model: Path
    model_config: dict[str, Any]
    profile: Profile
    prompts: Sequence[Prompt]
    tokenizer: FolderTokenizer
    max_model_len: int
    records: list[dict[str, Any]] = field(default_factory=list)

    def run(self) -> list[dict[str, Any]]:
        """Start the processes, do every step, collect the evidence, end the processes.

        Raises:
            MismatchFound: a step of the strict arm is not equal, or one of either arm could not be compared; that step
            is recorded, no update follows.
            WorkerFailure, PublishError: an engine, a trainer rank or a push failed.
        """
        logs = self.directory.root / self.name / "logs"
        progress = Progress(self.name, self.config.steps)
        try:
            progress.phase("starting workers")
            longest = max(len(p.ids) for p in self.prompts) + self.config.max_new_tokens
            with Fleet(
                self.config,
                self.name,
                self.model,
                self.profile,
                logs,
                max_model_len=self.max_model_len,
                longest_sequence=longest,
            ) as fleet:
                with _weights_folder(self.directory.root, self.run_id) as weights:
                    self._steps(fleet, weights, progress)
                fleet.shutdown()
        finally:
            progress.close()
        return self.records

    def _steps(self, fleet: Fleet, weights: Path, progress: Progress) -> None:
        publisher = Publisher(fleet.remote_engines(), ModelShape.from_hf_config(self.model_config))
        ledger_path = self.directory.root / self.name / "ledger.jsonl"
        patience = 5.0
        with StepLedger(ledger_path, run_id=self.run_id) as ledger:
            try:
                for step in range(self.config.steps):
                    record = self._step(step, fleet, publisher, ledger, weights, progress)
                    self.records.append(record)
                    self.directory.append_step(self.name, record)
                    progress.step(record)
                    if record["not_compared"] or (self.name == "strict" and not is_equal(record)):
                        patience = 60.0
                        raise MismatchFound(self._explain(record))
                patience = 60.0
            finally:
                self._write_sync(publisher)
                self._write_evidence(fleet, patience)

    def _step(
        self, step: int, fleet: Fleet, publisher: Publisher, ledger: StepLedger, weights: Path, progress: Progress
    ) -> dict[str, Any]:
        c = self.config
        clock = _Clock()
        progress.phase("push")
        pushed = self._push(step, fleet, publisher, weights)
        clock.lap("push")

        progress.phase("rollout")
        prompts = data.batch_for_step(self.prompts, step=step, batch=c.batch, seed=c.seed)
        outputs = self._rollout(step, fleet, prompts)
        clock.lap("rollout")

        progress.phase("score")
        sequences = [(out["prompt"], out["tokens"]) for out in outputs]
        scored = fleet.all(fleet.trainers, "score", sequences, c.temperature)[0]
        rewards = self._rewards(prompts, outputs)
        samples = self._samples(prompts, outputs, scored["logprobs"], rewards)
        verdict = self._judge(step, samples, scored["tokens"], outputs, pushed["version"], fleet)
        clock.lap("score")

        trained: dict[str, Any] | None = None
        forward_mismatches = 0
        equal = verdict.not_compared is None and (self.name == "native" or not _wrong(verdict))
        if equal:
            self._enter(ledger, step, pushed["digest"], outputs, scored["tokens"])
            progress.phase("train")
            trained = fleet.all(
                fleet.trainers,
                "train",
                sequences,
                rewards,
                c.group,
                scored["logprobs"],
                scored["reference"],
                c.temperature,
            )[0]
            samples.forward[:] = np.concatenate(trained["logprobs"])
            # a token that the engine left out still has both trainer values
            again, first = compare_logprobs(
                samples, samples.train, samples.forward, step, ("scoring", "training forward")
            )
            forward_mismatches = again.mismatch_count
            verdict.first_mismatch = verdict.first_mismatch or first
            clock.lap("train")
        samples.save(self.directory.samples_path(self.name, step))
        clock.lap("other")
        if verdict.not_compared is None:
            verdict.metrics = metrics.step_metrics(samples)
            verdict.mean_abs_diff = verdict.metrics.pop("mean_abs_diff")
        return {
            "step": step,
            "weight_version": pushed["version"],
            "weight_digest": pushed["digest"],
            **verdict.record(),
            "forward_mismatch_count": forward_mismatches,
            "reward": float(np.mean(rewards)),
            "loss": None if trained is None else float(trained["loss"]),
            "kl_reference": None if trained is None else float(trained["kl"]),
            "clip_fraction": None if trained is None else float(trained["clip_fraction"]),
            "ratio_mean": None if trained is None else float(trained["ratio_mean"]),
            "grad_norm": None if trained is None else float(trained["grad_norm"]),
            "update_skipped": None if trained is None else bool(trained["skipped"]),
            "tokens": int(samples.tokens.size),
            "finished": sum(out["finish"] == "stop" for out in outputs),
            "seconds": clock.seconds,
        }

    def _push(self, step: int, fleet: Fleet, publisher: Publisher, weights: Path) -> dict[str, str]:
        """Export the trainer's weights and publish them on every engine, verified; returns version, digest and path."""
        folder = weights / f"{self.name}-{step}"
        exported: dict[str, str] = fleet.all(fleet.trainers, "export", str(folder), self.run_id, step)[0]
        try:
            publisher.publish(folder, PolicyVersion(self.run_id, step, exported["digest"]))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return exported

    def _rollout(self, step: int, fleet: Fleet, prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
        """``group`` completions per prompt, in prompt order; each engine serves a contiguous share of the prompts."""
        c = self.config
        requests = [
            (list(prompt.ids), data.sampling_seed(c.seed, step, place, sample))
            for place, prompt in enumerate(prompts)
            for sample in range(c.group)
        ]
        share = -(-len(prompts) // len(fleet.engines)) * c.group
        calls = []
        for index, engine in enumerate(fleet.engines):
            mine = requests[index * share : (index + 1) * share]
            if mine:
                calls.append(lambda engine=engine, mine=mine: self._generate(engine, mine))
        return [out for part in fleet.gather(calls) for out in part]

    def _generate(self, engine: Any, requests: Sequence[tuple[list[int], int]]) -> Any:
        eos = self.model_config.get("eos_token_id")
        return engine.call(
            "generate",
            [ids for ids, _ in requests],
            [seed for _, seed in requests],
            temperature=self.config.temperature,
            max_new_tokens=self.config.max_new_tokens,
            eos=eos if isinstance(eos, list) or eos is None else [eos],
        )

    def _rewards(self, prompts: Sequence[Prompt], outputs: Sequence[dict[str, Any]]) -> list[float]:
        score = data.REWARDS[self.config.reward]
        answers = [prompt.answer for prompt in prompts for _ in range(self.config.group)]
        return [score(self.tokenizer.decode(out["tokens"]), answer) for out, answer in zip(outputs, answers)]

    def _samples(
        self,
        prompts: Sequence[Prompt],
        outputs: Sequence[dict[str, Any]],
        scored: Sequence[np.ndarray],
        rewards: Sequence[float],
    ) -> StepSamples:
        flat = [value for out in outputs for value in out["logprobs"]]
        absent = np.array([value is None for value in flat], dtype=bool)
        rollout = np.array([np.nan if value is None else value for value in flat], dtype=np.float32)
        return StepSamples(
            prompt_index=np.repeat(np.array([p.index for p in prompts], dtype=np.int32), self.config.group),
            sample_index=np.tile(np.arange(self.config.group, dtype=np.int32), len(prompts)),
            prompt_length=np.array([len(out["prompt"]) for out in outputs], dtype=np.int32),
            length=np.array([len(out["tokens"]) for out in outputs], dtype=np.int32),
            prompt_tokens=np.array([t for out in outputs for t in out["prompt"]], dtype=np.int32),
            tokens=np.array([t for out in outputs for t in out["tokens"]], dtype=np.int32),
            rollout=rollout,
            train=np.concatenate([np.asarray(v, dtype=np.float32) for v in scored]),
            forward=np.full(len(flat), np.nan, dtype=np.float32),
            absent=absent,
            reward=np.array(rewards, dtype=np.float32),
        )

    def _judge(
        self,
        step: int,
        samples: StepSamples,
        scored_tokens: np.ndarray,
        outputs: Sequence[dict[str, Any]],
        version: str,
        fleet: Fleet,
    ) -> StepVerdict:
        rollout, train = self._identities(fleet)
        return judge(
            samples,
            step=step,
            scored_tokens=scored_tokens,
            versions=[out["versions"] for out in outputs],
            expected_version=version,
            rollout=rollout,
            train=train,
            profile=self.profile if self.name == "strict" else None,
        )

    def _identities(self, fleet: Fleet) -> tuple[Identity, Identity]:
        engines = [report for reports in fleet.all(fleet.engines, "report") for report in reports]
        trainers = fleet.all(fleet.trainers, "report")
        raw = any(report["logprobs"]["mode"] != "processed_logprobs" for report in engines)
        return (
            Identity(
                semantics=metrics.semantics(self.config, "raw" if raw else "processed"),
                profiles=[str(r["profile"]) for r in engines],
            ),
            Identity(semantics=metrics.semantics(self.config), profiles=[str(r["fingerprint"]) for r in trainers]),
        )

    def _enter(
        self, ledger: StepLedger, step: int, digest: str, outputs: Sequence[dict[str, Any]], scored: np.ndarray
    ) -> None:
        ledger.add_version(PolicyVersion(self.run_id, step, digest))
        consumed: dict[str, list[int]] = {}
        start = 0
        for i, out in enumerate(outputs):
            end = start + len(out["tokens"])
            ledger.add_sample(
                f"{step}-{i}",
                generated=len(out["tokens"]),
                spans=out["versions"],
                token_ids=out["prompt"] + out["tokens"],
            )
            consumed[f"{step}-{i}"] = out["prompt"] + scored[start:end].tolist()
            start = end
        ledger.consume(step, consumed, token_ids=consumed)

    def _explain(self, record: dict[str, Any]) -> str:
        if record["not_compared"]:
            return f"step {record['step']} was not compared: {record['not_compared']}"
        first = record["first_mismatch"]
        if first:
            return describe_mismatch(first, self.tokenizer.decode([first["token"]]))
        counts = ", ".join(f"{k} {record[k]}" for k in ("nonfinite_count", "absent_count", "valid_count"))
        return f"step {record['step']} is not equal: {counts}"

    def _write_evidence(self, fleet: Fleet, patience: float) -> None:
        """What the workers counted. A worker that does not answer leaves a gap, which is written down as such."""
        evidence: dict[str, Any] = {"train": {}, "rollout": {}, "reports": {}, "missing": []}
        deadline = time.monotonic() + patience
        calls = [(worker, worker.call("report")) for worker in (*fleet.trainers, *fleet.engines)]
        for worker, call in calls:
            try:
                answer = call.result(max(0.1, deadline - time.monotonic()))
            except WorkerFailure as error:
                evidence["missing"].append(str(error).splitlines()[0])
                continue
            if isinstance(answer, list):
                for report in answer:
                    self._file(evidence, "rollout", f"{worker.name}/worker-{report['rank']}", report)
            else:
                self._file(evidence, "train", worker.name, answer)
        write_json(self.directory.root / self.name / "evidence.json", evidence)

    @staticmethod
    def _file(evidence: dict[str, Any], side: str, name: str, report: dict[str, Any]) -> None:
        evidence[side][name] = report["launches"]
        evidence["reports"][name] = {k: v for k, v in report.items() if k != "launches"}

    def _write_sync(self, publisher: Publisher) -> None:
        rows = [
            {"state": str(t.state), "version": t.version, "at": t.at, "seconds": t.seconds} for t in publisher.history
        ]
        write_json(self.directory.root / self.name / "sync.json", rows)


def _wrong(v: StepVerdict) -> bool:
    return bool(v.mismatch_count or v.nonfinite_count or v.absent_count) or not v.valid_count


class _Clock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.seconds[name] = round(now - self._last, 4)
        self._last = now


@contextmanager
def _weights_folder(root: Path, run_id: str) -> Iterator[Path]:
    """Where pushes travel: shared memory where there is any, else the run directory; removed afterwards."""
    shared = Path("/dev/shm")
    base = shared if shared.is_dir() else root
    folder = Path(tempfile.mkdtemp(prefix=f"rl-parity-{run_id}-", dir=base))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def load_prompts(
    config: RunConfig, model: Path, model_config: dict[str, Any], longest: int
) -> tuple[FolderTokenizer, list[Prompt]]:
    """The checkpoint's tokenizer and the encoded data set.

    Raises:
        ContractError: see ``data.read_examples`` and ``data.encode``.
    """
    tokenizer = FolderTokenizer(model)
    if longest <= config.max_new_tokens:
        raise ContractError(f"--max-new-tokens {config.max_new_tokens}: the context is {longest}; lower it")
    prompts = data.encode(
        data.read_examples(config.prompts),
        tokenizer,
        vocab_size=int(model_config["vocab_size"]),
        max_prompt=longest - config.max_new_tokens,
    )
    return tokenizer, prompts
