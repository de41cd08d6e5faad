"""What the outside of an engine sees: its report, the proof that it is strict, and vime-sync's protocol."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_contract import ContractError, MissingSupport, Profile
from rl_vllm.versions import VersionLedger, attach
from vime_sync import WEIGHT_DIGEST, Span

# how often each boundary must run in one forward of a model with L layers; lm_head and collectives depend on the batch
_PER_LAYER = {"gemm.column": 2, "gemm.row": 2, "swiglu": 1, "rotary": 1, "attention": 1}


def check_llm(where: str, llm: Any) -> None:
    """Raise ContractError, which says what ``where`` was given, unless that is an engine with workers to ask."""
    if not callable(getattr(llm, "collective_rpc", None)):
        raise ContractError(f"{where} got llm={llm!r:.80}; supported: vllm.LLM(**rl_vllm.engine_args(profile))")


def report(llm: Any) -> list[dict[str, Any]]:
    """One report per worker, in rank order: mode, profile, contract ids, module classes, launches, versions, pid.

    Raises:
        ContractError: it is no engine.
        MissingSupport: a worker does not answer, i.e. it is vLLM's own.
    """
    check_llm("report", llm)
    try:
        found = llm.collective_rpc("rl_report")
    except Exception as error:  # vLLM wraps what a worker raises in several types
        raise MissingSupport(
            f"the workers of this engine do not report ({error}); start it with rl_vllm.engine_args(profile)"
        ) from error
    return sorted(found, key=lambda r: r["rank"])


def reset_launches(llm: Any) -> None:
    """Start counting anew on every worker; ContractError where ``llm`` is no engine."""
    check_llm("reset_launches", llm)
    llm.collective_rpc("rl_reset_launches")


def assert_strict(llm: Any, profile: Profile) -> list[dict[str, Any]]:
    """The reports, once every worker has shown that it runs ``profile`` and nothing else.

    Checked: the mode, the profile's fingerprint, that every module at a boundary is a strict class, and that launches
    since the last reset are what the number of forward passes demands.

    Raises:
        MissingSupport: a worker is not ours (the plugin did not load there).
        ContractError: it is no engine, or a worker runs something else; every finding is listed.
    """
    if not isinstance(profile, Profile):
        raise ContractError(
            f"assert_strict got profile={profile!r:.80}; supported: the Profile that the engine must hold"
        )
    check_llm("assert_strict", llm)
    reports = report(llm)
    problems = [f"rank {r['rank']}: {problem}" for r in reports for problem in _problems(r, profile)]
    if problems:
        raise ContractError("the engine is not strict: " + "; ".join(problems))
    return reports


def _problems(r: Mapping[str, Any], profile: Profile) -> list[str]:
    if r["mode"] != "strict":
        return [f"mode is {r['mode']!r}, needed is 'strict'"]
    found = []
    if r["profile"] != profile.fingerprint:
        found.append(f"profile {r['profile']} is installed, needed is {profile.fingerprint}")
    for label, count in r["modules"].items():
        parts = label.split(" + ")
        # column-parallel layers, lm_head and Attention keep vLLM's class around a strict method
        if not parts[-1].startswith("rl_vllm.") and parts[0] != _APPLY_ROTARY:
            found.append(f"{count} modules run {label}")
    if not r["sampler"].startswith("rl_vllm."):
        found.append(f"the sampler is {r['sampler']}")
    counts: dict[str, int] = {}
    for launch in r["launches"]:
        # a capture launches nothing; what it recorded is counted at each replay
        if launch.get("phase") == "capture":
            continue
        # one launch does the norms of queries and of keys
        norms = 2 if launch["boundary"] == "norm" and launch["kernel"].endswith(_FUSED) else 1
        counts[launch["boundary"]] = counts.get(launch["boundary"], 0) + norms * launch["count"]
    layers, forwards = r["layers"], r["forwards"]
    expected = {b: n * layers * forwards for b, n in _PER_LAYER.items()}
    expected["norm"] = ((4 if r["qk_norm"] else 2) * layers + 1) * forwards
    for boundary, n in expected.items():
        got = counts.get(boundary, 0)
        # lm_head is a column launch more for each call of compute_logits
        most = None if boundary == "gemm.column" else n
        if boundary == "attention" and any(x["kernel"].startswith(_WALKS) for x in r["launches"]):
            # a GPU serves short and long requests of one call by two kernels
            most = 2 * n
        if got < n or (most is not None and got > most):
            found.append(f"{boundary} was launched {got} times in {forwards} forward passes, needed is {n}")
    return found


_WALKS = ("rl_attn.triton_forward", "rl_attn.triton_hopper")
_FUSED = ".norm_rotary_write"


# a helper that RotaryEmbedding constructs and strict rotary never calls
_APPLY_ROTARY = "vllm.model_executor.layers.rotary_embedding.common.ApplyRotaryEmb"


def version_spans(completion: Any) -> list[tuple[str, int, int]]:
    """``(weight version, first token, end)`` over a finished completion's output tokens."""
    spans = getattr(completion, "weight_versions", None)
    if spans is None:
        raise MissingSupport(
            "no weight versions on this completion: it isn't finished, or is one of several of a request, or this vLLM "
            "(0.24) stamps none and no VllmEngineClient was there to do it"
        )
    return [(s.version, s.start, s.end) for s in spans]


