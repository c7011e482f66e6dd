"""The operators against torch on the tensors of all ranks, and their transposed operators against inner products."""

import pytest
import torch

from commengine import CartesianGrid, CollectiveMismatch, Communicator, Decomposition
from tests.support.adjoints import (
    assert_differentiates_twice,
    assert_dot_product,
    assert_gradients,
    random,
)
from tplayers.movement.halo import shift
from tplayers.movement.operators import (
    all_gather,
    all_reduce,
    all_to_all,
    all_to_all_v,
    broadcast,
    gather,
    reduce_scatter,
    repartition,
    scatter,
    sum_reduce,
)

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.every_size]
by_dtype = pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)


def check_gradients(operator, shape, group, dtype, **options):
    """Gradcheck in float64. Complex numbers take the same way: see the inner products and `test_all_reduce`."""
    if dtype == torch.float64:
        assert_gradients(operator, shape, group, **options)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-14, atol=1e-14)


def uneven(size, dtype, rank=None):
    """Every rank's part [2, 1 + rank % 3 ..., 3]; rank 1 has none of 4."""
    return [random((2, (3, 0, 1, 2)[r], 3) if size == 4 else (2, 1 + r % 2, 3), dtype, r) for r in range(size)]


@by_dtype
def test_broadcast_and_sum_reduce(groups, dtype):
    for group in groups:
        parts = [random((3, 2), dtype, rank) for rank in range(group.size)]
        for root in {0, group.size - 1}:
            mine = parts[root] if group.rank == root else None
            out = assert_dot_product(lambda x, g=group, r=root: broadcast(x, g, r), mine, group)
            assert torch.equal(out, parts[root])
            total = assert_dot_product(lambda x, g=group, r=root: sum_reduce(x, g, r), parts[group.rank], group)
            if group.rank == root:
                close(total, sum(parts))
            else:
                assert total.shape == (0,)
            check_gradients(
                lambda x, g=group, r=root: broadcast(x, g, r), (3, 2), group, dtype, has_input=group.rank == root
            )
            check_gradients(lambda x, g=group, r=root: sum_reduce(x, g, r), (3, 2), group, dtype)
            assert_differentiates_twice(lambda x, g=group, r=root: sum_reduce(x, g, r), (3, 2), group, dtype)


@by_dtype
def test_all_reduce(groups, dtype):
    for group in groups:
        parts = [random((3, 2), dtype, rank) for rank in range(group.size)]
        total = assert_dot_product(lambda x, g=group: all_reduce(x, g), parts[group.rank].T, group)
        close(total, sum(parts).T)
        assert_gradients(lambda x, g=group: all_reduce(x, g), (3, 2), group, dtype)
        assert_differentiates_twice(lambda x, g=group: all_reduce(x, g), (3, 2), group, dtype)


@by_dtype
@pytest.mark.parametrize("dim", [1, pytest.param(0, marks=pytest.mark.long), pytest.param(-1, marks=pytest.mark.long)])
def test_all_gather_and_reduce_scatter(groups, dtype, dim):
    for group in groups:
        for parts in ([random((2, 2, 3), dtype, rank) for rank in range(group.size)], uneven(group.size, dtype)):
            parts = [part.movedim(1, dim) for part in parts]
            sizes = [part.shape[dim] for part in parts]
            mine = parts[group.rank]
            whole = assert_dot_product(lambda x, g=group: all_gather(x, g, dim), mine, group)
            assert torch.equal(whole, torch.cat(parts, dim)) and whole.is_contiguous()
            terms = [random(whole.shape, dtype, 7 + rank) for rank in range(group.size)]

            def reduced(x, group=group, sizes=sizes):
                return reduce_scatter(x, group, dim, sizes)

            close(assert_dot_product(reduced, terms[group.rank], group), sum(terms).split(sizes, dim)[group.rank])
            check_gradients(lambda x, g=group: all_gather(x, g, dim), mine.shape, group, dtype)
            check_gradients(reduced, whole.shape, group, dtype)
            assert_differentiates_twice(lambda x, g=group: all_gather(x, g, dim), mine.shape, group, dtype)


