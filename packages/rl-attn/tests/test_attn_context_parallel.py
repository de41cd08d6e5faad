"""Context parallel: outputs, LSE and all three gradients have the bits of one rank."""

import subprocess
import sys
import textwrap

import pytest
import torch

import rl_attn
from rl_contract import ContractError

LENGTHS = [8, 1104, 0, 64]


def inputs(dtype, lengths=LENGTHS, seed=0):
    g = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    q, k, v, grad = (torch.randn(tokens, h, 32, generator=g) for h in (4, 2, 2, 4))
    v[::2] *= -100
    return [x.to(dtype) for x in (q, k, v, grad)], torch.tensor([0, *lengths]).cumsum(0).int()


def one_rank(q, k, v, grad, cu):
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = rl_attn.attention_packed(*leaves, cu_seqlens_q=cu, cu_seqlens_k=cu, scale=0.2, return_lse=True)
    out.backward(grad)
    return [out.detach(), lse, *(x.grad for x in leaves)]


def on_rank(comm, q, k, v, grad, cu, layout):
    leaves = [rl_attn.cp_split(x, cu, comm.rank, comm.world_size, layout).requires_grad_() for x in (q, k, v)]
    out, lse = rl_attn.context_parallel_attention(
        *leaves, cu_seqlens=cu, layout=layout, comm=comm, scale=0.2, return_lse=True
    )
    out.backward(rl_attn.cp_split(grad, cu, comm.rank, comm.world_size, layout))
    return [out.detach(), lse, *(x.grad for x in leaves)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_layout_context_parallel_equals_one_rank(lab, world, layout, dtype):
    tensors, cu = inputs(dtype)
    whole = one_rank(*tensors, cu)
    ranks = lab.run_ranks(world, lambda comm: on_rank(comm, *tensors, cu, layout))
    for n, expected in enumerate(whole):
        assert torch.equal(rl_attn.cp_merge([r[n] for r in ranks], cu, layout), expected)
    # a rank ran its own rows only, and the row with all 1104 keys folded two segments
    assert max(lab.folded_segments()) == 2


def test_no_rank_is_an_early_rank(lab):
    tensors, cu = inputs(torch.bfloat16)
    q, k, v, _ = tensors
    out = rl_attn.context_parallel_attention(q, k, v, cu_seqlens=cu, comm=None, scale=0.2)
    assert torch.equal(out, rl_attn.attention_packed(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, scale=0.2))


@pytest.mark.field_report("R34", "R86")
@pytest.mark.parametrize("world", [2, 4])
def test_padding_behind_a_sequence_changes_no_real_row(lab, world):
    real = [13, 601]
    padded = [16, 608]
    tensors, cu_real = inputs(torch.float32, real)
    expected = one_rank(*tensors, cu_real)
    cu = torch.tensor([0, *padded]).cumsum(0)
    keep = torch.cat([torch.arange(int(b), int(b) + n) for b, n in zip(cu, real)])
    junk, _ = inputs(torch.float32, padded, seed=5)
    junk[3].zero_()
    for j, x in zip(junk, tensors):
        j[keep] = x
    ranks = lab.run_ranks(world, lambda comm: on_rank(comm, *junk, cu, "zigzag"))
    for n, x in enumerate(expected):
        assert torch.equal(rl_attn.cp_merge([r[n] for r in ranks], cu)[keep], x)


def test_zigzag_positions_are_megatrons():
    cu = torch.tensor([0, 8, 24])
    assert rl_attn.cp_positions(cu, 0, 2).tolist() == [0, 1, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15]
    assert rl_attn.cp_positions(cu, 1, 2).tolist() == [2, 3, 4, 5, 4, 5, 6, 7, 8, 9, 10, 11]
    assert rl_attn.cp_rows(cu, 1, 2, "contiguous").tolist() == [4, 5, 6, 7, *range(16, 24)]


@pytest.mark.parametrize(("world", "layout"), [(1, "zigzag"), (2, "zigzag"), (4, "contiguous")])
def test_split_and_merge_are_inverse(world, layout):
    cu = torch.tensor([0, 16, 16, 48])
    x = torch.randn(48, 3)
    parts = [rl_attn.cp_split(x, cu, r, world, layout) for r in range(world)]
    assert torch.equal(rl_attn.cp_merge(parts, cu, layout), x)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.tensor([0, 6]), 0, 2, "zigzag"), "divisible by 4"),
        ((torch.tensor([0, 5]), 0, 2, "contiguous"), "divisible by 2"),
        ((torch.tensor([0, 8]), 2, 2, "zigzag"), "rank 2 of 2"),
        ((torch.tensor([0, 8]), 0, 2, "ring"), "'ring'"),
    ],
)
def test_bad_split_is_refused(arguments, message):
    with pytest.raises(ContractError, match=message):
        rl_attn.cp_rows(*arguments)


