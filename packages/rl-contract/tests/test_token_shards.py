"""Rows spread over ranks come back in packed order; each rank computes its share of a gradient over all of them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import rl_contract.shares
from rl_contract import ContractError, SingleRank, TokenShards
from rl_contract.shares import LaterShares
from rl_contract.testing import on_ranks


def spread(tokens: int, world: int, seed: int, padding: int) -> list[torch.Tensor]:
    """Places of ``tokens`` on ``world`` ranks in any order, with some padding rows among them."""
    generator = torch.Generator().manual_seed(seed)
    places = torch.cat((torch.arange(tokens), torch.full((padding,), -1)))
    owner = torch.randint(0, world, (len(places),), generator=generator)
    return [part[torch.randperm(len(part), generator=generator)] for part in (places[owner == r] for r in range(world))]


@given(
    tokens=st.integers(0, 40),
    world=st.sampled_from((2, 4)),
    seed=st.integers(0, 999),
    padding=st.integers(0, 5),
    size=st.integers(1, 9),
)
def test_layout_any_spread_gives_packed_order_and_every_row_of_the_gradient(tokens, world, seed, padding, size):
    places = spread(tokens, world, seed, padding)
    x = torch.randn(tokens, 3, generator=torch.Generator().manual_seed(seed))
    dy = torch.randn(tokens, size, generator=torch.Generator().manual_seed(seed + 1))
    whole = torch.stack([(dy[:, n, None] * x).double().sum(0).float() for n in range(size)])

    def rank(comm):
        shards = TokenShards(comm, places)
        mine = places[comm.rank]
        # padding holds NaN: it may reach nothing
        rows = torch.where(mine[:, None] >= 0, x[mine] if tokens else torch.zeros(len(mine), 3), torch.nan)
        every = shards.gather(rows)
        grad = shards.weight_grad(
            size,
            lambda first, last: torch.stack(
                [(dy[:, n, None] * every).double().sum(0).float() for n in range(first, last)]
            ),
        )
        grown = torch.arange(3.0 * size).view(size, 3)
        shards.add_weight_grad(grown, lambda part, first, last: part.add_(whole[first:last]))
        return every, grad, grown

    for every, grad, grown in on_ranks(world, rank):
        assert torch.equal(every, x)
        assert torch.equal(grad, whole)
        assert torch.equal(grown, torch.arange(3.0 * size).view(size, 3) + whole)


@pytest.mark.parametrize("places", [[[0, 1], [1, 2]], [[0], [2]], [[0, 1]], [[0], [1], [2]]])
def test_places_that_are_not_each_token_once_are_refused(places):
    with pytest.raises(ContractError, match="TokenShards got"):
        on_ranks(2, lambda comm: TokenShards(comm, [torch.tensor(p) for p in places]))


@pytest.mark.parametrize(
    "places", [None, 3, "ab", [0, 1], [[0], [1]], [torch.tensor([0.0]), torch.tensor([1.0])], [torch.tensor([[0]])] * 2]
)
def test_what_is_no_list_of_places_is_refused_by_name(places):
    with pytest.raises(ContractError, match=r"TokenShards got places.*supported: for each rank a tensor int64"):
        TokenShards(SingleRank(), places)
    for comm in (None, "gloo", object()):
        with pytest.raises(ContractError, match="TokenShards got comm="):
            TokenShards(comm, [torch.tensor([0])])


def test_another_number_of_rows_is_refused():
    def rank(comm):
        shards = TokenShards(comm, [torch.tensor([0, 2]), torch.tensor([1])])
        return shards.gather(torch.zeros(2, 4)) if comm.rank else None

    with pytest.raises(ContractError, match="got 2 rows on rank 1, which holds 1"):
        on_ranks(2, rank)


def test_several_tensors_come_by_one_call_where_the_communicator_has_one():
    places = [torch.tensor([0, 3]), torch.tensor([-1, 2, 1])]
    x, ids = torch.arange(8.0).view(4, 2), torch.arange(4)

    class Each:
        def __init__(self, comm):
            self.rank, self.world_size, self.all_gather, self.calls = comm.rank, comm.world_size, comm.all_gather, []

        def all_gather_each(self, tensors):
            self.calls.append(len(tensors))
            return [self.all_gather(t, dim=0) for t in tensors]

    def rank(comm):
        each, found = Each(comm), []
        for peers in (comm, each):
            shards, mine = TokenShards(peers, places), places[comm.rank]
            found.append(shards.gather_each(x[mine], ids[mine].bfloat16()))
        return found, each.calls

    for found, calls in on_ranks(2, rank):
        assert all(torch.equal(a, x) and torch.equal(b, ids.bfloat16()) for a, b in found)
        assert calls == [2]


class Into:
    """A communicator that fills peers' parts where they lie."""

    def __init__(self, comm):
        self.rank, self.world_size, self.all_gather, self.filled = comm.rank, comm.world_size, comm.all_gather, 0

    def all_gather_into(self, wholes):
        self.filled += len(wholes)
        for whole in wholes:
            assert whole.is_contiguous()
            whole.copy_(self.all_gather(whole.chunk(self.world_size)[self.rank], dim=0))


