"""One arm of a run: push, rollout, reward, score, check, update, step after step."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rl_contract import ContractError, Profile
from rl_parity import data, metrics, state
from rl_parity.checks import Identity, StepVerdict, compare_logprobs, describe_mismatch, judge
from rl_parity.clock import Clock
from rl_parity.config import RunConfig
from rl_parity.data import Prompt
from rl_parity.digests import apart
from rl_parity.evidence import write_evidence, write_sync
from rl_parity.fleet import Fleet
from rl_parity.launch import WorkerFailure
from rl_parity.launch.signals import shield
from rl_parity.outputs import enter, rewards_of, samples_of
from rl_parity.placement import Placement
from rl_parity.progress import Progress
from rl_parity.pushes import Pushes, weights_folder
from rl_parity.rundir import RunDirectory, StepSamples, ends_run, record_digests
from rl_parity.state import Saved
from rl_parity.vocabulary import FolderTokenizer, NoText
from vime_sync import WEIGHT_DIGEST, PolicyVersion, Publisher, StepLedger
from vime_sync.layout import ModelShape


class MismatchFound(Exception):
    """A step of the strict arm is not exactly equal, or one of either arm could not be compared; see the message."""


class LimitReached(Exception):
    """No further step of a sitting may begin: its time is over. Its state is saved where the run saves any."""


@dataclass
class Arm:
    """Everything one arm needs; ``run`` does it and returns the arm's step records.

    Attributes:
        model: checkpoint folder that engines and trainer start from.
        model_config: its config.json.
        profile: contracts of the strict arm; the native arm's reports carry none.
        placed: which process runs on which GPU.
        saved: the state to go on from, whose steps are in ``records`` already; None begins at step 0.
        algorithm: the digest that names weights.
        deadline: time (``time.monotonic``) after which no step begins.
    """

    name: str
    config: RunConfig
    run_id: str
    directory: RunDirectory
    model: Path
    model_config: dict[str, Any]
    profile: Profile
    prompts: Sequence[Prompt]
    tokenizer: FolderTokenizer | NoText
    max_model_len: int
    placed: Placement = field(default_factory=lambda: Placement(kind="cpu"))
    saved: Saved | None = None
    algorithm: str = WEIGHT_DIGEST
    deadline: float = math.inf
    records: list[dict[str, Any]] = field(default_factory=list)
    _saves: list[dict[str, Any]] = field(default_factory=list)

    def run(self) -> list[dict[str, Any]]:
        """Start the processes, do every step, collect the evidence, end the processes.

        Raises:
            MismatchFound: a step of the strict arm is not equal, or one of either arm could not be compared; that step
            is recorded, no update follows.
            WorkerFailure, PublishError: an engine, a trainer rank or a push failed.
            LimitReached: the time of this sitting is over.
        """
        if time.monotonic() >= self.deadline:
            # workers take longer to start than to be told that there is nothing to do
            raise LimitReached(self._so_far(len(self.records)))
        logs = self.directory.root / self.name / "logs"
        progress = Progress(self.name, self.config.steps, done=self.records)
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
                placed=self.placed,
            ) as fleet:
                if self.saved is not None:
                    self._restore(fleet, self.saved)
                with weights_folder(self.directory.root) as weights:
                    self._steps(fleet, weights, progress)
                fleet.shutdown()
        finally:
            progress.close()
        return self.records

    def _steps(self, fleet: Fleet, weights: Path, progress: Progress) -> None:
        publisher = Publisher(fleet.remote_engines(), ModelShape.from_hf_config(self.model_config))
        pushes = Pushes(fleet, publisher, weights, self.run_id, self.algorithm)
        ledger_path = self.directory.root / self.name / "ledger.jsonl"
        first, patience = len(self.records), 5.0
        with StepLedger(ledger_path, run_id=self.run_id) as ledger:
            if self.saved is not None:
                last = self.records[-1]
                if last["step"] not in ledger.recorded and ledger.recorded:
                    # a machine that failed may have lost this one line of those that wait for no disk
                    ledger.record(last["step"], self._digests(last))
                ledger.resume(self.saved.step, self.saved.digest)
            try:
                for step in range(first, self.config.steps):
                    if time.monotonic() >= self.deadline:
                        self._save(fleet, step - 1, last=True)
                        raise LimitReached(self._so_far(step))
                    prove = self.name == "strict" and step in (first, self.config.steps - 1)
                    record = self._step(step, fleet, pushes, ledger, progress, prove)
                    with shield():
                        # both or none, as the summary counts the one and its readers the other
                        self.directory.append_step(self.name, record)
                        self.records.append(record)
                    progress.step(record)
                    fleet.look()
                    if ends_run(self.name, record):
                        patience = 60.0
                        raise MismatchFound(self._explain(record))
                    self._save(fleet, step)
                patience = 60.0
            finally:
                write_sync(self.directory, self.name, publisher)
                more = {"weights": pushes.describe(), "saves": self._saves}
                write_evidence(self.directory, self.name, fleet, patience, **more)

    def _step(
        self, step: int, fleet: Fleet, pushes: Pushes, ledger: StepLedger, progress: Progress, prove: bool
    ) -> dict[str, Any]:
        c = self.config
        clock = Clock()
        progress.phase("push")
        fleet.rest()
        # engines wake while the trainer copies and digests its weights
        pushes.begin(step)
        # colocated engines take their memory back in two parts, so that a push never meets a full cache
        fleet.wake("weights")
        if fleet.sleep_level:
            clock.lap("wake")
        pushed = pushes.push(step)
        clock.lap("push")
        if prove and pushes.transport != "file":
            pushes.prove(step)
            clock.lap("prove")
        fleet.wake("kv_cache")
        clock.lap("wake")

        progress.phase("rollout")
        prompts = data.batch_for_step(self.prompts, step=step, batch=c.batch, seed=c.seed)
        outputs = self._rollout(step, fleet, prompts)
        reports = [report for reports in fleet.all(fleet.engines, "report") for report in reports]
        clock.lap("rollout")
        fleet.sleep()
        clock.lap("sleep")

        progress.phase("score")
        sequences = [(out["prompt"], out["tokens"]) for out in outputs]
        scored = fleet.all(fleet.trainers, "score", sequences, c.temperature)[0]
        rewards = rewards_of(c, self.tokenizer, prompts, outputs)
        samples = samples_of(prompts, c.group, outputs, scored["logprobs"], rewards)
        verdict = self._judge(step, samples, scored["tokens"], outputs, pushed["version"], fleet, reports)
        clock.lap("score")

        trained: dict[str, Any] | None = None
        forward_mismatches = 0
        equal = verdict.not_compared is None and (self.name == "native" or not _wrong(verdict))
        if equal:
            with ledger.batch():
                enter(ledger, PolicyVersion(self.run_id, step, pushed["digest"]), outputs, scored["tokens"])
            clock.lap("other")
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
        try:
            peaks = fleet.all(fleet.trainers, "memory")
        except WorkerFailure:
            if trained is not None:
                raise
            # that a step failed its checks is worth more than what it took
            peaks = []
        memory = {"trainers": peaks, "engines": [report.get("memory", {}) for report in reports]}
        record = {
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
            **({"memory": memory} if any(memory["trainers"]) else {}),
        }
        ledger.record(step, record_digests(record, samples), consumed=trained is not None)
        return record

    def _digests(self, record: dict[str, Any]) -> dict[str, str]:
        return record_digests(record, StepSamples.load(self.directory.samples_path(self.name, record["step"])))

    def _restore(self, fleet: Fleet, saved: Saved) -> None:
        """Give every trainer rank the state it saved, once its model has shown to be the one that the run began with.

        Raises:
            ContractError: the model's weights, or those of the state, are not those that were recorded.
        """
        began = fleet.all(fleet.trainers, "digest", self.algorithm)[0]
        if began != (told := self.records[0]["weight_digest"]):
            has, had = apart(began, told)
            raise ContractError(f"the model has weights {has}, the run began with {had}; give the same checkpoint")
        load = [
            lambda worker=worker, digest=digest: worker.call("load_state", str(saved.folder), digest)
            for worker, digest in zip(fleet.trainers, saved.ranks, strict=True)
        ]
        fleet.gather(load)
        now = fleet.all(fleet.trainers, "digest", self.algorithm)[0]
        if now != saved.digest:
            has, had = apart(now, saved.digest)
            raise ContractError(
                f"the restored state has weights {has}, {saved.folder} says {had}; "
                "resume from another copy of the run directory"
            )

    def _save(self, fleet: Fleet, step: int, *, last: bool = False) -> None:
        """Keep the trainer's state after ``step`` where a later sitting finds it; see ``rl_parity.state``.

        Args:
            last: the sitting ends here, so save whatever the number of the step, unless that has been done.
        """
        every, done = self.config.save_every, step + 1
        known = self._saves[-1]["step"] if self._saves else self.saved.step if self.saved else 0
        if not every or done == known or not (last or done % every == 0 or done == self.config.steps):
            return
        started = time.monotonic()
        folder = state.begin(self.directory.root / self.name / "state", step + 1)
        ranks = fleet.all(fleet.trainers, "save_state", str(folder))
        digest = fleet.all(fleet.trainers, "digest", self.algorithm)[0]
        state.finish(folder, run_id=self.run_id, step=step + 1, digest=digest, ranks=ranks)
        self._saves.append({"step": step + 1, "digest": digest, "seconds": round(time.monotonic() - started, 3)})

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

    def _judge(
        self,
        step: int,
        samples: StepSamples,
        scored_tokens: np.ndarray,
        outputs: Sequence[dict[str, Any]],
        version: str,
        fleet: Fleet,
        reports: Sequence[dict[str, Any]],
    ) -> StepVerdict:
        rollout, train = self._identities(fleet, reports)
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

    def _identities(self, fleet: Fleet, engines: Sequence[dict[str, Any]]) -> tuple[Identity, Identity]:
        trainers = fleet.all(fleet.trainers, "report")
        raw = any(report["logprobs"]["mode"] != "processed_logprobs" for report in engines)
        return (
            Identity(
                semantics=metrics.semantics(self.config, "raw" if raw else "processed"),
                profiles=[str(r["profile"]) for r in engines],
            ),
            Identity(semantics=metrics.semantics(self.config), profiles=[str(r["fingerprint"]) for r in trainers]),
        )

    def _so_far(self, done: int) -> str:
        how = f"go on with --resume {self.directory.root} --steps {self.config.steps}"
        return (
            f"--limit {self.config.limit:g} s is over: {done} of {self.config.steps} steps of the {self.name} arm are "
            f"done; {how if self.config.save_every else 'no state was saved, which --save-every would do'}"
        )

    def _explain(self, record: dict[str, Any]) -> str:
        if record["not_compared"]:
            return f"step {record['step']} was not compared: {record['not_compared']}"
        first = record["first_mismatch"]
        if first:
            return describe_mismatch(first, self.tokenizer.decode([first["token"]]))
        counts = ", ".join(f"{k} {record[k]}" for k in ("nonfinite_count", "absent_count", "valid_count"))
        return f"step {record['step']} is not equal: {counts}"


def _wrong(v: StepVerdict) -> bool:
    return bool(v.mismatch_count or v.nonfinite_count or v.absent_count) or not v.valid_count
