"""A V2 runner small enough to look at: a head, eight requests' sampling states, batches of them."""

from types import SimpleNamespace

import numpy as np
import torch
from tiny_checkpoint import tiny_config

import rl_gemm

CONFIG = tiny_config()
VOCAB, HIDDEN = CONFIG["vocab_size"], CONFIG["hidden_size"]
# of the runner's eight requests; the last two are the same but for their seeds
TEMPERATURES = torch.tensor([0.7, 0.0, 1.0, 1.3, 0.0, 0.5, 0.9, 0.9])
SEEDS = torch.tensor([11, 12, -13, 14, 15, 16, 17, 18])


class Model(torch.nn.Module):
    """A head of VOCAB ids and three columns of padding, which are cut off."""

    def __init__(self, device, dtype):
        super().__init__()
        g = torch.Generator().manual_seed(1)
        self.lm_head = torch.nn.Linear(HIDDEN, VOCAB + 3, bias=False)
        weight = torch.randn(VOCAB + 3, HIDDEN, generator=g).to(device, dtype)
        self.lm_head.weight = torch.nn.Parameter(weight, requires_grad=False)

    def compute_logits(self, hidden):
        # torch's own product of a row depends on the number of rows
        return rl_gemm.column_parallel_linear(hidden, self.lm_head.weight, out_dtype=torch.float32)[:, :VOCAB]


class SharedModel(torch.nn.Module):
    """What ``comm``'s rank has of ``Model``: every rank as many rows of the head, and vLLM's stock logits processor."""

    def __init__(self, comm, device, dtype):
        from vllm.model_executor.layers.logits_processor import LogitsProcessor

        super().__init__()
        whole = Model(device, dtype).lm_head.weight
        columns = -(-len(whole) // comm.world_size)
        mine = whole[comm.rank * columns :][:columns]
        # what pads the last rank counts nowhere
        weight = torch.cat((mine, mine.new_full((columns - len(mine), HIDDEN), torch.nan)))
        self.lm_head = torch.nn.Linear(HIDDEN, columns, bias=False)
        self.lm_head.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.lm_head.quant_method = SimpleNamespace(
            apply=lambda head, x, bias=None: rl_gemm.column_parallel_linear(x, head.weight, out_dtype=torch.float32)
        )
        # its constructor asks for an engine's configuration
        self.logits_processor = LogitsProcessor.__new__(LogitsProcessor)
        torch.nn.Module.__init__(self.logits_processor)
        vars(self.logits_processor).update(use_all_gather=True, logits_as_input=False, soft_cap=None, scale=1.0)

    def compute_logits(self, hidden):
        raise AssertionError("logits were to stay where they are")


def runner_of(profile, sizes=(1, 2, 4), device="cpu", dtype=torch.float32, comm=None):
    """(runner, its sampling graphs)."""
    from rl_vllm.gpu_sampling import StrictRunnerSampler
    from rl_vllm.sampling_graphs import SamplingGraphs

    states = SimpleNamespace(
        temperature=SimpleNamespace(np=TEMPERATURES.numpy(), gpu=TEMPERATURES.to(device)),
        seeds=SimpleNamespace(gpu=SEEDS.to(device)),
        num_logprobs=np.zeros(8, np.int32),
    )  # fmt: skip
    stock = SimpleNamespace(
        sampling_states=states, compute_nans=False,
        logprob_token_ids_state=SimpleNamespace(max_num_token_ids=lambda rows: 0),
        req_states=SimpleNamespace(
            prefill_len=SimpleNamespace(gpu=torch.tensor([5, 5, 5, 5, 5, 5, 5, 900], dtype=torch.int32, device=device))
        ),
    )  # fmt: skip
    runner = SimpleNamespace(
        sampler=StrictRunnerSampler(profile, stock, torch.device(device)), device=torch.device(device),
        model=Model(device, dtype) if comm is None else SharedModel(comm, device, dtype),
        model_config=SimpleNamespace(get_hidden_size=lambda: HIDDEN, dtype=dtype),
        sample=lambda *args: ("stock", args),
    )  # fmt: skip
    made = SamplingGraphs(runner, list(sizes), 5, comm)
    runner.sample = made.sample
    return runner, made


def batch(requests, seed=0, device="cpu", dtype=torch.float32):
    """(hidden states of two tokens a request, the batch of these requests)."""
    g = torch.Generator().manual_seed(seed)
    rows = len(requests)
    index = torch.tensor(requests, dtype=torch.int32)
    hidden = torch.randn(2 * rows + 3, HIDDEN, generator=g).to(device, dtype)
    positions = torch.arange(2 * rows + 3, device=device) * 7
    return hidden, SimpleNamespace(
        num_reqs=rows, num_draft_tokens=0, idx_mapping_np=np.array(requests),
        expanded_idx_mapping=index.to(device), logits_indices=torch.arange(rows, device=device) * 2 + 1,
        positions=positions, seq_lens=torch.full((rows,), 9, dtype=torch.int32, device=device),
    )  # fmt: skip


def wanted(profile, runner, hidden, given):
    """ids, log-probabilities and ranks by the single operators."""
    import rl_logprob

    logits = runner.model.compute_logits(hidden[given.logits_indices])
    at = given.expanded_idx_mapping.long().cpu()
    asked, seeds = TEMPERATURES[at].to(logits.device), SEEDS[at].to(logits.device)
    temperature = torch.where(asked == 0, 1.0, asked)
    positions = given.positions[given.logits_indices] + 1
    drawn = rl_logprob.gumbel_sample(logits, seeds, positions, vocab_size=VOCAB, temperature=temperature)
    ids = torch.where(asked == 0, rl_logprob.greedy_sample(logits, vocab_size=VOCAB), drawn)
    tile = profile.settings.vocab_tile
    logp = rl_logprob.selected_logprob(logits, ids, vocab_size=VOCAB, temperature=temperature, vocab_tile=tile)
    return ids, logp, (logits >= logits.gather(1, ids[:, None])).sum(1)
