"""Starting, asking and stopping a real vLLM."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

import rl_vllm
from rl_contract import Profile


@contextmanager
def engine(profile: Profile, path: Any, *, mode: str = "strict", tp: int = 1, **overrides: Any) -> Iterator[Any]:
    from vllm import LLM

    options = {
        "model": str(path),
        "tensor_parallel_size": tp,
        "skip_tokenizer_init": True,
        "max_model_len": 640,
        "block_size": 32,
        "num_gpu_blocks_override": 1500,
        "disable_log_stats": False,
        **overrides,
    }
    if mode == "native":
        options |= {"dtype": profile.settings.dtype, "enforce_eager": True}
    with rl_vllm.cpu_environment(tp):
        args = options if mode == "native" else rl_vllm.engine_args(profile, mode=mode, **options)
        llm = LLM(**args)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def sampled(seed: int, tokens: int = 16, temperature: float = 0.7, **changes: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        temperature=temperature, seed=seed, max_tokens=tokens, logprobs=0, ignore_eos=True, detokenize=False, **changes
    )


def prompt(seed: int, length: int, vocab: int = 96) -> list[int]:
    return torch.randint(2, vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def generate(llm: Any, prompts: list[list[int]], params: list[Any]) -> list[tuple[list[int], torch.Tensor]]:
    """``(token ids, fp32 log-probabilities)`` of each request."""
    return [tokens_and_logprobs(o) for o in raw_generate(llm, prompts, params)]


def raw_generate(llm: Any, prompts: list[list[int]], params: list[Any]) -> list[Any]:
    return llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)


def tokens_and_logprobs(output: Any) -> tuple[list[int], torch.Tensor]:
    completion = output.outputs[0]
    ids = list(completion.token_ids)
    values = [entry[t].logprob for t, entry in zip(ids, completion.logprobs)]
    return ids, torch.tensor(values, dtype=torch.float32)


def assert_same(a: list[tuple[list[int], torch.Tensor]], b: list[tuple[list[int], torch.Tensor]]) -> int:
    """Tokens and log-probability bits are equal; returns how many were compared."""
    assert [ids for ids, _ in a] == [ids for ids, _ in b]
    x, y = torch.cat([v for _, v in a]), torch.cat([v for _, v in b])
    assert torch.isfinite(x).all()
    assert torch.equal(x.view(torch.int32), y.view(torch.int32))
    return x.numel()


def metric(llm: Any, name: str) -> float:
    return sum(m.value for m in llm.get_metrics() if m.name == name)
