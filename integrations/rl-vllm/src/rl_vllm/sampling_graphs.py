"""What follows the model in a step of the V2 runner, as one CUDA graph: head, draw, log-probabilities, ranks.

Launched one by one these keep the host busy for longer than a small model keeps the GPU. A graph is captured for every
number of rows that vLLM captures the model for; a step with fewer rows is padded. Graphs lie in a memory pool of their
own: hidden states of a piecewise model graph lie in vLLM's, and prompt log-probabilities read them after this graph.

A step for which there is no graph launches the same kernels directly. One that needs the logits themselves (other
tokens' log-probabilities, a grammar) goes vLLM's way. All give the same bits; ``report`` counts them.

Ranks that share the head keep their columns of the logits, and exchange what they have found in them.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.sampler import _SAMPLING_EPS
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from rl_contract import Communicator, SingleRank
from rl_logprob import draw
from rl_vllm.options import SAMPLING_GRAPHS, asked


def sizes_for(vllm_config: Any) -> list[int]:
    """Numbers of rows to capture, ascending; none where vLLM captures nothing.

    ``additional_config={"rl_sampling_graphs": False}`` leaves them out.

    Raises:
        ContractError: another value than these two.
    """
    wanted = asked(vllm_config.additional_config, SAMPLING_GRAPHS)
    compilation = vllm_config.compilation_config
    if wanted is False or vllm_config.model_config.enforce_eager or not compilation.cudagraph_mode:
        return []
    most = vllm_config.scheduler_config.max_num_seqs
    return sorted(size for size in compilation.cudagraph_capture_sizes or () if size <= most)


def has_own_columns(model: Any, world_size: int, vocab_size: int) -> bool:
    """Whether ranks share the model's head, and the logits are its product alone, in vLLM's order of ids."""
    head: Any = getattr(model, "lm_head", None)
    processor: Any = getattr(model, "logits_processor", None)
    # of another class, what is done beside the product is not known
    if world_size == 1 or type(processor) is not LogitsProcessor or not processor.use_all_gather:
        return False
    if processor.logits_as_input or processor.soft_cap is not None or processor.scale != 1.0:
        return False
    return head is not None and head.weight.shape[0] * world_size >= vocab_size


class SamplingGraphs:
    """Graphs of one V2 runner; takes the place of its ``sample``.

    Args:
        runner: vLLM's, with a ``StrictRunnerSampler``.
        sizes: numbers of rows to capture, ascending.
        most: rows of the largest step.
        comm: the ranks that share the head.
    """

    def __init__(self, runner: Any, sizes: list[int], most: int, comm: Communicator | None = None) -> None:
        self.runner, self.sizes, self.most = runner, sizes, most
        comm = SingleRank() if comm is None else comm
        shared = has_own_columns(runner.model, comm.world_size, runner.sampler.draws.vocab_size)
        self._comm = comm if shared else None
        self.sampler, self.draws, self.device = runner.sampler, runner.sampler.draws, runner.device
        self.ways: Counter[str] = Counter()
        self._stock = runner.sample
        self._replays: dict[int, Callable[[], None]] = {}
        self._pool: Any = None
        self._weight: int | None = None
        # by number of rows; without a graph, as many
        self._size_of = [next((s for s in sizes if s >= n), n) for n in range(most + 1)]
        model = runner.model_config
        self._hidden = torch.zeros((most, model.get_hidden_size()), dtype=model.dtype, device=self.device)
        self._arena = torch.zeros(4 * most, dtype=torch.int64, device=self.device)
        self._packed = torch.zeros(3 * most, dtype=torch.int64, device=self.device)

    def report(self) -> dict[str, Any]:
        """Sizes captured, and how many steps went which way since ``reset``."""
        return {"sizes": sorted(self._replays), **self.ways}

    def reset(self) -> None:
        self.ways.clear()

    def capture(self) -> None:
        """Capture every size, largest first, whose memory the others share. Replaces what was captured before."""
        self._replays = {}
        self._pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None
        with _capturing(self.device), torch.inference_mode():
            for size in reversed(self.sizes):
                # rows of padding: nothing that is drawn here counts
                self._pick(size, self._hidden, _one_row(self.device))
                self._parts(size)[2].fill_(draw.PADDING)
                self._replays[size] = captured(partial(self._step, size), self._pool, self.device)
        self._weight = self._address()

    def sample(self, hidden_states: Tensor, input_batch: Any, grammar_output: Any = None) -> tuple[Any, Tensor, Tensor]:
        """As the runner's own."""
        asked = int(self.sampler.sampling_states.num_logprobs[input_batch.idx_mapping_np].max(initial=-1))
        way = self._way(input_batch, grammar_output, asked)
        self.ways[way] += 1
        if way == "logits":
            return self._stock(hidden_states, input_batch, grammar_output)
        self.draws.check()
        rows = input_batch.num_reqs
        size = self._size_of[rows] if way == "graph" else rows
        counts = self._pick(size, hidden_states, input_batch)
        if way == "graph":
            self._replays[size]()
        else:
            self._step(size)
        # the next step overwrites what a graph writes, while this one's is still on its way to the host
        packed = self._packed[: 3 * size].clone()
        ids, logprobs, ranks = draw.unpack(packed.view(3, size), rows)
        ids = ids.view(rows, 1)
        scores = LogprobsTensors(ids, logprobs.view(rows, 1), ranks) if asked >= 0 else None
        sampled, rejected = counts[0], counts[1]
        output = SamplerOutput(
            sampled_token_ids=ids, logprobs_tensors=scores, num_nans=None, num_sampled=sampled, num_rejected=rejected
        )
        return output, sampled, rejected

    def _way(self, batch: Any, grammar: Any, asked: int) -> str:
        """``asked``: how many other tokens' log-probabilities; -1 where none are wanted at all."""
        rows, states = batch.num_reqs, self.sampler.logprob_token_ids_state
        if grammar is not None or batch.num_draft_tokens or len(batch.logits_indices) != rows or not rows:
            return "logits"
        if self.sampler.compute_nans or asked > 0 or states.max_num_token_ids(batch.idx_mapping_np) > 0:
            return "logits"
        if self._size_of[rows] not in self._replays:
            return "direct"
        if self._address() != self._weight:
            self.capture()
        return "graph"

    def _address(self) -> int:
        head = getattr(self.runner.model, "lm_head", None)
        return 0 if head is None else head.weight.data_ptr()

    def _parts(self, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """seeds, positions, kinds int64 and temperatures fp32 [size]: views of the arena."""
        seeds, positions, kinds, last = self._arena[: 4 * size].view(4, size)
        return seeds, positions, kinds, last.view(torch.float32)[:size]

    def warm(self, size: int) -> None:
        """A step of as many rows of padding, launched directly."""
        self._pick(size, self._hidden, _one_row(self.device))
        self._parts(size)[2].fill_(draw.PADDING)
        self._step(size)

    def _step(self, size: int) -> None:
        """What a graph holds."""
        hidden, model = self._hidden[:size], self.runner.model
        if self._comm is None:
            logits = model.compute_logits(hidden)
        else:
            logits = model.lm_head.quant_method.apply(model.lm_head, hidden)
        out = self._packed[: 3 * size].view(3, size)
        seeds, positions, kinds, temperature = self._parts(size)
        self.draws.scored(logits, seeds, positions, temperature, kinds, out, self._comm)

    def _pick(self, size: int, hidden_states: Tensor, batch: Any) -> Tensor:
        """Fill the inputs; returns tokens sampled and rejected by row, int32 [2, rows]."""
        rows, states = batch.num_reqs, self.sampler.sampling_states
        counts = torch.empty((2, size), dtype=torch.int32, device=self.device)
        given = (
            hidden_states, batch.logits_indices, batch.positions, batch.expanded_idx_mapping, states.seeds.gpu,
            states.temperature.gpu, batch.seq_lens, self.sampler.req_states.prefill_len.gpu,
        )  # fmt: skip
        if self.device.type != "cuda":
            self._pick_on_cpu(size, rows, counts[:, :rows], *given)
            return counts[:, :rows]
        from rl_vllm.triton_rows import pick_rows_kernel

        pick_rows_kernel[(size,)](
            *given, self._hidden, self._arena, counts, rows, hidden_states.stride(0), self._hidden.shape[1], size,
            COLD=_SAMPLING_EPS, BLOCK=1024, num_warps=4,
        )  # fmt: skip
        return counts[:, :rows]

    def _pick_on_cpu(
        self, size: int, rows: int, counts: Tensor, hidden_states: Tensor, indices: Tensor, positions: Tensor,
        mapping: Tensor, seeds: Tensor, temperatures: Tensor, seq_lens: Tensor, prefill_lens: Tensor,
    ) -> None:  # fmt: skip
        """What ``pick_rows_kernel`` does."""
        into_seeds, into_positions, kinds, temperature = self._parts(size)
        self._hidden[:rows], self._hidden[rows:size] = hidden_states[indices], 0
        found = temperatures[mapping]
        cold = found < _SAMPLING_EPS
        into_seeds[:rows], into_positions[:rows] = seeds[mapping], positions[indices] + 1
        into_seeds[rows:], into_positions[rows:] = 0, 0
        kinds[:rows], kinds[rows:] = cold.long(), draw.PADDING
        temperature[:rows], temperature[rows:] = torch.where(cold, 1.0, found), 1.0
        counts[0], counts[1] = (seq_lens[:rows] >= prefill_lens[mapping]).int(), 0


def captured(step: Callable[[], None], pool: Any, device: torch.device) -> Callable[[], None]:
    """``step`` as a replay of its graph, once run so that its kernels are there; a CPU runs it each time."""
    step()
    if device.type != "cuda":
        return step
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool):
        step()
    return graph.replay