@by_dtype
def test_reduce_scatter_cuts_as_numpy_does(groups, dtype):
    for group in groups:
        terms = [random((5, 2), dtype, rank) for rank in range(group.size)]
        mine = reduce_scatter(terms[group.rank], group)
        close(mine, torch.tensor_split(sum(terms), group.size)[group.rank])


@by_dtype
@pytest.mark.parametrize("dim", [pytest.param(0, marks=pytest.mark.long), -2])
def test_gather_and_scatter(groups, dtype, dim):
    for group in groups:
        parts = [part.movedim(1, dim) for part in uneven(group.size, dtype)]
        sizes = [part.shape[dim] for part in parts]
        whole = torch.cat(parts, dim)
        for root in {0, group.size - 1}:
            on_root = group.rank == root

            def gathered(x, group=group, root=root):
                return gather(x, group, root, dim)

            def scattered(x, group=group, root=root, sizes=sizes):
                return scatter(x, group, root, dim, sizes)

            out = assert_dot_product(gathered, parts[group.rank], group)
            assert torch.equal(out, whole) if on_root else (out.numel() == 0 and out.dim() == 3)
            out = assert_dot_product(scattered, whole if on_root else None, group)
            assert torch.equal(out, parts[group.rank])
            check_gradients(gathered, parts[group.rank].shape, group, dtype)
            check_gradients(scattered, whole.shape, group, dtype, has_input=on_root)
            assert_differentiates_twice(gathered, parts[group.rank].shape, group, dtype)
            even = scatter(whole if on_root else None, group, root, dim)
            assert torch.equal(even, torch.tensor_split(whole, group.size, dim)[group.rank])


@by_dtype
def test_all_to_all_v(groups, dtype):
    """Counts with zeros; a rank that sends nothing, and one that gets nothing."""
    for group in groups:
        n, me = group.size, group.rank
        for counts in (
            [[(rank + 2 * to) % 3 for to in range(n)] for rank in range(n)],
            [[(rank != 0) * (to != n - 1) * 2 for to in range(n)] for rank in range(n)],
        ):
            parts = [random((sum(mine), 3), dtype, rank) for rank, mine in enumerate(counts)]
            right = torch.cat([part.split(mine)[me] for part, mine in zip(parts, counts, strict=True)])

            def moved(x, group=group, mine=counts[me]):
                return all_to_all_v(x, group, mine)[0]

            assert all_to_all_v(parts[me], group, counts[me])[1] == tuple(mine[me] for mine in counts)
            assert torch.equal(assert_dot_product(moved, parts[me], group), right)
            check_gradients(moved, parts[me].shape, group, dtype)
            assert_differentiates_twice(moved, parts[me].shape, group, dtype)


@by_dtype
def test_all_to_all(groups, dtype):
    for group in groups:
        parts = uneven(group.size, dtype)
        whole = torch.cat(parts, 1)
        for split, sizes in ((0, None), (2, None), (2, [3] + [0] * (group.size - 1))):

            def exchanged(x, group=group, split=split, sizes=sizes):
                return all_to_all(x, group, split, 1, sizes)

            out = assert_dot_product(exchanged, parts[group.rank], group)
            cut = torch.tensor_split(whole, group.size, split) if sizes is None else whole.split(sizes, split)
            assert torch.equal(out, cut[group.rank])
            check_gradients(exchanged, parts[group.rank].shape, group, dtype)
            assert torch.equal(all_to_all(out, group, 1, split, [part.shape[1] for part in parts]), parts[group.rank])


