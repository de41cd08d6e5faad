"""vLLM at TP1 and at TP2, eager and with graphs: token ids and log-probabilities of one set of requests, bit for bit.

One profile with leaves=2 for all. Every engine is a process of its own; all start at once, since it is bits that count.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from two_gpu_parts.processes import Job, run_lanes

# name -> (tensor parallel size, eager, GPUs)
ENGINES = {
    "TP1 eager": (1, True, "0"),
    "TP1 graphs": (1, False, "1"),
    "TP2 eager": (2, True, "0,1"),
    "TP2 graphs": (2, False, "0,1"),
}
FIRST = "TP1 eager"
# up to three segments of 1,024 keys; one begins its second while it decodes
LENGTHS = (1, 2, 17, 63, 400, 1010, 1100, 2300)
# of the cache, where the model has so many positions
CONTEXT = 4096
TEMPERATURES = (0.7, 1.0, 0.0, 1.3)
# prompts of the second call, which run at once, and new tokens of both
MANY, TOKENS = 64, 32
PROGRAM = (sys.executable, "-W", "ignore", str(Path(__file__).resolve()))


def run(rank: int, folder: str, settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    from rl_parity.models import write_model

    root, device = Path(folder), settings.get("device", "cuda")
    model = settings["model"]
    if ":" in model or model.startswith("tiny"):
        model = str(write_model(model, root / "model"))
    wanted = settings.get("engines", list(ENGINES))
    jobs = []
    for name in wanted:
        tp, eager, gpus = ENGINES[name]
        if settings.get("one_gpu"):
            gpus = "0"
        asked = {"name": name, "model": model, "tp": tp, "eager": eager, "device": device, "out": str(root / name)}
        on_gpu = {"CUDA_VISIBLE_DEVICES": shown(gpus), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if device == "cuda" else {}
        command = [*settings.get("program", PROGRAM), json.dumps(asked)]
        jobs.append(Job(name=name, command=command, log=root / f"{name}.log", limit=1e9, environment=on_gpu))
    answers: dict[str, Any] = {}
    errors: list[str] = []
    lanes = [[job] for job in jobs] if device == "cuda" else [jobs]
    for job, status in run_lanes(lanes, settings["end"] - 3):
        out = root / job.name
        answer = json.loads(out.read_text()) if out.exists() else {"facts": {}}
        found = {**answer["facts"], "status": status}
        if status != 0 or "answers" not in answer:
            errors.append(f"{job.name}: " + ("late" if status is None else f"status {status}"))
            found["log"] = job.tail()
        else:
            answers[job.name] = answer["answers"]
        yield {job.name: found, "errors": errors}
    yield {**compared(answers, errors), "errors": errors}


def shown(gpus: str) -> str:
    """``gpus`` counts among the GPUs that this process was shown."""
    mine = [x.strip() for x in os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")]
    return ",".join(mine[int(gpu)] for gpu in gpus.split(","))


def compared(answers: dict[str, Any], errors: list[str]) -> dict[str, Any]:
    """Every engine against the first one there is, request by request."""
    first = FIRST if FIRST in answers else next(iter(answers), "")
    found: dict[str, Any] = {}
    for name in answers:
        if name == first:
            continue
        pairs = list(zip(answers[first], answers[name], strict=True))
        ids = sum(a["ids"] != b["ids"] for a, b in pairs)
        values = [(x, y) for a, b in pairs for x, y in zip(a["bits"], b["bits"])]
        differ = sum(x != y for x, y in values)
        found[f"{name} = {first}"] = {
            "requests": len(pairs), "differing tokens": ids, "log-probabilities": len(values), "differing": differ,
        }  # fmt: skip
        if ids or differ or not values:
            errors.append(f"{name} is not {first}: {ids} of {len(pairs)} requests, {differ} of {len(values)} values")
    if not found:
        errors.append("no two engines to compare")
    return found


def sample(asked: dict[str, Any]) -> None:
    """One engine: writes ids and bits of every request, and facts that say which path it took."""
    begin = time.monotonic()
    import torch
    from vllm import LLM, SamplingParams

    import rl_vllm
    from rl_contract import build_profile
    from rl_vllm import platform

    cuda = asked["device"] == "cuda"
    settings = rl_vllm.settings_from_hf(asked["model"], leaves=2, arch=platform.arch())
    positions = json.loads((Path(asked["model"]) / "config.json").read_text())["max_position_embeddings"]
    profile = build_profile("two", settings)
    options: dict[str, Any] = {
        "model": asked["model"], "tensor_parallel_size": asked["tp"], "skip_tokenizer_init": True,
        "max_model_len": min(CONTEXT, positions), "max_num_seqs": MANY, "max_num_batched_tokens": 2048,
        "enforce_eager": asked["eager"] or not cuda,
    }  # fmt: skip
    if cuda:
        # engines that start at once would count one another's memory
        options |= {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 2 << 30, "block_size": 16}
        if not asked["eager"]:
            options["compilation_config"] = {"cudagraph_capture_sizes": [1, 8, MANY]}
    with rl_vllm.cpu_environment(asked["tp"]):
        llm = LLM(**rl_vllm.engine_args(profile, **options))
    facts: dict[str, Any] = {"ready s": round(time.monotonic() - begin, 1)}
    rl_vllm.reset_launches(llm)
    g = torch.Generator().manual_seed(0)
    lengths = [n for n in LENGTHS if n + TOKENS <= options["max_model_len"]]
    lengths += torch.randint(1, 200, (MANY,), generator=g).tolist()
    prompts = [torch.randint(2, settings.vocab_size, (n,), generator=g).tolist() for n in lengths]
    params = [
        SamplingParams(
            temperature=TEMPERATURES[i % len(TEMPERATURES)], seed=100 + i, max_tokens=TOKENS, logprobs=0,
            ignore_eos=True, detokenize=False,
        )
        for i in range(len(prompts))
    ]  # fmt: skip
    few = len(prompts) - MANY
    answers = []
    for part in (slice(0, few), slice(few, None), slice(0, 1)):
        requests = [{"prompt_token_ids": p} for p in prompts[part]]
        for out in llm.generate(requests, params[part], use_tqdm=False):
            ids = list(out.outputs[0].token_ids)
            values = [entry[t].logprob for t, entry in zip(ids, out.outputs[0].logprobs)]
            bits = torch.tensor(values, dtype=torch.float32).view(torch.int32).tolist()
            answers.append({"ids": ids, "bits": bits})
    reports = rl_vllm.assert_strict(llm, profile)
    graphs = reports[0].get("graphs") or {}
    facts |= {
        "workers": len(reports), "graphs": {k: graphs[k] for k in ("captures", "replays") if k in graphs},
        "kernels": sorted({x["kernel"] for x in reports[0]["launches"]}), "done s": round(time.monotonic() - begin, 1),
    }  # fmt: skip
    if cuda and (graphs.get("replays", 0) > 0) == asked["eager"]:
        raise AssertionError(f"{asked['name']}: {graphs}")
    segments = max(lengths) > settings.segment
    if cuda and segments and not any(kernel.endswith("decode") for kernel in facts["kernels"]):
        raise AssertionError(f"{asked['name']}: keys of several segments, and no decode over them: {facts['kernels']}")
    if len(reports) != asked["tp"]:
        raise AssertionError(f"{asked['name']}: {len(reports)} workers")
    Path(asked["out"]).write_text(json.dumps({"facts": facts, "answers": answers}))
    # an engine's own way out takes seconds, and may wait for a peer
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    # this folder's modules have names that others may use too
    sys.path.remove(str(Path(__file__).resolve().parent))
    sample(json.loads(sys.argv[1]))