def test_rows_of_another_split_are_refused(lab):
    (q, k, v, _), cu = inputs(torch.bfloat16)
    with pytest.raises(ContractError, match="588"):
        lab.run_ranks(2, lambda comm: rl_attn.context_parallel_attention(q, k, v, cu_seqlens=cu, comm=comm, scale=0.2))


def test_variants_are_refused_on_one_rank_and_on_two(lab):
    (q, k, v, _), cu = inputs(torch.bfloat16)
    for world in (1, 2):
        with pytest.raises(ContractError, match="sliding_window"):
            lab.run_ranks(
                world,
                lambda comm: rl_attn.context_parallel_attention(
                    *(rl_attn.cp_split(x, cu, comm.rank, comm.world_size) for x in (q, k, v)),
                    cu_seqlens=cu,
                    comm=comm,
                    scale=0.2,
                    sliding_window=128,
                ),
            )


def test_two_processes_over_gloo_equal_one_rank(tmp_path):
    program = tmp_path / "rank.py"
    program.write_text(
        textwrap.dedent(
            """
            import sys
            import torch
            import torch.distributed as dist
            import rl_attn

            rank, folder = int(sys.argv[1]), sys.argv[2]
            dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)

            class Ranks:
                world_size = 2

                def __init__(self):
                    self.rank = rank

                def all_gather(self, x, *, dim=0):
                    parts = [torch.empty_like(x) for _ in range(2)]
                    dist.all_gather(parts, x)
                    return torch.cat(parts, dim)

            data = torch.load(f"{folder}/in.pt")
            cu = data["cu"]
            leaves = [rl_attn.cp_split(data[n], cu, rank, 2).requires_grad_() for n in "qkv"]
            out, lse = rl_attn.context_parallel_attention(
                *leaves, cu_seqlens=cu, comm=Ranks(), scale=0.2, return_lse=True
            )
            out.backward(rl_attn.cp_split(data["g"], cu, rank, 2))
            torch.save([out.detach(), lse, *(x.grad for x in leaves)], f"{folder}/out{rank}.pt")
            dist.destroy_process_group()
            """
        )
    )
    (q, k, v, grad), cu = inputs(torch.bfloat16)
    torch.save({"q": q, "k": k, "v": v, "g": grad, "cu": cu}, tmp_path / "in.pt")
    ranks = [subprocess.Popen([sys.executable, str(program), str(r), str(tmp_path)]) for r in range(2)]
    try:
        assert [p.wait(timeout=120) for p in ranks] == [0, 0]
    finally:
        for p in ranks:
            p.kill()
    results = [torch.load(tmp_path / f"out{r}.pt") for r in range(2)]
    for n, expected in enumerate(one_rank(q, k, v, grad, cu)):
        assert torch.equal(rl_attn.cp_merge([r[n] for r in results], cu), expected)


def test_library_family_over_ranks_is_refused_by_name(lab):
    tensors, cu = inputs(torch.bfloat16)

    def call(comm):
        rows = [rl_attn.cp_split(x, cu, comm.rank, comm.world_size, "zigzag") for x in tensors[:3]]
        with pytest.raises(ContractError, match="'nosplit' over 2 ranks"):
            rl_attn.context_parallel_attention(*rows, cu_seqlens=cu, comm=comm, scale=0.2, family="nosplit")
        return True

    assert lab.run_ranks(2, call) == [True, True]
    with pytest.raises(ContractError, match="family='ring'"):
        rl_attn.context_parallel_attention(*tensors[:3], cu_seqlens=cu, comm=None, scale=0.2, family="ring")


@pytest.mark.parametrize("comm", ["x", 0, 2])
def test_peers_of_another_kind_are_refused(comm):
    tensors, cu = inputs(torch.bfloat16)
    with pytest.raises(ContractError, match=f"comm={comm!r}; supported: None"):
        rl_attn.context_parallel_attention(*tensors[:3], cu_seqlens=cu, comm=comm, scale=0.2)