def _one_row(device: torch.device) -> Any:
    """As much of an ``InputBatch`` as is picked from."""
    index = torch.zeros(1, dtype=torch.int32, device=device)
    long = torch.zeros(1, dtype=torch.int64, device=device)
    return SimpleNamespace(
        num_reqs=1, logits_indices=long, positions=long, expanded_idx_mapping=index, seq_lens=index + 1
    )


def _capturing(device: torch.device) -> AbstractContextManager[Any]:
    if device.type != "cuda":
        return nullcontext()
    from vllm.distributed.parallel_state import graph_capture

    return graph_capture(device=device)


def install(runner: Any, vllm_config: Any, comm: Communicator) -> SamplingGraphs | None:
    """Let the runner sample this way, and capture these graphs after the model's; None where it samples otherwise.

    Args:
        comm: the tensor-parallel ranks, each of which samples.
    """
    # later runners share the sampler's work among ranks, or have more for it to do
    if getattr(runner, "batch_sharder", None) or getattr(runner.sampler, "return_sampling_mask", False):
        return None
    if getattr(runner.sampler, "trace_replay_state", None) is not None:
        return None
    sizes = sizes_for(vllm_config)
    graphs = SamplingGraphs(runner, sizes, vllm_config.scheduler_config.max_num_seqs, comm)
    runner.sample = graphs.sample
    if not sizes:
        return graphs
    stock = runner.capture_model

    def capture_model(*args: Any, **kwargs: Any) -> Any:
        found = stock(*args, **kwargs)
        free = torch.cuda.mem_get_info()[0]
        graphs.capture()
        return found + max(0, free - torch.cuda.mem_get_info()[0])

    runner.capture_model = capture_model
    return graphs
