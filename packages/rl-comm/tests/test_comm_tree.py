"""The tree on one process: order, rounding, refusals. No process group is made here."""

import re

import numpy as np
import pytest
import torch

from rl_comm import TreeCommunicator, copy_to_ranks, gather_from_ranks, reduce_from_ranks, tree_sum
from rl_comm.contract import collective
from rl_contract import ContractError, MissingSupport, Settings, SingleRank

ROPE = {"theta": 1e4, "rotary_dim": 16}


def settings(**changes):
    return Settings(**{"hidden_size": 64, "vocab_size": 100, "norm_eps": 1e-6, "rope": ROPE, **changes})


def cancelling(world, n, seed=0):
    """Partials whose sum is far smaller than they are, so that order shows in nearly every element."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(world, n, generator=g)
    return torch.cat((x[: world // 2] * 1e3, -x[: world // 2] * 1e3 + torch.randn(world // 2, n, generator=g)))


def spelled_out(x):
    match len(x):
        case 1:
            return x[0]
        case 2:
            return x[0] + x[1]
        case 4:
            return (x[0] + x[1]) + (x[2] + x[3])
        case 8:
            return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]))


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_tree_is_the_balanced_tree(world):
    x = torch.randn(world, 1 << 20)
    assert torch.equal(tree_sum(x).view(torch.int32), spelled_out(x).view(torch.int32))


@pytest.mark.parametrize("world", [2, 4])
def test_layout_subtree_roots_join_to_the_same_bits(world):
    leaves = cancelling(8, 1 << 20)
    roots = [tree_sum(part) for part in leaves.chunk(world)]
    assert torch.equal(tree_sum(roots), tree_sum(leaves))


@pytest.mark.field_report("R38")
@pytest.mark.parametrize("world", [4, 8])
def test_misordered_sums_are_noticed(world):
    x = cancelling(world, 4096)
    want = tree_sum(x)
    own_first = torch.stack([sum_in_order(x.roll(-r, 0)) for r in range(world)])
    ring = torch.cat([sum_in_order(part.roll(-i, 0)) for i, part in enumerate(x.chunk(world, 1))])
    assert not torch.equal(own_first[0], own_first[1])
    assert not torch.equal(sum_in_order(x), want)
    assert not torch.equal(ring, want)


@pytest.mark.field_report("R38")
@pytest.mark.parametrize("world", [2, 4, 8])
def test_bf16_per_hop_is_noticed(world):
    x = torch.randn(world, 4096)
    per_hop = x[0].bfloat16()
    for part in x[1:]:
        per_hop = (per_hop.float() + part.bfloat16().float()).bfloat16()
    assert not torch.equal(per_hop, tree_sum(x, torch.bfloat16))


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (torch.ones(3, 4), r"3 parts, supported: \(1, 2, 4, 8\)"),
        ([torch.ones(4)] * 16, "16 parts"),
        ([], "0 parts"),
        (torch.tensor(1.0), "0 parts"),
        ([torch.ones(4).bfloat16()] * 2, r"a partial of torch\.bfloat16"),
        ([torch.ones(4), None], "a NoneType, supported: a dense"),
        ([torch.ones(4), torch.ones(1)], r"parts \['\(4,\) on cpu', '\(1,\) on cpu'\], supported: one shape"),
        (None, "a NoneType, supported: a list"),
    ],
)
def test_what_the_tree_does_not_sum_is_refused(parts, words):
    with pytest.raises(ContractError, match=f"tree_sum got {words}"):
        tree_sum(parts)


@pytest.mark.parametrize("given", ["float32", np.float32, np.dtype("float32"), "", 0, torch.int32, torch.float64])
def test_a_sum_is_rounded_to_no_type_but_those_of_models(given):
    said = str(given) if isinstance(given, torch.dtype) else f"{given!r} (a {type(given).__name__})"
    words = f"out_dtype={said}, supported: torch.float32, torch.bfloat16, torch.float16; "
    words += "pass torch.float32" if "float32" in str(given) else ""
    for call in (tree_sum, SingleRank().all_reduce, SingleRank().reduce_scatter):
        with pytest.raises(ContractError, match=re.escape(words)):
            call(torch.ones(2, 4), out_dtype=given)


def sum_in_order(x):
    total = x[0].clone()
    for part in x[1:]:
        total = total + part
    return total


@pytest.mark.field_report("R40")
def test_r40_bf16_partials_lose_the_match_with_one_rank():
    """Row-parallel layer of K=4096 whose partials are rounded to bf16: 63, 51 and 44 % of outputs equal one rank's."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(16, 4096, generator=g).bfloat16().float()
    w = torch.randn(512, 4096, generator=g).bfloat16().float()
    one = (x.double() @ w.double().T).float().bfloat16()
    for world, want in ((2, 0.63), (4, 0.51), (8, 0.44)):
        pairs = zip(x.double().chunk(world, 1), w.double().chunk(world, 1))
        parts = torch.stack([(a @ b.T).float() for a, b in pairs])
        hops = parts[0].bfloat16()
        for part in parts[1:]:
            hops = hops + part.bfloat16()
        assert abs(float((hops == one).float().mean()) - want) < 0.05
        assert float((tree_sum(parts, torch.bfloat16) == one).float().mean()) > 0.999


def test_contract_states_dtype_and_refuses_more_leaves_than_ranks():
    assert collective(settings()).precision["output"] == "bfloat16"
    assert collective(settings()).fingerprint != collective(settings(dtype="float32")).fingerprint
    with pytest.raises(ContractError, match="leaves=16, supported"):
        collective(settings(leaves=16))


def test_without_a_process_group_the_refusal_names_the_remedy():
    with pytest.raises(MissingSupport, match="init_process_group"):
        TreeCommunicator()


@pytest.mark.parametrize("comm", [None, SingleRank()])
def test_one_rank_wrappers_are_the_identity(comm):
    x = torch.randn(3, 4, requires_grad=True)
    assert copy_to_ranks(x, comm) is x
    assert gather_from_ranks(x, comm, 0) is x


@pytest.mark.parametrize("comm", ["c", 5, object()])
@pytest.mark.parametrize("wrapper", [copy_to_ranks, gather_from_ranks, reduce_from_ranks])
def test_what_is_no_communicator_is_refused_by_name(wrapper, comm):
    with pytest.raises(
        ContractError, match=rf"{wrapper.__name__} got comm=.*; supported: None for one rank, or a Comm"
    ):
        wrapper(torch.ones(3), comm)