@by_dtype
def test_repartition(groups, dtype):
    for group in groups:
        p = group.size
        field = random((2, 5, 2 * p + 1), dtype, 1)
        slabs, pencils = Decomposition.even((5, 2 * p + 1), (p, 1)), Decomposition.even((5, 2 * p + 1), (1, p))
        others = Decomposition(((5,), (2 * p + 1, *[0] * (p - 1))))
        square = [Decomposition.even((5, 2 * p + 1), (2, 2))] if p == 4 else []
        for source in (slabs, pencils, others, *square):
            for target in (slabs, pencils, others, *square):

                def moved(x, source=source, target=target, group=group):
                    return repartition(x, group, source, target)

                place = CartesianGrid(group, source.grid_shape).coords
                x = field[(..., *source.slices(place))]
                place = CartesianGrid(group, target.grid_shape).coords
                out = assert_dot_product(moved, x, group)
                assert torch.equal(out, field[(..., *target.slices(place))])
        check_gradients(
            lambda x, g=group, s=slabs, t=pencils: repartition(x, g, s, t),
            (1, *slabs.local_shape((group.rank, 0))),
            group,
            dtype,
        )


def test_one_rank_that_wants_a_gradient_makes_all_take_part(groups):
    """Without it the others would wait for ever in their backward, or it would."""
    for group in groups:
        x = torch.full((2,), 1.0 + group.rank, dtype=torch.float64, requires_grad=group.rank == 0)
        out = all_gather(x, group)
        assert out.requires_grad
        out.square().sum().backward()
        if group.rank == 0:
            assert x.grad.tolist() == [2.0 * group.size] * 2
        else:
            assert x.grad is None
        with torch.no_grad():
            assert not all_gather(x, group).requires_grad
        assert not broadcast(x.detach(), group).requires_grad


@pytest.mark.parametrize("name", ["all_reduce", "shift"])
def test_twice_where_a_loss_is_linear_on_some_ranks(groups, name):
    """The ranks' losses differ: linear on rank 0, cubic on the others. The second gradients are those of the whole."""
    for group in groups:
        whole = [random((3,), torch.float64, rank).requires_grad_() for rank in range(group.size)]
        x = whole[group.rank].detach().clone().requires_grad_()
        if name == "all_reduce":
            y, ys = all_reduce(x, group), [sum(whole)] * group.size
        else:
            ring = CartesianGrid(group, (group.size,), periodic=True)
            y, ys = shift(x, ring, 0), [whole[rank - 1] for rank in range(group.size)]
        losses = [one.sum() if rank == 0 else one.pow(3).sum() for rank, one in enumerate(ys)]
        firsts = torch.autograd.grad(sum(losses), whole, create_graph=True)
        loss = y.sum() if group.rank == 0 else y.pow(3).sum()
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        close(first, firsts[group.rank])
        seconds = torch.autograd.grad(sum(one.square().sum() for one in firsts) + 0 * sum(ys).sum(), whole)
        for again in (True, False):  # by grad, which runs only what leads to x, and by backward
            if again:
                (second,) = torch.autograd.grad(first.square().sum(), x, retain_graph=True)
            else:
                first.square().sum().backward()
                second = x.grad
            torch.testing.assert_close(second, seconds[group.rank], rtol=1e-12, atol=1e-12)


def test_a_chain_of_operators_is_a_program_on_the_whole(groups):
    """A halo-free stencil: each rank computes with its neighbour's block, and the root with the sum of all."""
    for group in groups:
        ring = CartesianGrid(group, (group.size,), periodic=True)
        whole = random((group.size, 4), torch.float64, 5).requires_grad_()
        weight = random((4,), torch.float64, 6).requires_grad_()
        expected = ((whole * weight).roll(1, 0) * whole).sum(0).square().sum()
        expected.backward()
        x = whole.detach()[group.rank].clone().requires_grad_()
        w = weight.detach().clone().requires_grad_() if group.rank == 0 else None
        y = shift(x * broadcast(w, group), ring, 0) * x
        total = sum_reduce(y, group)
        loss = total.square().sum()  # 0 on the ranks that are not the root
        loss.backward()
        close(x.grad, whole.grad[group.rank])
        if group.rank == 0:
            close(loss, expected)
            close(w.grad, weight.grad)


