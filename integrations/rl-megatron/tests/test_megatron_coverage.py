"""Nothing reduces but our operators: every aten operator that a strict step runs is looked at, forward and backward."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rl_megatron import PackedBatch, ParallelConfig, build_model, logprobs
from rl_megatron.checkpoint import load_tensors

# bytes moved, made or compared
MOVES = {
    *(
        "_to_copy",
        "_unsafe_view",
        "alias",
        "arange",
        "argsort",
        "as_strided",
        "cat",
        "clone",
        "copy",
        "detach",
        "empty",
    ),
    *(
        "empty_like",
        "expand",
        "fill",
        "full",
        "full_like",
        "gather",
        "index",
        "index_copy",
        "index_put",
        "index_select",
        "lift_fresh",
    ),
    *("new_empty", "new_full", "new_ones", "new_zeros", "ones", "ones_like", "permute", "repeat_interleave", "reshape"),
    *("scalar_tensor", "scatter", "select", "select_backward", "slice", "slice_backward", "split", "split_with_sizes"),
    *("squeeze", "stack", "t", "transpose", "unsqueeze", "view", "where", "masked_fill", "zero", "zeros", "zeros_like"),
    *("eq", "ne", "gt", "ge", "lt", "le", "isnan", "isfinite", "isinf", "logical_not", "bitwise_not", "bitwise_and"),
}
# elementwise, rounded once as IEEE has it, so that an element's place cannot show
EXACT = {"abs", "add", "div", "maximum", "minimum", "mul", "neg", "sub"}
# adds token rows one after the other, in packed order
IN_ORDER = {"index_add"}
SAMPLES = ((3, 5), (17, 33), (1, 1))


class Operators(TorchDispatchMode):
    """Counts operators by namespace and name; what happens inside an opaque operator is its own matter."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        floats = [x for x in tree_leaves((args, out)) if isinstance(x, torch.Tensor) and x.is_floating_point()]
        if floats:
            namespace, _, name = func._schema.name.partition("::")
            self.seen[namespace, name.removesuffix("_")] += 1
        return out

    def uncovered(self) -> set[str]:
        """Operators of torch itself whose result may depend on batch, place or thread."""
        return {name for namespace, name in self.seen if namespace == "aten"} - MOVES - EXACT - IN_ORDER

    def ours(self) -> set[str]:
        return {namespace for namespace, _ in self.seen if namespace.startswith("rl_")}


def step(tiny: Any, arch: str, mode: str, *, backward: bool) -> Operators:
    config = tiny.tiny_config(arch)
    model = build_model(config, tiny.tiny_profile(config), ParallelConfig(), mode=mode)  # type: ignore[arg-type]
    load_tensors(model, tiny.tiny_tensors(config))
    batch = PackedBatch.pack(tiny.tiny_samples(97, SAMPLES), vocab_size=97, max_positions=512)
    with Operators() as operators:
        values = list(logprobs(model, batch, temperature=0.8))
        if backward:
            torch.autograd.backward(values, [torch.ones_like(v) for v in values])
    assert all(torch.isfinite(v).all() for v in values)
    return operators


@pytest.mark.field_report("R17")
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("arch", ["Qwen3ForCausalLM", "LlamaForCausalLM"])
def test_strict_step_reduces_with_our_operators_alone(one_rank: None, tiny: Any, arch: str, backward: bool) -> None:
    operators = step(tiny, arch, "strict", backward=backward)
    assert operators.ours() == {"rl_gemm", "rl_norm", "rl_attn", "rl_logprob"}
    assert not operators.uncovered(), operators.seen


@pytest.mark.field_report("R17")
def test_native_step_names_what_is_not_covered(one_rank: None, tiny: Any) -> None:
    operators = step(tiny, "Qwen3ForCausalLM", "native", backward=False)
    assert not operators.ours()
    named = {"mm", "mean", "sum", "exp", "log", "silu", "rsqrt", "_scaled_dot_product_flash_attention_for_cpu"}
    assert named <= operators.uncovered(), operators.seen