class VllmEngineClient:
    """vime-sync's ``EngineClient`` over a ``vllm.LLM`` in this process.

    Args:
        llm: an engine started with ``engine_args(profile, mode="strict" or "audit")``.
        name: what error messages call it.
    """

    def __init__(self, llm: Any, name: str = "vllm") -> None:
        self.llm = llm
        self._name = name
        # vLLM 0.24 stamps no versions: they are kept here
        self._ledger: VersionLedger | None = None
        if not hasattr(llm, "update_weight_version"):
            self._ledger = VersionLedger()
            attach(llm.llm_engine, self._spans)
        self._tp = int(llm.llm_engine.vllm_config.parallel_config.tensor_parallel_size)
        report(llm)

    @property
    def name(self) -> str:
        return self._name

    @property
    def tp(self) -> int:
        return self._tp

    def pause(self) -> None:
        """Stop scheduling. Requests in flight stay and are recomputed once the caches are cleared."""
        self.llm.sleep(level=0, mode="keep")

    def clear_caches(self) -> bool:
        # as it was answered: the publisher refuses everything but True
        cleared: bool = self.llm.reset_prefix_cache(reset_running_requests=True, reset_connector=False)
        return cleared

    def begin(self, session: str) -> None:
        self.llm.collective_rpc("rl_begin", args=(session,))

    def cancel(self, session: str) -> None:
        self.llm.collective_rpc("rl_cancel", args=(session,))

    def transfer(self, path: Path, version: str) -> None:
        self.llm.collective_rpc("rl_transfer", args=(str(path), version))

    def shard_digests(self, algorithm: str = WEIGHT_DIGEST) -> dict[tuple[int, str], str]:
        per_worker = self.llm.collective_rpc("rl_shard_digests", args=(algorithm,))
        return {(rank, name): digest for rank, digests in per_worker for name, digest in digests.items()}

    def finish(self, version: str) -> None:
        self._settle()
        sampled = self.llm.collective_rpc("rl_finish")
        if self._ledger is None:
            self.llm.update_weight_version(version)
        else:
            self._ledger.push(version, sampled[0])

    def _settle(self) -> None:
        if self._ledger is not None:
            self._ledger.settle(self.llm.collective_rpc("rl_kept")[0])

    def _spans(self, request: str, generated: int) -> tuple[Span, ...]:
        assert self._ledger is not None
        if self._ledger.met(request):
            self._settle()
        return self._ledger.spans(request, generated)

    def weight_version(self) -> str:
        return str(self.llm.get_weight_version()) if self._ledger is None else self._ledger.version

    def resume(self) -> None:
        for r in report(self.llm):
            if r["poison"] is not None:
                raise ContractError(f"{self._name} is poisoned ({r['poison']}); push whole weights, then resume")
        if any(session is not None for session in self.llm.collective_rpc("rl_open_session")):
            raise ContractError(f"{self._name} has an open weight update; finish it before resuming")
        self.llm.wake_up(tags=["scheduling"])

    def poison(self, reason: str) -> None:
        self.llm.collective_rpc("rl_poison", args=(reason,))