@pytest.mark.mpi(min_size=2)
def test_arguments_that_differ_between_ranks_are_an_error_on_every_rank(world):
    x, odd = torch.zeros(2, 2 * world.size), world.rank == 1
    one_more = [1 + odd, *[1] * (world.size - 2), 2 * world.size - (world.size - 1) - odd]
    for words, call in (
        ("broadcast.root=1", lambda: broadcast(x, world, root=int(odd))),
        ("sum_reduce.root=99", lambda: sum_reduce(x, world, root=99 * odd)),
        ("gather.root=0, dim=1", lambda: gather(x, world, dim=int(odd))),
        ("scatter.root=0, dim=1", lambda: scatter(x, world, dim=1, sizes=one_more)),
        ("all_gather.dim=1", lambda: all_gather(x, world, dim=int(odd))),
        ("reduce_scatter.dim=1, sizes=None", lambda: reduce_scatter(x, world, dim=1, sizes=one_more if odd else None)),
        ("all_to_all.split_dim=0", lambda: all_to_all(x, world, int(odd), 1 - odd)),
        ("all_reduce|sum_reduce.root=0", lambda: (sum_reduce if odd else all_reduce)(x, world)),
    ):
        with pytest.raises(CollectiveMismatch, match=words):
            call()


def test_bad_input_is_an_error_on_every_rank(world):
    last = world.rank == world.size - 1
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="broadcast: rank 0 gave no tensor"):
        broadcast(None, world)
    with pytest.raises(ValueError, match=f"all_reduce: rank {world.size - 1} gave no tensor .* complex128, complex64"):
        all_reduce(torch.zeros(2, dtype=torch.int32) if last else x, world)
    with pytest.raises(ValueError, match="root=9 is not a rank"):
        sum_reduce(x, world, root=9)
    with pytest.raises(ValueError, match=r"all_gather: a tensor of shape \[2, 3\] has no dimension 2"):
        all_gather(x, world, dim=2)
    with pytest.raises(ValueError, match=r"scatter: sizes=\[1, 1, 1.* must be"):
        scatter(x, world, sizes=[1] * (world.size + 2))
    with pytest.raises(ValueError, match="are the same dimension"):
        all_to_all(x, world, 0, -2)
    right = [2] + [0] * (world.size - 1)
    for wrong in ([3, *right[1:]], [float(one) for one in right], None, "11", [], [2] * (world.size + 1)):
        with pytest.raises(ValueError, match=rf"all_to_all_v: input_rows .*; rank {world.size - 1} gave"):
            all_to_all_v(x, world, wrong if last else right)
    assert all_to_all_v(x, world, iter(right))[1] == ((2,) * world.size if world.rank == 0 else (0,) * world.size)
    if world.size > 1:
        with pytest.raises(
            ValueError, match=r"all_reduce: the ranks' tensors must be alike; by rank they are \[2, 3\]"
        ):
            all_reduce(torch.zeros(3, 3) if last else x, world)
        with pytest.raises(ValueError, match=r"must be alike except in dimension 0; .* of torch\.float64"):
            all_gather(x.double() if last else x, world)
        with pytest.raises(ValueError, match="must be alike except in dimension 0"):
            gather(torch.zeros(2, 4) if last else x, world)
        assert all_gather(torch.zeros(5, 3) if last else x, world).shape == (2 * world.size + 3, 3)
    assert all_reduce(x + 1, world).eq(world.size).all()


@pytest.mark.mpi(min_size=2)
def test_lazily_conjugated_tensors(world):
    x = random((3,), torch.complex128, world.rank)
    with Communicator(world.mpi) as comm:
        assert torch.equal(all_gather(x.conj(), comm), all_gather(x, comm).conj().resolve_conj())
        assert torch.equal(all_reduce(x.conj().imag, comm), -all_reduce(x.imag, comm))
        leaf = x.clone().requires_grad_()
        (all_reduce(leaf, comm) * all_reduce(leaf, comm).conj()).real.sum().backward()
        close(leaf.grad, 2 * world.size * all_reduce(x, comm))
