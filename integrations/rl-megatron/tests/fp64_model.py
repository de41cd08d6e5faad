"""An independent fp64 Qwen3/Llama in plain torch, written from the published architectures; the accuracy oracle."""

from typing import Any

import torch
import torch.nn.functional as F

Tensors = dict[str, torch.Tensor]


def parameters(tensors: Tensors) -> Tensors:
    return {name: t.double().requires_grad_(True) for name, t in tensors.items()}


def logprobs(
    config: dict[str, Any], w: Tensors, prompt: list[int], response: list[int], temperature: float = 1.0
) -> torch.Tensor:
    """fp64 log-probabilities of ``response`` after ``prompt``."""
    tokens = torch.tensor([*prompt, *response])
    hq, hk, d = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    eps = config["rms_norm_eps"]

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight

    angle = torch.arange(len(tokens)).double()[:, None] / config["rope_theta"] ** (torch.arange(0, d, 2).double() / d)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]

    def rotate(x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    x = w["model.embed_tokens.weight"][tokens]
    causal = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}."
        h = norm(x, w[p + "input_layernorm.weight"])
        q, k, v = (F.linear(h, w[f"{p}self_attn.{n}_proj.weight"]).view(len(tokens), -1, d) for n in "qkv")
        if p + "self_attn.q_norm.weight" in w:
            q, k = norm(q, w[p + "self_attn.q_norm.weight"]), norm(k, w[p + "self_attn.k_norm.weight"])
        q, k = rotate(q), rotate(k)
        k, v = (t.repeat_interleave(hq // hk, 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * d**-0.5
        weights = scores.masked_fill(~causal, -torch.inf).softmax(-1)
        o = torch.einsum("hqk,khd->qhd", weights, v).flatten(1)
        x = x + F.linear(o, w[p + "self_attn.o_proj.weight"])
        h = norm(x, w[p + "post_attention_layernorm.weight"])
        gate, up = (F.linear(h, w[f"{p}mlp.{n}_proj.weight"]) for n in ("gate", "up"))
        x = x + F.linear(F.silu(gate) * up, w[p + "mlp.down_proj.weight"])
    hidden = norm(x, w["model.norm.weight"])[len(prompt) - 1 : -1]
    logits = F.linear(hidden, w.get("lm_head.weight", w["model.embed_tokens.weight"])) / temperature
    return logits.log_softmax(-1)[torch.arange(len(response)), torch.tensor(response)]
