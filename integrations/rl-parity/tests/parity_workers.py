"""Trainer and engine workers without any engine, and a launcher that runs them in this process."""

import random
from pathlib import Path

import numpy as np
from safetensors.torch import load_file

from rl_contract import Profile
from rl_parity import checkpoint, state
from rl_parity.launch import WorkerFailure, WorkerGone
from vime_sync import Loan, Manifest, PolicyVersion, lend_weights, shard_digests, write_weights
from vime_sync.layout import ModelShape
from vime_sync.testing import FakeEngine

# what goes wrong: (who, what) -> set by a test
FAULTS: set[str] = set()


def launched(arm) -> list[dict]:
    """What a worker of the arm counts."""
    ours = {"attention": "attn", "rotary": "attn", "gemm.column": "gemm", "gemm.row": "gemm", "swiglu": "gemm"}
    ours |= {"logprob": "logprob", "norm": "norm", "collective": "comm"}
    rows = [{"boundary": boundary, "kernel": f"rl_{package}.fake", "count": 3} for boundary, package in ours.items()]
    return rows if arm == "strict" else []


def logprob(tokens) -> np.ndarray:
    return -(1.0 + np.asarray(tokens, dtype=np.float32) / 64 + np.arange(len(tokens), dtype=np.float32) / 16)


class FakeTrainer:
    def __init__(self, *, rank, arm, model, profile, **kwargs):
        self.rank, self.arm, self.kwargs = rank, arm, kwargs
        self.calls, self.exports = [], []
        self.loan = None
        self.model, self.steps = model, 0
        self.weights = load_file(f"{model}/model.safetensors")
        self.fingerprint = Profile.from_dict(profile).fingerprint

    def start(self):
        self.shape = ModelShape.from_hf_config(checkpoint.read_config(Path(self.model)))

    def export(self, directory, run_id, step, transport, tps, algorithm):
        self.exports.append(Path(directory).name)
        if self.rank:
            return None
        if transport != "file":
            self.loan = self.loan or Loan("cpu", Path(directory).parent)
            manifest = self.loan.fill(self.weights, algorithm=algorithm)
            version = PolicyVersion(run_id, step, manifest.digest)
            lend_weights(directory, self.loan, version, self.shape, tps)
            if "no ipc" in FAULTS and transport == "ipc":
                self.loan.close()
                self.loan = None
        else:
            manifest = Manifest.from_tensors(self.weights, algorithm=algorithm)
            version = PolicyVersion(run_id, step, manifest.digest)
            write_weights(directory, self.weights, version, manifest)
        return {"path": directory, "version": str(version), "digest": manifest.digest}

    def digest(self, algorithm):
        return None if self.rank else Manifest.from_tensors(self.weights, algorithm=algorithm).digest

    def shard_digests(self, tp, algorithm):
        found = shard_digests(self.weights, self.shape, tp, algorithm)
        if "proof" in FAULTS:
            found[0, "model.norm.weight"] = "0" * 64
        return found

    def save_state(self, folder):
        return state.write_rank(Path(folder), self.rank, {"steps": self.steps, "state": self.weights})

    def load_state(self, folder, digest):
        held = state.read_rank(Path(folder), self.rank, digest)
        self.steps, self.weights = held["steps"], held["state"]

    def rest(self, room):
        self.calls.append("rest")
        self.room = room

    def memory(self):
        return {"peak_gib": 1.5, "reserved_gib": 2.0} if self.kwargs["device"] == "cuda" else {}

    def score(self, sequences, temperature):
        values = [logprob(tokens) for _, tokens in sequences]
        ids = np.concatenate([np.asarray(tokens, dtype=np.int64) for _, tokens in sequences])
        if "swapped samples" in FAULTS:
            ids = np.roll(ids, 1)
        return {"logprobs": values, "reference": values, "tokens": ids}

    def train(self, sequences, rewards, group, old, reference, temperature):
        self.weights["model.norm.weight"] = self.weights["model.norm.weight"] * 2
        self.steps += 1
        values = [v.copy() for v in old]
        if "training forward" in FAULTS:
            values[1][2] = np.nextafter(values[1][2], np.float32(0))
        return {
            "logprobs": values,
            "loss": float(np.mean(rewards)),
            "kl": 0.0,
            "clip_fraction": 0.0,
            "ratio_mean": 1.0,
            "grad_norm": 1.0,
            "skipped": False,
        }

    def report(self):
        fingerprint = "f" * 64 if "trainer contract" in FAULTS else self.fingerprint
        ran = launched(self.arm)
        return {"rank": self.rank, "mode": self.arm, "fingerprint": fingerprint, "substitutions": [], "launches": ran}

    def close(self):
        pass