@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize("most", [1, 40, 1 << 26])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_layout_shares_that_wait_are_whole_after_they_are_settled(monkeypatch, world, most, into):
    """Sizes that ranks do not divide, several additions, and one that every rank makes to all rows meanwhile."""
    monkeypatch.setattr(rl_contract.shares, "MOST_ELEMENTS", most)
    g = torch.Generator().manual_seed(0)
    begun = [torch.randn(size, width, generator=g) for size, width in ((8, 3), (5, 7), (1, 2), (9, 1))]
    grown = [[torch.randn(x.shape, generator=g) for _ in range(3)] for x in begun]
    whole = [x + a + b + c for x, (a, b, c) in zip(begun, grown)]
    places = [torch.arange(4 * r, 4 * r + 4) for r in range(world)]

    def rank(comm):
        comm = Into(comm) if into else comm
        later, totals = LaterShares(comm), [x.clone() for x in begun]
        shards = TokenShards(comm, places, later=later)
        for number in range(3):
            for total, adds in zip(totals, grown):
                if number == 1:
                    total.add_(adds[1])
                else:
                    shards.add_weight_grad(total, lambda part, a, b, adds=adds, n=number: part.add_(adds[n][a:b]))
        later.settle()
        found = [total.clone() for total in totals]
        assert not into or comm.filled == sum(len(total) % world == 0 for total in totals)
        # forgotten ones are left alone
        shards.add_weight_grad(totals[0], lambda part, a, b: part.add_(comm.rank + 1.0))
        later.clear()
        later.settle()
        return found, totals[0]

    for r, (found, left) in enumerate(on_ranks(world, rank)):
        assert all(torch.equal(a, b) for a, b in zip(found, whole))
        if world > 1:
            assert torch.equal(left[8 // world * r :][: 8 // world], whole[0][8 // world * r :][: 8 // world] + r + 1.0)
            assert not torch.equal(left, whole[0] + 1.0)


@pytest.mark.parametrize("most", [1, 200, 1 << 29])
def test_layout_gradients_that_wait_for_tokens_are_added_in_order_by_few_calls(monkeypatch, most):
    """Two batches, of which one rank holds fewer rows; each weight's additions stay in the order of its backwards."""
    monkeypatch.setattr(rl_contract.shares, "MOST_BYTES", most)
    g = torch.Generator().manual_seed(0)
    batches = [[torch.tensor([0, 3]), torch.tensor([-1, 2, 1])], [torch.tensor([1, -1, 0]), torch.tensor([2])]]

    def add(grad, part):
        grad.add_(part)

    rows = [[torch.randn(4, 5, generator=g) * 1e4, torch.randn(4, 2, generator=g).bfloat16()] for _ in batches]

    def rank(comm):
        comm.calls = 0
        gather, grads = comm.all_gather, [torch.full((5, 2), 0.1), torch.full((2,), 0.3)]

        def counted(x, dim):
            comm.calls += 1
            return gather(x, dim=dim)

        comm.all_gather = counted
        later = LaterShares(comm)
        for places, (x, y) in zip(batches, rows):
            shards, mine = TokenShards(comm, places, later=later), places[comm.rank]
            shards.with_all((x[mine], y[mine]), lambda x, y: add(grads[0], x.t() @ y.float()))
            shards.with_all((y[mine],), lambda y: add(grads[1], y.float().sum(0)))
        before = comm.calls
        later.settle()
        return grads, before

    want = [torch.full((5, 2), 0.1), torch.full((2,), 0.3)]
    for places, (x, y) in zip(batches, rows):
        whole = max(int(p.max()) for p in places) + 1
        want[0].add_(x[:whole].t() @ y[:whole].float())
        want[1].add_(y[:whole].float().sum(0))
    for grads, before in on_ranks(2, rank):
        assert all(torch.equal(a, b) for a, b in zip(grads, want))
        assert before == {1: 6, 200: 5, 1 << 29: 0}[most]


def test_a_gradient_that_nobody_takes_is_named():
    later = LaterShares(SingleRank())
    TokenShards(SingleRank(), [torch.arange(2)], later=later).with_all((torch.ones(2, 1),), lambda x: x)
    with pytest.raises(ContractError, match="has none now; keep it until the optimizer's step"):
        later.settle()


@pytest.mark.parametrize("most", [1, 1 << 29])
def test_gradients_of_which_some_were_lost_are_refused_until_they_are_cleared(monkeypatch, most):
    """A job that fails, in a backward or when they are settled, takes those behind it along."""
    monkeypatch.setattr(rl_contract.shares, "MOST_BYTES", most)
    whole = torch.arange(8.0).view(4, 2)

    def fail(x):
        raise ValueError("boom")

    def rank(comm):
        later, total = LaterShares(comm), torch.zeros(4, 2)
        shards = TokenShards(comm, [torch.arange(2) + 2 * r for r in range(2)], later=later)
        rows = torch.ones(2, 1)

        def grow(x):
            shards.add_weight_grad(total, lambda part, first, last: part.add_(x.sum() / 4 * whole[first:last]))

        def both():
            shards.with_all((rows,), fail)
            shards.with_all((rows,), grow)
            later.settle()

        with pytest.raises(ValueError, match="boom"):
            both()
        for again in (later.settle, lambda: shards.with_all((rows,), grow)):
            with pytest.raises(ContractError, match=r"lost .*ValueError: boom.*zero_grad"):
                again()
        later.clear()
        total.zero_()
        shards.with_all((rows,), grow)
        later.settle()
        return total

    assert all(torch.equal(total, whole) for total in on_ranks(2, rank))


def test_what_waits_for_a_gather_may_not_be_written_to():
    class Alone:
        rank, world_size = 0, 1

        def all_gather(self, x, dim):
            return x.clone()

    for write in (False, True):
        later, found = LaterShares(Alone()), []
        x = torch.ones(3)
        later.defer([x], torch.tensor([2, 0, 1]), found.append)
        if write:
            x[1:].mul_(5)
            with pytest.raises(ContractError, match="was written to"):
                later.settle()
            assert not found
        else:
            later.settle()
            assert torch.equal(found[0], torch.ones(3))
