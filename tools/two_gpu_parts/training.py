"""Two GPUs train as one: log-probabilities, losses, gradient norms and weights of TP2 and CP2 are those of one rank."""

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch

STEPS = 3
LENGTHS = ((3, 5), (170, 440), (1, 1), (600, 911), (40, 25), (1, 300))
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 5000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def write_checkpoint(folder: Path) -> None:
    from safetensors.torch import save_file

    g = torch.Generator().manual_seed(0)
    h, f, d, v = (CONFIG[k] for k in ("hidden_size", "intermediate_size", "head_dim", "vocab_size"))
    q, kv = CONFIG["num_attention_heads"] * d, CONFIG["num_key_value_heads"] * d

    def matrix(n: int, k: int, scale: float | None = None) -> torch.Tensor:
        return (torch.randn(n, k, generator=g) * (scale or k**-0.5)).bfloat16()

    def norm(n: int) -> torch.Tensor:
        return (1 + 0.1 * torch.randn(n, generator=g)).bfloat16()

    out = {"model.embed_tokens.weight": matrix(v, h, 1.0), "lm_head.weight": matrix(v, h), "model.norm.weight": norm(h)}
    for i in range(CONFIG["num_hidden_layers"]):
        p = f"model.layers.{i}."
        rows = {"q": q, "k": kv, "v": kv}
        out |= {f"{p}self_attn.{n}_proj.weight": matrix(r, h) for n, r in rows.items()}
        out |= {f"{p}self_attn.{n}_norm.weight": norm(d) for n in "qk"}
        out[f"{p}self_attn.o_proj.weight"] = matrix(h, q)
        out |= {f"{p}mlp.{n}_proj.weight": matrix(f, h) for n in ("gate", "up")}
        out[f"{p}mlp.down_proj.weight"] = matrix(h, f)
        out |= {f"{p}{n}_layernorm.weight": norm(h) for n in ("input", "post_attention")}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(out, folder / "model.safetensors", metadata={"format": "pt"})


def train(rank: int, folder: str, name: str, tp: int, cp: int) -> dict[str, Any]:
    from rl_contract import Settings, build_profile
    from rl_gemm.gpu import arch
    from rl_megatron import LossConfig, OptimizerConfig, ParallelConfig, TrainerRank

    settings = Settings(
        hidden_size=CONFIG["hidden_size"], vocab_size=CONFIG["vocab_size"], norm_eps=1e-6, leaves=2,
        rope={"theta": 1e6, "rotary_dim": CONFIG["head_dim"]}, arch=arch(0), dtype="bfloat16",
    )  # fmt: skip
    trainer = TrainerRank(
        rank=rank, init_method=f"file://{folder}/{name}", hf_path=f"{folder}/model",
        profile=build_profile("two", settings), parallel=ParallelConfig(tp=tp, cp=cp), device="cuda",
        optimizer=OptimizerConfig(lr=1e-3, weight_decay=0.1), loss=LossConfig(kl_coef=0.05),
    )  # fmt: skip
    trainer.init()
    g = torch.Generator().manual_seed(1)
    samples = [tuple(torch.randint(0, CONFIG["vocab_size"], (n,), generator=g).tolist() for n in p) for p in LENGTHS]
    trainer.keep_reference()
    out: dict[str, Any] = {"steps": []}
    for _ in range(STEPS):
        old, ref = trainer.logprobs(samples), trainer.reference_logprobs(samples)
        step = trainer.train_step(samples, [1.0, -0.5, 2.0, 0.3, -1.25, 0.7], old, ref_logprobs=ref)
        assert all(np.array_equal(a, b) for a, b in zip(step["logprobs"], old)), f"{name}: training is not scoring"
        out["steps"].append({**step, "logprobs": np.concatenate(old)})
    weights = trainer.export_weights()
    out["weights"] = weights and {n: t.cpu() for n, t in weights.items()}
    out["transports"] = trainer.report()["transports"]
    trainer.close()
    return out


def run(rank: int, folder: str, budget: float) -> dict[str, Any]:
    import time

    ready = Path(folder) / "model" / "model.safetensors"
    if rank == 0:
        write_checkpoint(Path(folder) / "model")
    while not ready.exists():
        time.sleep(0.05)
    time.sleep(0.5)
    done = {"tp2": train(rank, folder, "tp2", 2, 1), "cp2": train(rank, folder, "cp2", 1, 2)}
    if rank:
        return {}
    done["one"] = train(0, folder, "one", 1, 1)
    Path(folder, "done.pkl").write_bytes(pickle.dumps(None))
    found: dict[str, Any] = {"transports": done["tp2"]["transports"] | done["cp2"]["transports"]}
    for name in ("tp2", "cp2"):
        differing = 0
        for a, b in zip(done["one"]["steps"], done[name]["steps"]):
            differing += int((a["logprobs"].view(np.int32) != b["logprobs"].view(np.int32)).sum())
            assert (a["loss"], a["grad_norm"]) == (b["loss"], b["grad_norm"]), name
        assert differing == 0, f"{name}: {differing} log-probabilities differ"
        for n, t in done["one"]["weights"].items():
            assert torch.equal(t.view(torch.int16), done[name]["weights"][n].view(torch.int16)), f"{name}: {n}"
        found[f"{name}: log-probabilities compared"] = STEPS * done["one"]["steps"][0]["logprobs"].size
    return found
