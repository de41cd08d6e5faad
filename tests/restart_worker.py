"""Prints digests of every kernel package's outputs, and how many kernels were compiled or read from disk."""

import hashlib
import json
import sys

import torch

import rl_gemm
from rl_attn import attention_packed, rope_table, rotary
from rl_contract.jit import kernel
from rl_logprob import selected_logprob
from rl_norm import rms_norm


def outputs() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(70, 128, generator=g).bfloat16()
    weight = torch.randn(256, 128, generator=g).bfloat16()
    wide = rl_gemm.linear(x, weight, leaves=4)
    q, k = rotary(wide.view(70, 4, 64), wide.view(70, 4, 64)[:, :2], torch.arange(70), rope_table(70, 64, 1e4))
    cu = torch.tensor([0, 70])
    logits = rl_gemm.linear(x, weight, out_dtype=torch.float32)
    return {
        "linear": wide,
        "swiglu": rl_gemm.swiglu(wide),
        "norm": rms_norm(x, torch.ones(128).bfloat16(), 1e-6),
        "rotary": q,
        "attention": attention_packed(q, k, k, cu_seqlens_q=cu, cu_seqlens_k=cu, scale=0.125),
        "logprob": selected_logprob(logits, torch.arange(70), vocab_size=250),
    }


def digest(x: torch.Tensor) -> str:
    return hashlib.sha256(x.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def kernels() -> list:
    """Every compiled kernel of the packages that ran."""
    kind = type(kernel(lambda x: x))
    modules = [m for n, m in sys.modules.items() if n.split(".")[0] in ("rl_gemm", "rl_norm", "rl_attn", "rl_logprob")]
    found = {id(v): v for m in modules for v in vars(m).values() if isinstance(v, kind)}
    return list(found.values())


if __name__ == "__main__":
    first, second = outputs(), outputs()
    stats = [k.stats for k in kernels()]
    print(
        json.dumps(
            {
                "digests": {name: digest(x) for name, x in first.items()},
                "again": {name: digest(x) for name, x in second.items()},
                "compiled": sum(sum(s.cache_misses.values()) for s in stats),
                "loaded": sum(sum(s.cache_hits.values()) for s in stats),
            }
        )
    )
