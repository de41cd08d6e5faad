"""vLLM with the strict operators beside vLLM at its best and beside its own batch-invariant mode: tokens a second.

Qwen3-8B's dimensions with fewer layers and dummy weights. One process per engine, one engine at a time. Prefill is the
time to the first token of a whole batch, decode what every further token takes; both from the same requests.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ENGINES = ("strict", "native", "batch-invariant")
# (prompt, batch, new tokens)
CASES = (
    (512, 1, 128), (512, 8, 128), (512, 64, 96), (512, 256, 64),
    (4096, 1, 128), (4096, 8, 96), (4096, 64, 64), (4096, 256, 32),
)  # fmt: skip
LAYERS = 8
TARGETS = {1: 0.92, 64: 0.97, 256: 0.97}


def config(layers: int) -> dict[str, Any]:
    """Qwen3-8B's ``config.json``."""
    return {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": layers, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "bos_token_id": 151643, "eos_token_id": 151645,
    }  # fmt: skip


def _engine(name: str, folder: Path, family: str) -> Any:
    from vllm import LLM

    options: dict[str, Any] = {
        "model": str(folder), "load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16",
        "max_model_len": 4096 + 256, "max_num_seqs": 256, "max_num_batched_tokens": 8192,
        "gpu_memory_utilization": 0.85,
        # the batches that are timed have graphs of their own; more of them only take longer to start
        "compilation_config": {"cudagraph_capture_sizes": [1, 8, 16, 64, 256]},
    }  # fmt: skip
    if name != "strict":
        return LLM(**options)
    import rl_vllm
    from rl_contract import build_profile
    from rl_vllm import platform

    settings = rl_vllm.settings_from_hf(folder, leaves=1, arch=platform.arch(), attention=family)
    return LLM(**rl_vllm.engine_args(build_profile("bench", settings), **options))


def _measure(llm: Any, prompt: int, batch: int, new: int, seeded: bool) -> dict[str, float]:
    import torch
    from vllm import SamplingParams

    def seconds(tokens: int, salt: int) -> float:
        g = torch.Generator().manual_seed(salt)
        prompts = torch.randint(10, 150000, (batch, prompt), generator=g).tolist()
        params = [
            SamplingParams(
                temperature=1.0, seed=i if seeded else None, max_tokens=tokens, logprobs=0, ignore_eos=True,
                detokenize=False,
            )
            for i in range(batch)
        ]  # fmt: skip
        torch.cuda.synchronize()
        start = time.perf_counter()
        llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return time.perf_counter() - start

    heavy = prompt * batch > 300_000
    salt = prompt * 1000 + batch
    seconds(2, salt)
    rounds = 1 if heavy else 2
    first = min(seconds(1, salt + 1 + i) for i in range(rounds))
    whole = min(seconds(new + 1, salt + 11 + i) for i in range(rounds))
    return {"prefill": batch * prompt / first, "decode": batch * new / max(whole - first, 1e-9)}


def child(name: str, folder: str, budget: float, family: str) -> None:
    """One engine: a line of JSON for each case it had time for."""
    start = time.perf_counter()
    llm = _engine(name, Path(folder), family)
    print(json.dumps({"ready_s": round(time.perf_counter() - start, 1)}), flush=True)
    for prompt, batch, new in CASES:
        if time.perf_counter() - start > budget:
            break
        found = _measure(llm, prompt, batch, new, seeded=name == "strict")
        print(json.dumps({"prompt": prompt, "batch": batch, **found}), flush=True)
    os._exit(0)


def run(budget: float, engines: tuple[str, ...] = ENGINES, family: str = "segments") -> tuple[Any, Any]:
    """Rows and targets. ``budget``: seconds for all engines, starting them included."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config(LAYERS)))
        speeds: dict[str, dict[tuple[int, int], dict[str, float]]] = {}
        for name in engines:
            share = min(budget / len(engines), 3600.0)
            environment = dict(os.environ, VLLM_BATCH_INVARIANT="1" if name == "batch-invariant" else "0")
            command = [sys.executable, __file__, name, folder, str(share * 0.85), family]
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=False, timeout=share * 1.3 + 60
            )
            lines = [json.loads(x) for x in done.stdout.splitlines() if x.startswith("{")]
            if not any("batch" in x for x in lines):
                print(f"engine {name}: no numbers (exit {done.returncode}) {done.stderr[-1500:]}", flush=True)
            speeds[name] = {(x["prompt"], x["batch"]): x for x in lines if "batch" in x}
            print(f"engine {name}: {lines[:1]} {len(speeds[name])} cases", flush=True)
    rows = []
    for prompt, batch, _ in CASES:
        for phase in ("prefill", "decode"):
            for peer in engines:
                ours, theirs = (speeds.get(n, {}).get((prompt, batch)) for n in ("strict", peer))
                if peer == "strict" or ours is None or theirs is None:
                    continue
                rows.append(
                    {
                        "case": f"{phase} batch={batch} prompt={prompt}",
                        "op": phase,
                        "shape": [batch, prompt],
                        "strict_us": round(1e6 / ours[phase], 3),
                        "strict_tokens_s": round(ours[phase], 1),
                        "peer": peer,
                        "peer_us": round(1e6 / theirs[phase], 3),
                        "peer_tokens_s": round(theirs[phase], 1),
                        "ratio": round(ours[phase] / theirs[phase], 3),
                    }
                )
    return rows, summary(rows)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Worst ratios to native by batch and phase; the ratio to batch-invariant vLLM at batch 64."""
    found: dict[str, Any] = {}
    native = [r for r in rows if r["peer"] == "native"]
    for batch, target in TARGETS.items():
        ratios = [r["ratio"] for r in native if r["op"] == "decode" and r["shape"][0] == batch]
        if ratios:
            found[f"decode of native at batch {batch}, worst >= {target}"] = min(ratios)
    prefill = [r["ratio"] for r in native if r["op"] == "prefill"]
    if prefill:
        found["prefill of native, worst >= 0.95"] = min(prefill)
    invariant = [r["ratio"] for r in rows if r["peer"] == "batch-invariant" and r["op"] == "decode"]
    at_64 = [r["ratio"] for r in rows if r["peer"] == "batch-invariant" and r["shape"][0] == 64 and r["op"] == "decode"]
    if at_64:
        found["decode of batch-invariant vLLM at batch 64, worst >= 1.50"] = min(at_64)
    elif invariant:
        found["decode of batch-invariant vLLM, worst"] = min(invariant)
    return found


if __name__ == "__main__":
    child(sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4])
