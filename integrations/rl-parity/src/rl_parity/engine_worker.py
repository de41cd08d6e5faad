"""One rollout engine inside its worker process: a ``vllm.LLM``, and vime-sync's client for it."""

import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import psutil

from rl_contract import Profile
from rl_parity.launch.processes import lives


def _children() -> list[psutil.Process]:
    found = psutil.Process().children(recursive=True)
    return [p for p in found if "resource_tracker" not in " ".join(p.cmdline())]


class EngineWorker:
    """Built in a process of its own; ``arm`` decides whose operators the engine runs.

    Args:
        arm: ``strict`` runs the strict operators, ``native`` vLLM's own with the same reports and weight pushes.
        model: checkpoint folder.
        profile: ``Profile.to_dict()``.
        max_num_seqs: most requests in flight, at least the engine's share of a step.
        kv_blocks: blocks of the paged cache; None takes all the memory that vLLM reserves.
        gpu: arguments of ``vllm.LLM`` that only a GPU takes; None runs vLLM's CPU build, eagerly.
    """

    def __init__(
        self,
        *,
        name: str,
        arm: str,
        model: str,
        profile: dict[str, Any],
        tp: int,
        max_model_len: int,
        max_num_seqs: int,
        kv_blocks: int | None,
        gpu: dict[str, Any] | None = None,
    ) -> None:
        from vllm import LLM

        import rl_vllm

        self._profile = Profile.from_dict(profile)
        self._arm = arm
        args = rl_vllm.engine_args(
            self._profile,
            mode="strict" if arm == "strict" else "audit",
            model=model,
            skip_tokenizer_init=True,
            tensor_parallel_size=tp,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            disable_log_stats=True,
            num_gpu_blocks_override=kv_blocks,
            **({"enforce_eager": True} if gpu is None else gpu),
        )
        # held open for the process's life: vLLM starts its workers lazily in places
        self._environment = ExitStack()
        if gpu is None:
            self._environment.enter_context(rl_vllm.cpu_environment(tp))
        self._llm = LLM(**args)
        self._client = rl_vllm.VllmEngineClient(self._llm, name=name)
        self._closing = False
        threading.Thread(target=self._watch, args=(_children(),), daemon=True).start()

    def client(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call, or read, one name of vime-sync's ``EngineClient``."""
        found = getattr(self._client, method)
        return found(*args, **kwargs) if callable(found) else found

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        *,
        temperature: float,
        max_new_tokens: int,
        eos: list[int] | None,
    ) -> list[dict[str, Any]]:
        """Sample one completion per prompt.

        Returns:
            For each prompt ``{"prompt", "tokens", "logprobs", "versions", "finish"}``: ids, the processed
            log-probability of each sampled token (None where the engine gave none), weight versions as (version, first
            token, end), and why it ended.
        """
        from vllm import SamplingParams, TokensPrompt

        from rl_vllm import version_spans

        params = [
            SamplingParams(
                temperature=temperature,
                seed=seed,
                max_tokens=max_new_tokens,
                logprobs=0,
                detokenize=False,
                stop_token_ids=eos,
            )
            for seed in seeds
        ]
        requests = [TokensPrompt(prompt_token_ids=list(p)) for p in prompts]
        out = []
        for request in self._llm.generate(requests, params, use_tqdm=False):
            completion = request.outputs[0]
            tokens = list(completion.token_ids)
            logprobs: list[float | None] = [None] * len(tokens)
            for i, (token, at) in enumerate(zip(tokens, completion.logprobs or [])):
                if at is not None and token in at:
                    logprobs[i] = float(at[token].logprob)
            out.append(
                {
                    "prompt": list(request.prompt_token_ids or []),
                    "tokens": tokens,
                    "logprobs": logprobs,
                    "versions": version_spans(completion),
                    "finish": completion.finish_reason,
                }
            )
        return out

    def sleep(self, level: int) -> None:
        """Give up GPU memory: 1 keeps the weights on the host, 2 keeps nothing and needs a whole push afterwards."""
        self._llm.sleep(level=level)

    def wake(self, what: str) -> None:
        """Take memory back, ``weights`` or ``kv_cache``; requests are scheduled again once both are there."""
        self._llm.wake_up(tags=[what])

    def report(self) -> list[dict[str, Any]]:
        """One report per worker of this engine; in the strict arm they prove that nothing but strict operators ran."""
        import rl_vllm

        if self._arm == "strict":
            return rl_vllm.assert_strict(self._llm, self._profile)
        return rl_vllm.report(self._llm)

    def _watch(self, children: list[psutil.Process]) -> None:
        """End this process when one of the engine's dies: vLLM's client may wait for its answer for ever."""
        while not self._closing:
            time.sleep(0.5)
            gone = [child.pid for child in children if not lives(child)]
            if gone and not self._closing:
                print(f"engine process {gone[0]} has died; ending this worker", file=sys.stderr, flush=True)
                os._exit(70)

    def close(self) -> None:
        self._closing = True
        self._llm.llm_engine.engine_core.shutdown()
        self._environment.close()
