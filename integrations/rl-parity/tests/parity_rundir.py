"""A made-up run directory for tests of everything that reads one."""

import json
from pathlib import Path

import numpy as np

from rl_contract import Contract, Profile, Settings
from rl_parity import metrics
from rl_parity.checks import Identity, compare_logprobs, judge
from rl_parity.config import RolloutLayout, RunConfig, TrainLayout
from rl_parity.rundir import RunDirectory, StepSamples, is_equal, record_digests, summarize, write_json
from vime_sync import PolicyVersion, StepLedger

VERSION = "run-test:0:0123456789ab"


def profile(leaves: int = 2) -> Profile:
    settings = Settings(
        hidden_size=128, vocab_size=77, norm_eps=1e-6, rope={"theta": 1e4, "rotary_dim": 32}, leaves=leaves
    )
    contract = Contract(
        boundary="gemm.row",
        dependency="all K of one row",
        partition=f"{leaves} equal leaves",
        merge="balanced tree, lower k on the left",
        precision={"input": "bfloat16", "accumulator": "float32", "output": "bfloat16"},
        rounding=("output, nearest even",),
    )
    return Profile(name="strict", settings=settings, contracts={"gemm.row": contract})


def samples(seed: int = 0, *, count: int = 8, length: int = 6) -> StepSamples:
    rng = np.random.default_rng(seed)
    logp = -rng.exponential(2.0, count * length).astype(np.float32)
    return StepSamples(
        prompt_index=np.repeat(np.arange(count // 2, dtype=np.int32), 2),
        sample_index=np.tile(np.arange(2, dtype=np.int32), count // 2),
        prompt_length=np.full(count, 3, dtype=np.int32),
        length=np.full(count, length, dtype=np.int32),
        prompt_tokens=rng.integers(0, 77, count * 3).astype(np.int32),
        tokens=rng.integers(0, 77, count * length).astype(np.int32),
        rollout=logp,
        train=logp.copy(),
        forward=logp.copy(),
        absent=np.zeros(count * length, dtype=bool),
        reward=rng.integers(0, 2, count).astype(np.float32),
    )


def verdict_of(s: StepSamples, step: int = 0, **changes):
    """``judge`` with everything in order, except what ``changes`` says."""
    semantics = metrics.semantics(RunConfig())
    given = {
        "step": step,
        "scored_tokens": s.tokens.astype(np.int64),
        "versions": [[(VERSION, 0, int(n))] for n in s.length],
        "expected_version": VERSION,
        "rollout": Identity(semantics=semantics, profiles=[profile().fingerprint] * 2),
        "train": Identity(semantics=semantics, profiles=[profile().fingerprint] * 4),
        "profile": profile(),
        **changes,
    }
    return judge(s, **given)


def write_run(
    root: Path,
    *,
    seed: int = 0,
    steps: int = 4,
    arms=("native", "strict"),
    status: str = "finished",
    differs=("native",),
    tp: int = 2,
    engines: int = 2,
    still: bool = False,
) -> RunDirectory:
    """An older run, whose files have no digests.

    Args:
        differs: arms that differ in the last bits of every other token; the strict one ends with such a step.
        still: no gradient, and the same weights in every step.
    """
    run = RunDirectory(root)
    arm_option = "both" if len(arms) > 1 else arms[0]
    config = RunConfig(
        arm=arm_option,
        train=TrainLayout(tp=tp, cp=2),
        rollout=RolloutLayout(tp=2, engines=engines),
        steps=steps,
        out=str(root),
        seed=seed,
    )
    totals = {}
    for arm in arms:
        records = []
        ledger = StepLedger(root / arm / "ledger.jsonl", run_id="run-test")
        for step in range(steps):
            s = samples(seed * 1000 + step)
            if arm in differs:
                s.rollout[::2] += np.float32(0.004)
            s.save(run.samples_path(arm, step))
            v = verdict_of(s, step)
            v.metrics = metrics.step_metrics(s)
            v.mean_abs_diff = v.metrics.pop("mean_abs_diff")
            again, _ = compare_logprobs(s, s.train, s.forward, step, ("scoring", "training forward"))
            record = {
                "step": step,
                "weight_version": VERSION,
                "weight_digest": f"{seed:02d}{0 if still else step:062x}",
                **v.record(),
                "forward_mismatch_count": again.mismatch_count,
                "reward": float(s.reward.mean(dtype=np.float64)),
                "loss": 0.3 - 0.05 * step,
                "kl_reference": 0.001 * step,
                "clip_fraction": 0.0,
                "ratio_mean": 1.0,
                "grad_norm": 0.0 if still else 1.5 - 0.1 * step,
                "update_skipped": False,
                "tokens": int(s.tokens.size),
                "finished": 3,
                "seconds": {"push": 0.4, "rollout": 3.1, "score": 1.2, "train": 2.4, "other": 0.02},
            }
            trained = arm == "native" or is_equal(record)
            if not trained:
                record |= dict.fromkeys(("loss", "grad_norm"))
            run.append_step(arm, record)
            records.append(record)
            if not trained:
                break
            enter(ledger, record, s)
        ledger.close()
        pushed = [{"state": "published", "version": VERSION, "at": 1.0, "seconds": 0.1}] * steps
        write_json(root / arm / "sync.json", pushed)
        totals[arm] = summarize(records, 30.0)
        launches = [
            {
                "boundary": "gemm.row",
                "kernel": "rl_gemm.cpu.tree",
                "plan": "-",
                "layout": "tp2",
                "phase": "eager",
                "count": 40,
            }
        ]
        ours = launches if arm == "strict" else []
        write_json(
            root / arm / "evidence.json",
            {
                "train": {f"trainer-{r}": ours for r in range(2 * tp)},
                "rollout": {f"engine-{e}/worker-{w}": ours for e in range(engines) for w in range(2)},
                "reports": {},
                "missing": [],
            },
        )
    write_json(root / "summary.json", {"arms": totals, "status": status})
    run.write_manifest(
        {
            "run_id": "run-test",
            "status": status,
            "reason": None if status == "finished" else "engine-0: the process ended with status 7",
            "started": "2026-01-01T00:00:00+0000",
            "command": [
                f"rl-parity run --arm {arm_option} --train tp={tp},cp=2 --rollout tp=2,engines={engines} "
                f"--steps {steps} --seed {seed}"
            ],
            "config": json.loads(json.dumps(config.to_dict())),
            "sampling": metrics.semantics(config).to_dict(),
            "profile": profile().to_dict(),
            "versions": {"vllm": "0.32.0", "megatron-core": "0.16.1"},
            "hardware": {"processor": "a CPU", "cores": 2},
            "notes": ["native arm: fused kernels of Transformer Engine need CUDA"],
        }
    )
    return run


def make_older(root: Path) -> None:
    """As a version left the run that bound no files to each other and named no format."""
    for name in ("manifest.json", "summary.json"):
        held = json.loads((root / name).read_text())
        write_json(root / name, {k: v for k, v in held.items() if k not in ("format", "files_sha256", "inputs_sha256")})


def enter(ledger: StepLedger, record: dict, s: StepSamples) -> None:
    """What a trained step enters."""
    version = PolicyVersion("run-test", record["step"], record["weight_digest"])
    prompts = np.split(s.prompt_tokens, np.cumsum(s.prompt_length)[:-1])
    answers = np.split(s.tokens, np.cumsum(s.length)[:-1])
    with ledger.batch():
        ledger.add_version(version)
        ids = {f"{version.step}-{i}": [*p.tolist(), *a.tolist()] for i, (p, a) in enumerate(zip(prompts, answers))}
        for (name, tokens), length in zip(ids.items(), s.length):
            ledger.add_sample(name, generated=int(length), spans=[(str(version), 0, int(length))], token_ids=tokens)
        ledger.consume(version.step, ids, token_ids=ids)


def on_gpus(run: RunDirectory) -> RunDirectory:
    """The same run as if made on two colocated GPUs, in two sittings, with graphs."""
    gpus = [
        {
            "index": i,
            "uuid": f"GPU-{i:08x}-1111-2222-3333-444444444444",
            "name": "NVIDIA H200",
            "memory": 143771 * 2**20,
            "capability": "9.0",
            "driver": "580.159.03",
        }
        for i in range(4)
    ]
    uuids = [gpu["uuid"] for gpu in gpus]
    manifest = run.manifest()
    placement = {
        "kind": "colocated",
        "backend": "nccl",
        "trainers": uuids,
        "engines": [uuids[:2], uuids[2:]],
    }
    sittings = [
        {"started": "2026-01-01T00:00:00+0000", "gpus": gpus},
        {
            "started": "2026-01-02T00:00:00+0000",
            "gpus": gpus,
            "from_step": dict.fromkeys(run.arms(), 2),
            "done_again": {"strict": [{"step": 2, "weight_digest": "0" * 64}]},
        },
    ]
    run.write_manifest({**manifest, "gpus": gpus, "placement": placement, "sittings": sittings})
    for arm in run.arms():
        path = run.root / arm / "steps.jsonl"
        records = run.steps(arm)
        for record in records:
            record["seconds"] |= {"wake": 0.31, "sleep": 0.12} | ({"prove": 0.4} if record["step"] in (0, 3) else {})
            record["memory"] = {"trainers": [{"peak_gib": 21.5 + record["step"], "reserved_gib": 30.0}] * 4}
            record["memory"]["engines"] = [{"peak_gib": 8.25}] * 4
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        evidence = run.evidence(arm)
        for rows in (*evidence["train"].values(), *evidence["rollout"].values()):
            rows += [{**row, "phase": "replay", "count": 4000} for row in rows]
        proofs = [{"step": step, "version": VERSION, "shards": 620, "different": 0} for step in (0, 3)]
        report = {
            "profile": profile().fingerprint if arm == "strict" else None,
            "forwards": 640,
            "compilation": {"mode": "VLLM_COMPILE", "graphs": "FULL_AND_PIECEWISE"},
            "graphs": {"captures": 38, "replays": 612},
        }
        reports = dict.fromkeys(evidence["rollout"], report)
        weights = {"asked": "auto", "transport": "ipc", "reason": None, "sha256_proofs": proofs}
        write_json(run.root / arm / "evidence.json", {**evidence, "reports": reports, "weights": weights, "saves": []})
    return run


def keep_digests(run, arm):
    """What a real ledger has after every step."""
    path, records = run.root / arm / "ledger.jsonl", run.steps(arm)
    lines: list[str] = []
    if '"event":"record"' in path.read_text():
        return
    for line in path.read_text().splitlines():
        lines.append(line)
        event = json.loads(line)
        if event["event"] == "step":
            step = event["step"]
            digests = record_digests(records[step], StepSamples.load(run.samples_path(arm, step)))
            lines.append(json.dumps({"event": "record", "step": step, "digests": digests}))
    path.write_text("".join(f"{line}\n" for line in lines))
