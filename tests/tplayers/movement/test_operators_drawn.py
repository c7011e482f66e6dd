"""Every operator and region in drawn cases: its value and any derivative are torch's on the tensors of all ranks."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import tplayers
from commengine import CartesianGrid, Communicator, Decomposition
from tests.tplayers.conftest import draw

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.every_size]

Ranks = list[Tensor]
#: the grids of a number of ranks
GRIDS = {1: [(1,), (1, 1)], 2: [(2,), (1, 2)], 3: [(3,), (3, 1)], 4: [(4,), (2, 2), (1, 4)]}


@dataclass
class Case:
    """``ours`` of this rank's input is its output; ``theirs`` of all ranks' inputs is all outputs.

    shared: all ranks have the same input. joined: all have the same output, and compute one loss of it. region: the
    ranks compute one loss, of which each has a term if the outputs are not joined.
    """

    shapes: list[Sequence[int]]
    ours: Callable[[Tensor], Tensor]
    theirs: Callable[[Ranks], Ranks]
    shared: bool = False
    joined: bool = False
    region: bool = False


def pieces(rng: random.Random, parts: int, total: int) -> list[int]:
    """Sizes of at least 0 that add up to ``total``."""
    cuts = sorted(rng.randint(0, total) for _ in range(parts - 1))
    return [high - low for low, high in itertools.pairwise([0, *cuts, total])]


def parts_along(rng: random.Random, ranks: int) -> tuple[list[int], int, list[Sequence[int]]]:
    """A shape, a dimension, and the shapes of ranks that differ along it."""
    shape = [rng.randint(1, 3) for _ in range(rng.randint(1, 3))]
    dim = rng.randrange(len(shape))
    return shape, dim, [[*shape[:dim], rng.randint(0, 3), *shape[dim + 1 :]] for _ in range(ranks)]


def of_collective(name: str, rng: random.Random, comm: Communicator) -> Case:
    ranks, root = comm.size, rng.randrange(comm.size)
    shape, dim, uneven = parts_along(rng, ranks)
    at = rng.choice([dim, dim - len(shape)])
    same = [shape] * ranks
    on_root = [shape if rank == root else [0] for rank in range(ranks)]
    sizes = pieces(rng, ranks, shape[dim])

    def only_root(y: Tensor, nothing: Tensor) -> Ranks:
        return [y if rank == root else nothing for rank in range(ranks)]

    nothing = torch.empty([*shape[:dim], 0, *shape[dim + 1 :]], dtype=torch.float64)
    if name == "broadcast":
        return Case(on_root, lambda x: tplayers.broadcast(x, comm, root), lambda xs: [xs[root]] * ranks)
    if name == "sum_reduce":
        return Case(
            same, lambda x: tplayers.sum_reduce(x, comm, root), lambda xs: only_root(sum(xs), nothing.new_empty(0))
        )
    if name == "all_reduce":
        return Case(same, lambda x: tplayers.all_reduce(x, comm), lambda xs: [sum(xs)] * ranks)
    if name == "all_gather":
        return Case(uneven, lambda x: tplayers.all_gather(x, comm, at), lambda xs: [torch.cat(xs, dim)] * ranks)
    if name == "reduce_scatter":
        return Case(
            same, lambda x: tplayers.reduce_scatter(x, comm, at, sizes), lambda xs: list(sum(xs).split(sizes, dim))
        )
    if name == "gather":
        return Case(
            uneven, lambda x: tplayers.gather(x, comm, root, at), lambda xs: only_root(torch.cat(xs, dim), nothing)
        )
    if name == "scatter":
        return Case(
            on_root, lambda x: tplayers.scatter(x, comm, root, at, sizes), lambda xs: list(xs[root].split(sizes, dim))
        )
    if name == "all_to_all":
        shapes, split = [[*one[: dim + 1], 4, *one[dim + 1 :]] for one in uneven], dim + 1
        cut = pieces(rng, ranks, 4)
        return Case(
            shapes, lambda x: tplayers.all_to_all(x, comm, split, dim, cut),
            lambda xs: [torch.cat(come, dim) for come in zip(*(x.split(cut, split) for x in xs), strict=True)],
        )  # fmt: skip
    assert name == "all_to_all_v"
    counts = [[rng.choice([0, 1, 2]) for _ in range(ranks)] for _ in range(ranks)]
    return Case(
        [[sum(rows), *shape[1:]] for rows in counts],
        lambda x: tplayers.all_to_all_v(x, comm, counts[comm.rank])[0],
        lambda xs: [
            torch.cat(come) for come in zip(*(x.split(rows) for x, rows in zip(xs, counts, strict=True)), strict=True)
        ],
    )  # fmt: skip


def whole_of(blocks: Ranks, field: Decomposition) -> Tensor:
    """The field, of blocks in the order of the ranks; its axes are the last dimensions."""
    for axis in reversed(range(len(field.blocks))):
        each = field.grid_shape[axis]
        blocks = [torch.cat(blocks[n : n + each], axis - len(field.blocks)) for n in range(0, len(blocks), each)]
    return blocks[0]


def blocks_of(whole: Tensor, field: Decomposition) -> Ranks:
    blocks = [whole]
    for axis, sizes in enumerate(field.blocks):
        blocks = [part for one in blocks for part in one.split(sizes, axis - len(field.blocks))]
    return blocks


def strip(whole: Tensor, axis: int, low: int, high: int, padding: str) -> Tensor:
    """The points from ``low`` to before ``high``, which may lie beyond the borders."""
    n, points = whole.shape[axis], []
    for i in range(low, high):
        j = {"circular": i % n, "replicate": min(max(i, 0), n - 1), "reflect": min(abs(i), 2 * n - 2 - i)}.get(
            padding, i
        )
        points.append(whole.select(axis, j) if 0 <= j < n else torch.zeros_like(whole.select(axis, 0)))
    return torch.stack(points, axis)


def of_blocks(name: str, rng: random.Random, comm: Communicator) -> Case:
    shape = rng.choice(GRIDS[comm.size])
    axes = range(len(shape))
    grid = CartesianGrid(comm, shape, periodic=[rng.random() < 0.5 for _ in shape])
    field = Decomposition([[rng.randint(1, 4) for _ in range(p)] for p in shape])
    leading = [rng.randint(1, 2) for _ in range(rng.randint(0, 2))]
    every = [grid.coords_at(rank) for rank in range(comm.size)]
    shapes = [[*leading, *field.local_shape(at)] for at in every]
    if name in ("repartition", "transfer"):
        other = rng.choice([one for one in GRIDS[comm.size] if len(one) == len(shape)])
        into = Decomposition([pieces(rng, p, n) for p, n in zip(other, field.shape, strict=True)])

        def moved(x: Tensor) -> Tensor:
            if name == "repartition":
                return tplayers.repartition(x, comm, field, into)
            return tplayers.transfer(x, tplayers.repartition_plan(field, into, comm.rank), comm)

        return Case(shapes, moved, lambda xs: blocks_of(whole_of(xs, field), into))
    if name == "shift":
        axis, step = rng.choice(axes), rng.randint(-2, 2)

        def shifted(xs: Ranks) -> Ranks:
            found = []
            for rank, at in enumerate(every):
                source = at[axis] - step
                if not grid.periodic[axis] and not 0 <= source < shape[axis]:
                    found.append(torch.zeros_like(xs[rank]))
                else:
                    found.append(xs[every.index((*at[:axis], source % shape[axis], *at[axis + 1 :]))])
            return found

        return Case(shapes, lambda x: tplayers.shift(x, grid, axis, step, decomposition=field), shifted)
    if name in ("roll", "flip"):
        along = rng.sample(axes, rng.randint(0, len(axes)))
        shifts, dims = [rng.randint(-9, 9) for _ in along], [axis - len(axes) for axis in along]

        def moved_points(xs: Ranks) -> Ranks:
            whole = whole_of(xs, field)
            return blocks_of(whole.flip(dims) if name == "flip" else whole.roll(shifts, dims) if dims else whole, field)

        if name == "flip":
            return Case(shapes, lambda x: tplayers.flip(x, grid, along, decomposition=field), moved_points)
        return Case(shapes, lambda x: tplayers.roll(x, grid, shifts, along, decomposition=field), moved_points)
    padding = [rng.choice(["zeros", "circular", "reflect", "replicate"]) for _ in axes]
    most = [min(3, n - 1) for n in field.shape]
    widths = [(rng.randint(0, limit), rng.randint(0, limit)) for limit in most]

    def surrounded(xs: Ranks) -> Ranks:
        whole, found = whole_of(xs, field), []
        for at in every:
            block = whole
            for axis, place in enumerate(at):
                low = sum(field.blocks[axis][:place])
                high = low + field.blocks[axis][place]
                before, after = widths[axis]
                block = strip(block, axis - len(shape), low - before, high + after, padding[axis])
            found.append(block)
        return found

    options = {"decomposition": field, "padding": padding}
    if name == "halo_exchange":
        return Case(shapes, lambda x: tplayers.halo_exchange(x, grid, widths, **options), surrounded)
    wide = [[*leading, *(n + sum(pair) for n, pair in zip(field.local_shape(at), widths, strict=True))] for at in every]

    def accumulated(ys: Ranks) -> Ranks:
        blocks = [torch.zeros(one, dtype=torch.float64) for one in shapes]
        return list(torch.func.vjp(lambda *xs: tuple(surrounded(list(xs))), *blocks)[1](tuple(ys)))

    if name == "halo_accumulate":
        return Case(wide, lambda y: tplayers.halo_accumulate(y, grid, widths, **options), accumulated)
    plan = tplayers.plan_halo(grid, field, widths, padding)
    return Case(wide, lambda y: tplayers.transfer_adjoint(y, plan, comm), accumulated)


def of_region(name: str, rng: random.Random, comm: Communicator) -> Case:
    ranks, function = comm.size, getattr(tplayers, name)
    shape = [rng.randint(1, 3) for _ in range(rng.randint(1, 3))]
    dim = rng.randrange(len(shape))
    wide = [*shape[:dim], ranks * shape[dim], *shape[dim + 1 :]]
    own, whole = [shape] * ranks, [wide] * ranks
    if name == "copy_to_tensor_parallel_region":
        return Case(own, lambda x: function(x, comm), list, shared=True, region=True)
    if name == "reduce_from_tensor_parallel_region":
        return Case(own, lambda x: function(x, comm), lambda xs: [sum(xs)] * ranks, joined=True, region=True)
    ours = partial(function, comm=comm, dim=dim)
    if name == "scatter_to_tensor_parallel_region":
        return Case(whole, ours, lambda xs: list(xs[0].chunk(ranks, dim)), shared=True, region=True)
    if name == "reduce_scatter_to_sequence_parallel_region":
        return Case(whole, ours, lambda xs: list(sum(xs).chunk(ranks, dim)), region=True)
    joined = name == "gather_from_tensor_parallel_region"
    return Case(own, ours, lambda xs: [torch.cat(xs, dim)] * ranks, joined=joined, region=True)


KINDS = {
    **dict.fromkeys(
        ["broadcast", "sum_reduce", "all_reduce", "all_gather", "reduce_scatter", "gather", "scatter", "all_to_all",
         "all_to_all_v"], of_collective,
    ),
    **dict.fromkeys(
        ["repartition", "transfer", "shift", "roll", "flip", "halo_exchange", "halo_accumulate", "transfer_adjoint"],
        of_blocks,
    ),
    **dict.fromkeys([name for name in vars(tplayers) if name.endswith("_parallel_region")], of_region),
}  # fmt: skip


def close(found: Tensor, expected: Tensor, about: str) -> None:
    limit = 1e-12 * max(1.0, float(expected.detach().abs().max())) if expected.numel() else 0.0
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=limit, msg=lambda said: f"{about}: {said}")


def laid_out(x: Tensor, rng: random.Random) -> Tensor:
    """``x`` with its dimensions in a drawn order in memory."""
    order = rng.sample(range(x.dim()), x.dim())
    return x.permute(order).contiguous().permute([order.index(dim) for dim in range(x.dim())])


class OneCase:
    """A loss of a case, its gradient, and what is computed from it: ours on this rank, and torch's of all ranks."""

    def __init__(self, case: Case, comm: Communicator, rng: random.Random) -> None:
        self.case, self.comm = case, comm
        # A region of one rank is nothing, and autograd refuses to differentiate the gradient of a linear loss of it.
        kinds = ["sine", "square", *["linear"] * (comm.size > 1 or not case.region)]
        self.kinds = [rng.choice(kinds) for _ in range(comm.size)]
        self.xs, self.ways = ([self._drawn(n, seed) for n in range(comm.size)] for seed in (0, 100))
        self.x, self.way = (laid_out(one[comm.rank], rng) for one in (self.xs, self.ways))

    def _drawn(self, rank: int, seed: int) -> Tensor:
        return draw(*self.case.shapes[rank], seed=seed + rank * (not self.case.shared))

    def of_all(self, term: Tensor, whole: bool) -> Tensor:
        """A number of all ranks, of which each has a term. The operators that are no regions add up losses alone."""
        return tplayers.reduce_from_tensor_parallel_region(term, self.comm) if self.case.region and not whole else term

    def term(self, y: Tensor, rank: int) -> Tensor:
        """A rank's loss; it may be linear, so that its gradient has no graph of its own."""
        rank = 0 if self.case.joined else rank
        kind = self.kinds[rank]
        return {"sine": torch.sin(y), "square": y.square(), "linear": y * (1 + rank)}[kind].sum()

    def loss(self, x: Tensor) -> Tensor:
        case = self.case
        return self.of_all(self.term(case.ours(x), self.comm.rank), case.joined)

    def loss_of_all(self, *xs: Tensor) -> Tensor:
        ys = self.theirs(xs)
        total = sum(self.term(y, rank) for rank, y in enumerate(ys))
        return total + sum(0 * x.square().sum() for x in xs)  # it may depend on none of them

    def theirs(self, xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """All outputs, of a tensor of each rank; of one for all, if it is shared. One, if it is joined."""
        ys = self.case.theirs(list(xs) * (self.comm.size if self.case.shared else 1))
        return tuple(ys[:1] if self.case.joined else ys)

    def mine(self, several: Sequence[Tensor], one: bool) -> Tensor:
        return several[0 if one else self.comm.rank]

    def check(self) -> None:
        case, loss = self.case, self.loss
        inputs = tuple(self.xs[: 1 if case.shared else None])
        ways = tuple(self.ways[: 1 if case.shared else None])
        y = case.ours(self.x)
        ys, tangents = torch.func.jvp(lambda *xs: self.theirs(xs), inputs, ways)
        cotangents = [draw(*one.shape, seed=200 + rank) for rank, one in enumerate(ys)]
        weights = self.mine(cotangents, case.joined)
        close(y, self.mine(ys, case.joined), "value")
        close(torch.func.jvp(case.ours, (self.x,), (self.way,))[1], self.mine(tangents, case.joined), "jvp")
        pulled = torch.func.vjp(lambda *xs: self.theirs(xs), *inputs)[1](tuple(cotangents))
        close(torch.func.vjp(case.ours, self.x)[1](weights)[0], self.mine(pulled, case.shared), "vjp")

        of_all = torch.func.grad(self.loss_of_all, tuple(range(len(inputs))))
        gradients, products = torch.func.jvp(of_all, inputs, ways)
        gradient, product = (self.mine(one, case.shared) for one in (gradients, products))
        close(torch.func.grad(loss)(self.x), gradient, "gradient")
        close(torch.func.jvp(torch.func.grad(loss), (self.x,), (self.way,))[1], product, "forward over reverse")
        along = (len(case.shapes) + self.x.dim()) % (self.x.dim() + 1)
        both = torch.stack([self.way, self.x], along)
        close(torch.vmap(case.ours, along, -1)(both)[..., 1], y, "vmap")
        close(torch.vmap(torch.func.grad(loss), along, -1)(both)[..., 1], gradient, "vmap of the gradient")

        leaf = self.x.clone().requires_grad_()
        (g,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
        close(g, gradient, "gradient by autograd")
        (found,) = torch.autograd.grad(self.of_all((g * self.way).sum(), case.shared), leaf, retain_graph=True)
        close(found, product, "Hessian product")
        (found,) = torch.autograd.grad(self.of_all(g.pow(3).sum(), case.shared), leaf, create_graph=True)
        (third,) = torch.autograd.grad(self.of_all(found.square().sum(), case.shared), leaf)
        leaves = [one.clone().requires_grad_() for one in inputs]
        several, often = self.loss_of_all(*leaves), []
        for power in (3, 2, 1):
            grads = torch.autograd.grad(several, leaves, create_graph=True, materialize_grads=True)
            often.append(self.mine(grads, case.shared))
            several = sum(one.pow(power).sum() + 0 * x.square().sum() for one, x in zip(grads, leaves, strict=True))
        close(found, often[1], "penalty")
        close(third, often[2], "third derivative")

        way, x = self.way, self.x.clone().requires_grad_()
        along = torch.func.grad(lambda x: torch.func.jvp(loss, (x,), (way,))[1])(self.x)
        close(along, product, "reverse over forward")
        with forward_ad.dual_level():
            tangent = forward_ad.unpack_dual(loss(forward_ad.make_dual(x, way))).tangent
            close(torch.autograd.grad(tangent, x)[0], product, "reverse over dual numbers")


@pytest.mark.parametrize("times", [5, pytest.param(100, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", KINDS)
def test_any_derivative_is_torchs(groups, name, times):
    for comm in groups:
        for number in range(times):
            rng = random.Random(f"{name} {number}")
            case = KINDS[name](name, rng, comm)
            try:
                OneCase(case, comm, rng).check()
            except AssertionError as error:
                raise AssertionError(f"case {number} of {name} on {comm.size} ranks: {case.shapes}") from error


@pytest.mark.parametrize("followed", [True, False])
def test_tangents_of_a_backward_where_one_rank_has_a_linear_loss(groups, followed):
    """Its gradient has no tangent, but the other ranks' gradients have: all of them run the operators."""
    for comm in groups:
        x, way = (draw(3, seed=seed + comm.rank) for seed in (0, 10))
        with forward_ad.dual_level():
            leaf = forward_ad.make_dual(x, way).requires_grad_()
            y = tplayers.all_reduce(leaf, comm)
            loss = y.sum() if comm.rank == 0 else y.pow(3).sum()
            (g,) = torch.autograd.grad(loss, leaf, create_graph=followed)
            value, tangent = forward_ad.unpack_dual(g)
        whole, moved = (sum(draw(3, seed=seed + rank) for rank in range(comm.size)) for seed in (0, 10))
        close(value, 1 + (comm.size - 1) * 3 * whole.square(), "gradient")
        expected = (comm.size - 1) * 6 * whole * moved
        close(torch.zeros(3, dtype=torch.float64) if tangent is None else tangent, expected, "tangent")
        if followed:
            (again,) = torch.autograd.grad((g * way).sum(), leaf)
            close(again, expected, "Hessian product")
