"""Full CUDA graphs for steps of few requests that prefill, beside vLLM's: full ones of decode, piecewise of the rest.

In a short prefill the host takes longer to launch a layer's pieces than the GPU to compute them. Attention takes
lengths and pages from the device, so one graph serves every batch of up to its tokens and its requests, whatever each
asks for. A step that has more of either goes vLLM's way; bits are those of either way.
"""

from dataclasses import replace
from typing import Any

from rl_vllm.options import PREFILL_GRAPHS, asked

# most requests of a graph: one prompt alone needs no kernel for short sequences
REQUESTS = (1, 8)
# tokens of graphs are multiples of this, since each takes a part of a second to capture; a step that it would pad by
# as much beyond its piecewise graph takes that one
STEP = 64


def extend(manager: Any) -> int:
    """Let a V2 runner's graph manager capture and choose these graphs too; returns how many. Idempotent.

    None where it has not both full graphs of decode and piecewise ones, or is used with data parallelism, whose ranks
    agree on tokens alone.
    """
    from vllm.config.compilation import CUDAGraphMode

    full, piecewise = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE
    captured, candidates = manager._capture_descs, manager._candidates
    if full not in captured or piecewise not in captured or manager.dp_size > 1:
        return 0
    # graphs of mixed batches: these ones, or a later vLLM's of decodes of unequal lengths
    if any(desc.uniform_token_count is None for desc in captured[full]):
        return 0
    # vLLM captures with as many keys as queries, and a request's block table has room for no more than this
    longest = manager.vllm_config.model_config.max_model_len
    # an engine of fewer requests has buffers for no more
    counts = sorted({min(requests, manager.max_num_reqs) for requests in REQUESTS})
    made = [
        replace(desc, cg_mode=full, num_reqs=requests)
        for desc in captured[piecewise]
        for requests in counts
        # of a dummy batch the last request has what the others leave
        if desc.num_tokens % STEP == 0 and requests < desc.num_tokens
        if sum(divmod(desc.num_tokens, requests)) <= longest
        if not desc.num_active_loras
    ]
    # the first capture makes the buffer of hidden states that all share, so the most tokens come first
    captured[full].extend(made)
    captured[full].sort(key=lambda desc: desc.num_tokens, reverse=True)
    # of several that fit, that of the fewest requests
    made.sort(key=lambda desc: (desc.num_tokens, desc.num_reqs))
    # several numbers of tokens share a list
    for found in {id(x): x for (_, loras), x in candidates.items() if not loras}.values():
        at = next((i for i, desc in enumerate(found) if desc.cg_mode == piecewise), None)
        if at is not None:
            size = found[at].num_tokens
            found[at:at] = [desc for desc in made if size <= desc.num_tokens < size + STEP]
    return len(made)


def install(runner: Any, vllm_config: Any) -> None:
    """Extend the runner's graph manager when it captures, unless ``additional_config={"rl_prefill_graphs": False}``.

    Raises:
        ContractError: another value than True or False.
    """
    if asked(vllm_config.additional_config, PREFILL_GRAPHS) is False:
        return
    stock = runner.capture_model

    def capture_model(*args: Any, **kwargs: Any) -> Any:
        if getattr(runner, "cudagraph_manager", None) is not None:
            extend(runner.cudagraph_manager)
        return stock(*args, **kwargs)

    runner.capture_model = capture_model
