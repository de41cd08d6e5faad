"""One checkpoint with layers of Qwen3-0.6B's size, its profile and samples, for tests on a GPU."""

from typing import Any

import torch

from rl_megatron import PackedBatch, ParallelConfig, build_model, grpo_loss, micro_batches
from rl_megatron.checkpoint import load_tensors
from rl_megatron.scoring import token_logprobs

LENGTHS = ((3, 5), (170, 440), (1, 1), (9, 0), (600, 911), (40, 25), (1, 300))


class Case:
    """One checkpoint, its profile and samples."""

    def __init__(self, tiny: Any, **overrides: Any) -> None:
        sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8}
        rest = {"head_dim": 128, "num_hidden_layers": 3, "vocab_size": 5000, "max_position_embeddings": 4096}
        self.config = tiny.tiny_config(**(sizes | rest | overrides))
        self.tensors = tiny.tiny_tensors(self.config)
        self.profile = tiny.tiny_profile(self.config, arch="sm90", leaves=2, vocab_tile=512)
        self.samples = tiny.tiny_samples(self.config["vocab_size"], LENGTHS)

    def model(
        self, mode: Any = "strict", recompute: Any = "none", modules: Any = ("core_attn",), operators: Any = "auto"
    ) -> Any:
        model = build_model(
            self.config, self.profile, ParallelConfig(), mode=mode, recompute=recompute, recompute_modules=modules,
            native_operators=operators,
        )  # fmt: skip
        load_tensors(model, self.tensors)
        return model.train()

    def batches(self, budget: int | None = None, samples: Any = None) -> list[PackedBatch]:
        limits = {"vocab_size": self.config["vocab_size"], "max_positions": 4096}
        return micro_batches(self.samples if samples is None else samples, budget, **limits)

    def scores(self, model: Any, budget: int | None = None, **kw: Any) -> torch.Tensor:
        return torch.cat([token_logprobs(model, b, **kw) for b in self.batches(budget)])

    def step(self, model: Any, optimizer: Any, budget: int | None = None, seed: int = 0) -> torch.Tensor:
        """Forward, loss and backward over all micro-batches; the log-probabilities."""
        generator = torch.Generator().manual_seed(seed)
        found = []
        total = sum(len(r) for _, r in self.samples)
        optimizer.zero_grad()
        for batch in self.batches(budget):
            logp = token_logprobs(model, batch, nonfinite="nan")
            gains = torch.randn(logp.numel(), generator=generator).cuda()
            loss = grpo_loss(logp, logp.detach(), gains, batch.loss_mask, denominator=total)
            loss.value.backward()
            optimizer.collect()
            found.append(logp.detach())
        return torch.cat(found)
