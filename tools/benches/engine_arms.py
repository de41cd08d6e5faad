"""The processes of ``tools/bench engine``: one conductor a GPU, which forks the engines and calls them in turn.

The conductor imports vLLM once and never touches the GPU. Each engine runs in a session of its own; what it prints goes
to its log, its numbers through a pipe. Lines of JSON are appended to ``results-GPU.jsonl`` as they come.
"""

import contextlib
import importlib
import json
import multiprocessing as mp
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

# (prompt, batch, new tokens), the most wanted first
CASES = (
    (512, 64, 96), (512, 256, 64), (512, 1, 128), (512, 8, 128),
    (4096, 64, 64), (4096, 1, 128), (4096, 8, 96), (4096, 256, 64),
)  # fmt: skip
# batches that decode, and one prompt of 512 tokens
GRAPHS = [1, 8, 64, 256, 512]
# bytes of cache that one engine may take: two engines of a model are on the GPU at once
CACHE_LIMIT = 44 << 30
PAGE = 16
# seconds that a case may take beyond the end
GRACE = 10.0
# name -> (what the environment adds, what the arguments add)
ARMS: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "strict": ({}, {}),
    "native": ({}, {}),
    "batch-invariant": ({"VLLM_BATCH_INVARIANT": "1"}, {}),
    "batch-invariant-eager": ({"VLLM_BATCH_INVARIANT": "1"}, {"enforce_eager": True}),
    "native-eager": ({}, {"enforce_eager": True}),
}


def config(layers: int) -> dict[str, Any]:
    """Qwen3-8B's ``config.json``."""
    return {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": layers, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "bos_token_id": 151643, "eos_token_id": 151645,
    }  # fmt: skip