class FakeRollout:
    def __init__(self, *, name, arm, model, profile, tp, **kwargs):
        self.calls, self.kwargs, self.asleep, self.tp = [], kwargs, set(), tp
        shape = ModelShape.from_hf_config(checkpoint.read_config(Path(model)))
        faults = FAULTS & {"caches_held", "flip_bit", "transfer"} if name == "engine-1" else set()
        self.engine = FakeEngine(name, shape, tp, faults)
        self.arm, self.fingerprint = arm, Profile.from_dict(profile).fingerprint

    def client(self, method, *args):
        assert "weights" not in self.asleep or method == "weight_version"
        if "engine gone" in FAULTS and self.engine.name == "engine-1":
            raise WorkerGone("engine-1: the process ended with status -9 (SIGKILL)\n--- last lines of its log ---")
        found = getattr(self.engine, method)
        return found(*args) if callable(found) else found

    def sleep(self, level):
        self.calls.append(f"sleep {level}")
        self.asleep = {"weights", "kv_cache"}

    def wake(self, what):
        self.calls.append(f"wake {what}")
        self.asleep.discard(what)

    def generate(self, prompts, seeds, *, temperature, max_new_tokens, eos):
        assert not self.asleep
        if "interrupt" in FAULTS:
            raise KeyboardInterrupt
        if "engine dies" in FAULTS:
            raise WorkerFailure("engine-0: the process ended with status 9")
        out = []
        for prompt, seed in zip(prompts, seeds):
            tokens = [random.Random(seed * 31 + i).randrange(3, 77) for i in range(max_new_tokens)]
            values = logprob(tokens)
            if "rollout bits" in FAULTS or self.arm == "native":
                values[1] = np.nextafter(values[1], np.float32(0))
            logprobs = [float(v) for v in values]
            if "absent value" in FAULTS:
                logprobs[0] = None
            label = "default" if "stale label" in FAULTS else self.engine.label
            out.append(
                {
                    "prompt": list(prompt),
                    "tokens": tokens,
                    "logprobs": logprobs,
                    "versions": [(label, 0, len(tokens))],
                    "finish": "length",
                }
            )
        return out

    def report(self):
        mode = "raw_logprobs" if "raw" in FAULTS else "processed_logprobs"
        profile = self.fingerprint if self.arm == "strict" else None
        said = {"profile": profile, "logprobs": {"mode": mode}, "launches": launched(self.arm)}
        return [{"rank": rank, "mode": "strict" if profile else "audit", **said} for rank in range(self.tp)]

    def close(self):
        pass


class _Done:
    def __init__(self, worker, value):
        self.worker, self._value = worker, value

    def result(self, timeout=None):
        if isinstance(self._value, BaseException):
            raise self._value
        return self._value


class InlineWorker:
    def __init__(self, name, target):
        self.name, self.target = name, target

    def call(self, method, *args, **kwargs):
        try:
            return _Done(self, getattr(self.target, method)(*args, **kwargs))
        except Exception as error:
            return _Done(self, error if isinstance(error, WorkerFailure) else WorkerFailure(f"{self.name}: {error}"))

    def describe(self, what):
        return f"{self.name}: {what}"


class InlineLauncher:
    def __init__(self, *_):
        self.closed = False
        self.workers, self.env = {}, {}

    def start(self, name, factory, *, env, kwargs):
        self.env[name] = env
        self.workers[name] = InlineWorker(name, (FakeTrainer if "trainer" in factory else FakeRollout)(**kwargs))
        return self.workers[name]

    def wait(self, calls, timeout):
        return [c.result() for c in calls]

    def close(self):
        self.closed = True
