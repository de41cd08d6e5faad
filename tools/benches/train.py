"""A Megatron training step, forward, backward and optimizer: strict beside native, on one GPU, time by phase.

Layers and vocabulary have Qwen3-8B's dimensions; sequences of 2,048 tokens are packed, nearly all of them scored. Both
arms are the stock ``GPTModel`` with one optimizer. Native runs TransformerEngine where it is installed, else Megatron's
local modules with torch's attention; ``peer`` of a row says which (see ``rl_megatron.te``).
"""

import gc
import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 4096, 32, 8, 128, 12288, 151936
SEQUENCE = 2048
CASES = ((4, 8192), (8, 8192), (8, 16384), (4, 16384))  # layers, tokens; the first ones are wanted most
PHASES = ("forward", "backward", "optimizer", "step")
METHOD = (
    "Qwen3-8B's dimensions, packed sequences of 2,048 tokens; milliseconds by CUDA events, medians of four steps after "
    "two, each arm alone on the GPU"
)


def hf_config(layers: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


class Arm:
    """One arm's model and optimizer, with random weights of a trained model's scale."""

    def __init__(
        self,
        mode: str,
        layers: int,
        leaves: int = 1,
        parallel: Any = None,
        recompute: str = "none",
        native_operators: str = "auto",
    ) -> None:
        from rl_contract import Settings, build_profile
        from rl_gemm.gpu import arch
        from rl_megatron import OptimizerConfig, ParallelConfig, build_model, te, topology
        from rl_megatron.optimizer import make_optimizer

        profile = build_profile(
            "bench",
            Settings(
                hidden_size=HIDDEN,
                vocab_size=VOCAB,
                norm_eps=1e-6,
                rope={"theta": 1e6, "rotary_dim": HEAD_DIM},
                leaves=leaves,
                arch=arch(0),
                dtype="bfloat16",
            ),
        )
        kind: dict[str, Any] = {"mode": mode, "recompute": recompute}
        kind |= {"native_operators": native_operators} if mode == "native" else {}
        self.parallel = parallel or ParallelConfig()
        self.model = build_model(hf_config(layers), profile, self.parallel, **kind)
        operators = self.model.rl.native_operators
        self.name = te.label(operators) if operators else "strict"
        self.rank = topology.context_parallel().rank
        torch.manual_seed(0)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if parameter.dim() == 1:
                    parameter.fill_(1.0)
                else:
                    scale = 1.0 if "word_embeddings" in name else parameter.shape[1] ** -0.5
                    parameter.normal_(0.0, scale)
                    if "word_embeddings" in name or "output_layer" in name:
                        parameter[VOCAB:] = 0.0
        self.model.train()
        self.optimizer = make_optimizer(self.model, OptimizerConfig(lr=1e-6))

    def step(self, tokens: int, seed: int) -> dict[str, float]:
        """Milliseconds by phase, of a batch made anew."""
        from rl_megatron import PackedBatch, grpo_loss
        from rl_megatron.scoring import token_logprobs

        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, VOCAB, (tokens // SEQUENCE, SEQUENCE), generator=generator).tolist()
        batch = PackedBatch.pack(
            [(row[:1], row[1:]) for row in ids], vocab_size=VOCAB, max_positions=40960, cp=self.parallel.cp
        )
        batch.on(self.rank, torch.device("cuda", torch.cuda.current_device()))
        gains = torch.randn(sum(batch.response_lengths), generator=generator).cuda()
        torch.cuda.synchronize()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        marks[0].record()
        self.optimizer.zero_grad()
        logp = token_logprobs(self.model, batch, nonfinite="nan", keep_logits=6 << 30)
        marks[1].record()
        loss = grpo_loss(logp, logp.detach(), gains, batch.loss_mask, denominator=len(gains))
        loss.value.backward()
        self.optimizer.collect()
        marks[2].record()
        figures = self.optimizer.step()
        marks[3].record()
        torch.cuda.synchronize()
        assert not figures["skipped"], figures
        found = {name: a.elapsed_time(b) for name, a, b in zip(PHASES, marks, marks[1:])}
        return found | {"step": marks[0].elapsed_time(marks[3])}

    def measure(
        self, tokens: int, rounds: int = 4, done: Callable[[int], None] = lambda number: None
    ) -> dict[str, float]:
        """Median milliseconds by phase; the first two steps compile and fill the allocator.

        ``done`` is told the number of each step that has ended.
        """
        steps = []
        for number in range(rounds + 2):
            steps.append(self.step(tokens, number))
            done(number)
        return {name: median(s[name] for s in steps[2:]) for name in PHASES}


def free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def run(budget: float) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows and targets."""
    from rl_megatron import ParallelConfig, topology

    end = time.monotonic() + budget
    # as TrainerRank has it: a step's few operations on the host are small
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        topology.start(0, ParallelConfig(), f"file://{folder}/init", device="cuda:0")
        try:
            for layers, tokens in CASES:
                if time.monotonic() > end - 8:
                    print(f"train: no time left for L={layers} T={tokens}", flush=True)
                    continue
                times, names = {}, {}
                for mode in ("native", "strict"):
                    arm = Arm(mode, layers)
                    times[mode], names[mode] = arm.measure(tokens), arm.name
                    del arm
                    free()
                rows += cases(layers, tokens, times, names["native"])
                print(f"L={layers} T={tokens}", {m: {k: round(v, 2) for k, v in t.items()} for m, t in times.items()})
        finally:
            topology.stop()
    return rows, summary(rows)


def cases(layers: int, tokens: int, times: dict[str, dict[str, float]], peer: str = "native") -> list[dict[str, Any]]:
    """A row a phase; ``peer`` names the native arm."""
    return [
        {
            "case": f"{phase} L={layers} T={tokens}",
            "op": phase,
            "shape": [layers, tokens],
            "strict_us": round(1e3 * times["strict"][phase], 1),
            "peer": peer,
            "peer_us": round(1e3 * times["native"][phase], 1),
            "ratio": round(times["native"][phase] / times["strict"][phase], 3),
        }
        for phase in PHASES
    ]


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Whole steps against native."""
    return {
        f"training step, {r['shape'][0]} layers, {r['shape'][1]} tokens, against native >= 0.95": r["ratio"]
        for r in rows
        if r["op"] == "step"
    }