def cache_bytes(layers: int, cases: Any) -> int:
    """Bytes of keys and values that the largest of ``cases`` needs, with a page to spare for every request."""
    tokens = max(batch * (-(-(prompt + new + 6) // PAGE) + 1) * PAGE for prompt, batch, new in cases)
    return tokens * layers * 2 * 8 * 128 * 2 + (64 << 20)


def cases_of(engine: str, layers: int) -> list[tuple[int, int, int]]:
    """What fits; the largest batches are left out of vLLM's batch-invariant mode, which is slow."""
    found = [case for case in CASES if cache_bytes(layers, [case]) <= CACHE_LIMIT]
    if engine.startswith("batch-invariant"):
        found = [(p, b, n) for p, b, n in found if b * p <= 64 * 4096]
    return found


def arguments(engine: str, layers: int, folder: str) -> dict[str, Any]:
    """``vllm.LLM``'s: alike for all engines."""
    return {
        "model": folder, "load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16", "block_size": PAGE,
        "max_model_len": 4096 + 256, "max_num_seqs": 256, "max_num_batched_tokens": 8192,
        "kv_cache_memory_bytes": cache_bytes(layers, cases_of(engine, layers)),
        # only looked at before the start, when the cache's size is given
        "gpu_memory_utilization": 0.05,
        # the batches that are timed have graphs of their own; more of them only take longer to start
        "compilation_config": {"cudagraph_capture_sizes": GRAPHS},
        **ARMS[engine][1],
    }  # fmt: skip


def start(engine: str, layers: int, folder: str, **changes: Any) -> Any:
    """The engine; ``changes`` take the place of arguments. Leaves of the tree are as many as tensor parallel ranks."""
    from vllm import LLM

    options = arguments(engine, layers, folder) | changes
    if not engine.startswith("strict"):
        return LLM(**options)
    import rl_vllm
    from rl_contract import build_profile
    from rl_vllm import platform

    leaves = options.get("tensor_parallel_size", 1)
    settings = rl_vllm.settings_from_hf(folder, leaves=leaves, arch=platform.arch())
    return LLM(**rl_vllm.engine_args(build_profile("bench", settings), **options))


class TooFewSteps(Exception):
    """A batch was never whole for long enough to time its decode."""


class Steps:
    """What an engine hands out, step by step: (seconds here, seconds at the engine's core, requests, tokens)."""

    def __init__(self, llm: Any) -> None:
        self.seen: list[tuple[float, float, int, int]] = []
        processor = llm.llm_engine.output_processor
        stock = processor.process_outputs

        def process_outputs(outputs: Any, engine_core_timestamp: Any = None, *args: Any, **kwargs: Any) -> Any:
            tokens = sum(len(x.new_token_ids) for x in outputs)
            if tokens:
                self.seen.append((time.perf_counter(), engine_core_timestamp or 0.0, len(outputs), tokens))
            return stock(outputs, engine_core_timestamp, *args, **kwargs)

        processor.process_outputs = process_outputs

    def of_whole_batch(self, batch: int) -> list[tuple[float, float, int, int]]:
        """The steps that gave every request one token."""
        return [x for x in self.seen if x[2:] == (batch, batch)]


def measure(llm: Any, steps: Steps, prompt: int, batch: int, new: int, seeded: bool) -> dict[str, float]:
    """Tokens a second of both phases, decode also at the engine's core, and milliseconds a step of it.

    Prefill: from the call to the last request's first token, of prompts never seen. Decode: between the first and the
    last step that gave every request one token; their prompts are in the prefix cache, so that all requests decode from
    the start. Of a step's time here and at the core the longer one counts: what lay in the queue while requests were
    still being sent is handed out faster than it was made, and what comes in faster than it is handed out waits.
    """
    import torch
    from vllm import SamplingParams

    def prompts(salt: int) -> list[list[int]]:
        g = torch.Generator().manual_seed(salt)
        found: list[list[int]] = torch.randint(10, 150000, (batch, prompt), generator=g).tolist()
        return found

    def run(given: list[list[int]], tokens: int) -> float:
        params = [
            SamplingParams(
                temperature=1.0, seed=i if seeded else None, max_tokens=tokens, logprobs=0, ignore_eos=True,
                detokenize=False,
            )
            for i in range(batch)
        ]  # fmt: skip
        steps.seen.clear()
        begin = time.perf_counter()
        llm.generate([{"prompt_token_ids": p} for p in given], params, use_tqdm=False)
        return time.perf_counter() - begin

    salt = prompt * 1000 + batch
    # both phases of the whole batch once, so that their kernels and graphs are there
    for tokens in (1, 4):
        run(prompts(salt), tokens)
    many = prompt * batch > 300_000
    first, given = float("inf"), prompts(salt)
    for i in range(1 if many else 3):
        given = prompts(salt + 1 + i)
        first = min(first, run(given, 1))
    best: list[float] = []
    core: list[float] = []
    for _ in range(2 if many else 4):
        run(given, new + 4)
        whole = steps.of_whole_batch(batch)
        # requests arrive one after the other while the first already decode
        if len(whole) < 12:
            raise TooFewSteps(f"only {len(whole)} of {new + 4} steps gave all {batch} requests a token")
        core.append((whole[-1][1] - whole[0][1]) / (len(whole) - 1))
        best.append(max(core[-1], (whole[-1][0] - whole[0][0]) / (len(whole) - 1)))
    return {
        "prefill": batch * prompt / first,
        "decode": batch / min(best),
        "step_ms": round(1e3 * min(best), 4),
        "core_step_ms": round(1e3 * min(core), 4),
    }


def arm(pipe: Any, engine: str, layers: int, folder: str, log: str, environment: dict[str, str]) -> None:
    """An engine's process: starts it, then serves cases until it is told to stop."""
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    # whatever this process is ended by, its log holds what was printed
    sys.stdout = sys.stderr = os.fdopen(out, "w", buffering=1)
    os.environ.update(environment)
    try:
        begin = time.perf_counter()
        llm = start(engine, layers, folder)
        vllm_config = llm.llm_engine.vllm_config
        pipe.send(
            {
                "ready_s": round(time.perf_counter() - begin, 1),
                "v2_runner": bool(getattr(vllm_config, "use_v2_model_runner", False)),
                "graphs": str(getattr(vllm_config.compilation_config.cudagraph_mode, "name", None)),
                "compilation": str(getattr(vllm_config.compilation_config.mode, "name", None)),
            }
        )
        steps = Steps(llm)
        while (case := pipe.recv()) is not None:
            prompt, batch, new = case
            try:
                pipe.send(measure(llm, steps, prompt, batch, new, engine.startswith("strict")))
            except TooFewSteps as error:
                pipe.send({"problem": str(error)})
    except BaseException as error:
        traceback.print_exc()
        with contextlib.suppress(OSError):
            pipe.send({"error": f"{type(error).__name__}: {error}"[:600]})
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def end_group(pid: int) -> None:
    """End a process and those it started, by the session that it leads."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


class Arm:
    """The conductor's side of one engine."""

    def __init__(self, engine: str, layers: int, folder: str, logs: Path) -> None:
        self.engine, self.layers, self.cases = engine, layers, cases_of(engine, layers)
        self.pipe, theirs = mp.Pipe()
        log = str(logs / f"{engine}-{layers}.txt")
        # not daemonic: vLLM starts a process of its own
        self.process = mp.get_context("fork").Process(
            target=arm, args=(theirs, engine, layers, folder, log, ARMS[engine][0])
        )
        self.process.start()
        theirs.close()
        self.alive = True

    def answer(self, end: float) -> dict[str, Any]:
        """What it says next; ``{"error": ...}`` where it dies, is late or says so, and then it is ended."""
        found: dict[str, Any] = {"error": "the time was up"}
        try:
            while time.time() < end:
                # vLLM's own process keeps the pipe open when this one is killed
                dead = not self.process.is_alive()
                if self.pipe.poll(0.0 if dead else 0.5):
                    found = self.pipe.recv()
                    break
                if dead:
                    raise EOFError
        except (EOFError, OSError):
            found = {"error": "the process ended without an answer"}
        if "error" in found:
            self.stop()
        return found

    def stop(self) -> None:
        self.alive = False
        if self.process.pid is not None:
            end_group(self.process.pid)
        self.process.kill()
        self.process.join()


def conduct(plan: dict[str, Any]) -> None:
    """All jobs of one GPU, one after the other, on the cores that are its own."""
    logs, end = Path(plan["logs"]), float(plan["end"])
    os.sched_setaffinity(0, plan["cores"])
    with open(logs / f"results-{plan['gpu']}.jsonl", "a") as results:

        def write(**line: Any) -> None:
            results.write(json.dumps({**line, "at": round(time.time(), 2)}) + "\n")
            results.flush()

        begin = time.time()
        for module in PRELOADED:
            try:
                importlib.import_module(module)
            except Exception as error:
                print(f"{module} is not imported ahead: {error!r}", flush=True)
        write(imports_s=round(time.time() - begin, 1))
        for layers, engines in plan["jobs"]:
            folder = logs / f"model-{layers}-{plan['gpu']}"
            folder.mkdir(exist_ok=True)
            (folder / "config.json").write_text(json.dumps(config(layers)))
            if time.time() < end:
                together(engines, layers, str(folder), logs, end, write)


# what engines import anyhow, without asking for a GPU
PRELOADED = (
    "torch", "vllm", "vllm.entrypoints.llm", "vllm.v1.engine.core", "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu.model_runner", "vllm.v1.worker.gpu_model_runner", "vllm.v1.executor.uniproc_executor",
    "vllm.model_executor.models.qwen3", "vllm.compilation.backends", "torch._inductor.compile_fx", "torch._dynamo",
)  # fmt: skip


def together(engines: list[str], layers: int, folder: str, logs: Path, end: float, write: Any) -> None:
    """Engines of one model that are on the GPU at once, measured in turn."""
    arms = [Arm(name, layers, folder, logs) for name in engines]
    try:
        for a in arms:
            # one that hangs must not take the others' time
            found = a.answer(min(end, time.time() + max(60.0, 0.6 * (end - time.time()))))
            write(engine=a.engine, layers=layers, **found)
        for case in CASES:
            for a in arms:
                if not a.alive or case not in a.cases or time.time() > end:
                    continue
                begin = time.time()
                a.pipe.send(case)
                found = a.answer(end + GRACE)
                prompt, batch, _ = case
                took = round(time.time() - begin, 1)
                write(engine=a.engine, layers=layers, prompt=prompt, batch=batch, took_s=took, **found)
    finally:
        for a in arms:
            a.stop()


if __name__ == "__main__":
    # this folder's modules have names that others may use too
    sys.path.pop(0)
    # engines lead sessions of their own, so a conductor that is told to stop ends them first
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    conduct(json.loads(sys.argv[1]))
