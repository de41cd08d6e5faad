"""The promise ``graph``: a compiled decoder has the bits of the eager one, forward and backward."""

import shutil

import pytest
import torch
from decoder import SCALE, VOCAB, Decoder, make_weights

from rl_attn import attention_packed
from rl_contract import launches, reset_launches

BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.skipif(not shutil.which("g++"), reason="no g++"))]


def call(decoder, tokens, cu, positions):
    def attend(_layer, q, k, v):
        return attention_packed(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, scale=SCALE)

    return decoder.hidden(tokens, positions, attend)


def run(forward, tokens, cu, positions, weights):
    leaves = {name: w.clone().requires_grad_() for name, w in weights.items()}
    reset_launches()
    hidden = forward(Decoder(leaves), tokens, cu, positions)
    hidden.backward(torch.ones_like(hidden))
    counts = {(row["boundary"], row["kernel"]): row["count"] for row in launches()}
    return hidden.detach(), {name: leaf.grad for name, leaf in leaves.items() if name != "head"}, counts


@pytest.mark.field_report("R21", "R54")
@pytest.mark.parametrize("backend", BACKENDS)
def test_graph_compiled_decoder_equals_eager(backend):
    weights = make_weights(0)
    g = torch.Generator().manual_seed(1)
    torch._dynamo.reset()
    compiled = torch.compile(call, backend=backend)
    for lengths in ([3, 70, 1], [64, 65]):
        tokens = torch.randint(0, VOCAB, (sum(lengths),), generator=g)
        cu = torch.tensor([0, *lengths]).cumsum(0).int()
        positions = torch.cat([torch.arange(n) for n in lengths])
        eager = run(call, tokens, cu, positions, weights)
        graph = run(compiled, tokens, cu, positions, weights)
        assert torch.equal(eager[0].view(torch.int16), graph[0].view(torch.int16))
        for name, want in eager[1].items():
            assert torch.equal(want.view(torch.int16), graph[1][name].view(torch.int16)), name
        # the same operators ran as often: nothing was fused, skipped or doubled
        assert eager[2] == graph[2]
        assert len(eager[2]) >= 8
    assert torch._dynamo.utils.counters["stats"]["calls_captured"] > 10, "nothing was compiled"
