"""32768 tokens: a few rows of one long sequence, on every path, without computing the others."""

import pytest
import torch

import rl_attn
from rl_attn import segments_of

LENGTH, HEADS, HEAD_DIM, PAGE = 32768, 2, 16, 128
# around page, tile and segment borders, and the last ones
ROWS = torch.tensor([0, 127, 128, 1023, 1024, 4095, 16384, 32639, 32640, 32703, 32704, 32766, 32767])


@pytest.fixture(scope="module")
def long():
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(LENGTH, h, HEAD_DIM, generator=g) for h in (HEADS, 1, 1))
    v[::2] *= -1e3
    return (3 * q).bfloat16(), k.bfloat16(), v.bfloat16(), HEAD_DIM**-0.5


def packed_rows(q, k, v, scale):
    """The rows as a trainer computes them: one packed sequence, absolute positions."""
    return rl_attn.attention_packed(
        q[ROWS], k, v, cu_seqlens_q=torch.tensor([0, len(ROWS)]), cu_seqlens_k=torch.tensor([0, LENGTH]),
        positions=ROWS, scale=scale, return_lse=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def packed(long):
    return packed_rows(*long)


def paged(long, spans, seed=0):
    """Queries ``first..last-1`` of every span, each a request of its own over the same shuffled pages."""
    q, k, v, scale = long
    pages = LENGTH // PAGE
    cache = rl_attn.PagedKV.from_vllm_cpu(
        torch.full((pages, 1, PAGE, 2 * HEAD_DIM), torch.nan, dtype=q.dtype), num_kv_heads=1, head_dim=HEAD_DIM
    )
    table = torch.randperm(pages, generator=torch.Generator().manual_seed(seed)).int()
    at = torch.arange(LENGTH)
    rl_attn.write_paged(cache, k, v, table[at // PAGE].long() * PAGE + at % PAGE)
    return rl_attn.attention_paged(
        torch.cat([q[a:b] for a, b in spans]),
        cache,
        query_start_loc=torch.tensor([0, *(b - a for a, b in spans)]).cumsum(0),
        seq_lens=torch.tensor([b for _, b in spans]),
        block_table=table.expand(len(spans), -1),
        scale=scale,
        return_lse=True,
    )


def same(a, b):
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


@pytest.mark.field_report("R26", "R87")
def test_phase_decode_at_32768_equals_packed(lab, long, packed):
    out, lse = paged(long, [(int(r), int(r) + 1) for r in ROWS])
    assert same(out, packed[0])
    assert same(lse, packed[1])
    assert max(lab.folded_segments()) == segments_of(LENGTH) == 32


@pytest.mark.field_report("R87")
@pytest.mark.parametrize("chunk", [7, 64])
def test_phase_last_chunk_at_32768_equals_packed(lab, long, packed, chunk):
    out, lse = paged(long, [(LENGTH - chunk, LENGTH), (32704 - chunk + 1, 32705)], seed=chunk)
    for row, at in ((chunk - 1, 12), (chunk - 2, 11), (2 * chunk - 1, 10)):
        assert same(out[row], packed[0][at])
        assert same(lse[row], packed[1][at])
    assert max(lab.folded_segments()) == 32


@pytest.mark.field_report("R87")
def test_accuracy_at_32768_against_fp64(long):
    q, k, v = (x.float() for x in long[:3])
    out, lse = packed_rows(q, k, v, long[3])
    scores = torch.einsum("ihd,jd->hij", q[ROWS].double(), k[:, 0].double()) * long[3]
    scores.masked_fill_(torch.arange(LENGTH) > ROWS[:, None], -torch.inf)
    weights = scores.softmax(-1)
    exact, size = (torch.einsum("hij,jd->ihd", weights, x[:, 0].double()) for x in (v, v.abs()))
    # by position, so that an error that grows with it would show
    assert ((out.double() - exact).abs() / size).amax((1, 2)).max() < 1e-5
    assert (lse.double() - scores.logsumexp(-1).T).abs().amax(1).max() < 1e-5


def test_one_segment_moved_at_32768_is_noticed(long, packed):
    """A key that slips out of the last of 32 segments changes the last row."""
    q, k, v, scale = long
    out = rl_attn.attention_packed(
        q[-1:], k[1:], v[1:], cu_seqlens_q=torch.tensor([0, 1]), cu_seqlens_k=torch.tensor([0, LENGTH - 1]), scale=scale
    )
    assert not same(out[0], packed[0][-1])
