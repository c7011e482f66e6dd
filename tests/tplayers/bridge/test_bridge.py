"""Two programs in one job, each with its ranks and blocks: values and gradients are those of one torch program."""

import gc
import itertools
import math
import random
from functools import partial

import pytest
import torch

from commengine import CollectiveError, CollectiveTimeout, Communicator, Decomposition, launch
from commengine.decomposition import grid_coords
from tests.tplayers.conftest import draw
from tplayers import Bridge, BridgeField
from tplayers.bridge import bridge as bridge_module

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.sizes(2, 4), pytest.mark.timeout(120)]

#: the ranks that ask, of as many as there are
SPLITS = {2: [1], 4: [2, 1, 3]}


def answer_all(bridge, function):
    """Answer the other program until it closes."""
    while bridge.answer(function) != "end":
        pass


@pytest.fixture
def programs(mpi_world):
    """``programs(n)``: this rank's part and communicator, of a job whose first n ranks ask the others."""
    opened = []

    def split(asking):
        part = launch.split_world(int(mpi_world.rank >= asking), comm=mpi_world)
        comm = Communicator(part.comm, device="cpu")
        opened[:0] = [comm, part]
        return part.color == 0, part.other, comm

    yield split
    bridge_module._OPEN.clear()  # those of a wait that timed out stay open
    for one in opened:
        one.close()


def blocks(rng, points, ranks):
    """A drawn decomposition of ``points`` over a drawn grid of ``ranks``; blocks may be empty."""
    grids = [one for one in itertools.product(range(1, ranks + 1), repeat=len(points)) if math.prod(one) == ranks]
    sizes = []
    for n, parts in zip(points, rng.choice(grids), strict=True):
        cuts = sorted(rng.randint(0, n) for _ in range(parts - 1))
        sizes.append([b - a for a, b in itertools.pairwise([0, *cuts, n])])
    return Decomposition(sizes)


def mine(whole, field, rank):
    return whole[points_of(field, rank)].contiguous()


def points_of(field, rank):
    return (..., *field.decomposition.slices(grid_coords(rank, field.decomposition.grid_shape)))


def total(mpi, number):
    return mpi.allreduce(float(number))


def drawn(rng, asks, comm, ranks):
    """The fields that the asking program gives and takes, and this program's side of both."""
    axes = rng.randint(1, 3)
    shapes = [[rng.randint(1, 7) for _ in range(axes)] for _ in range(2)]
    leading = [tuple(rng.randint(1, 3) for _ in range(rng.randint(0, 2))) for _ in range(2)]
    dtype = rng.choice([torch.float64, torch.float64, torch.float32])
    sides = [
        [BridgeField(blocks(rng, shape, size), lead, dtype) for shape, lead in zip(shapes, leading, strict=True)]
        for size in ranks
    ]
    return sides[0] if asks else sides[1][::-1]


@pytest.mark.parametrize("asking", [1, 2, 3])
def test_an_operator_and_its_adjoint_in_drawn_cases(mpi_world, programs, asking):
    """<A x, y> = <x, A' y>, and A x itself, where A is a matrix of the whole fields that only the other program has."""
    if asking not in SPLITS[mpi_world.size]:
        pytest.skip("no such split of these ranks")
    asks, other, comm = programs(asking)
    for number in range(25):
        rng = random.Random(100 * asking + number)
        gives, takes = drawn(rng, asks, comm, (asking, mpi_world.size - asking))
        here, there = (gives, takes) if asks else (takes, gives)
        shapes = [(*field.leading, *field.decomposition.shape) for field in (here, there)]
        matrix = draw(torch.Size(shapes[1]).numel(), torch.Size(shapes[0]).numel(), seed=number).to(gives.dtype)
        x, y = (draw(*shape, seed=number + 7 * n).to(gives.dtype) for n, shape in enumerate(shapes))
        close = 1e-13 if gives.dtype == torch.float64 else 1e-5
        with Bridge(other, comm, gives, takes) as bridge:
            if not asks:
                function = partial(applied, matrix=matrix, comm=comm, gives=gives, takes=takes)
                answer_all(bridge, function)
                continue
            leaf = mine(x, gives, comm.rank).requires_grad_()
            found = bridge.call(leaf)
            expected = (matrix @ x.flatten()).reshape(shapes[1])
            torch.testing.assert_close(found, mine(expected, takes, comm.rank), rtol=close, atol=close * 30)
            way = mine(y, takes, comm.rank)
            (pulled,) = torch.autograd.grad(found, leaf, way)
            back = (matrix.T @ y.flatten()).reshape(shapes[0])
            torch.testing.assert_close(pulled, mine(back, gives, comm.rank), rtol=close, atol=close * 30)
            left, right = (total(comm.mpi, (a * b).sum()) for a, b in ((found.detach(), way), (leaf.detach(), pulled)))
            scale = float(found.norm() * way.norm()) + 1.0
            assert abs(left - right) <= (1e-14 if close < 1e-12 else 1e-5) * max(scale, abs(left)) * mpi_world.size


def applied(block, *, matrix, comm, gives, takes):
    """The answer of a rank: its block of ``matrix`` times the whole field."""
    whole = torch.zeros((*takes.leading, *takes.decomposition.shape), dtype=block.dtype)
    whole[points_of(takes, comm.rank)] = block.detach()
    comm.all_reduce(whole)
    return Applied.apply(block, matrix, whole, comm, gives, takes)


class Applied(torch.autograd.Function):
    """This rank's block of a matrix times a whole field."""

    @staticmethod
    def forward(ctx, block, matrix, whole, comm, gives, takes):
        ctx.all = matrix, comm, gives, takes
        return mine((matrix @ whole.flatten()).reshape(*gives.leading, *gives.decomposition.shape), gives, comm.rank)

    @staticmethod
    def backward(ctx, grad):
        matrix, comm, gives, takes = ctx.all
        whole = torch.zeros((*gives.leading, *gives.decomposition.shape), dtype=grad.dtype)
        whole[points_of(gives, comm.rank)] = grad
        comm.all_reduce(whole)
        back = (matrix.T @ whole.flatten()).reshape(*takes.leading, *takes.decomposition.shape)
        return mine(back, takes, comm.rank), None, None, None, None, None


def pair(asks, comm, mpi_world, asking, points=6, **more):
    size = mpi_world.size
    parts = [Decomposition.even((points,), (n,)) for n in (asking, size - asking)]
    field = BridgeField(parts[0 if asks else 1], **more)
    return field, field


def test_a_training_step_of_both_programs_is_that_of_one(mpi_world, programs):
    """The other program's function has a parameter; calls are nested, skipped, repeated, and one is without a graph."""
    asks, other, comm = programs(1)
    fields = pair(asks, comm, mpi_world, 1)
    weight = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)

    def function(x, w=weight):
        return torch.sin(w * x) + x

    with Bridge(other, comm, *fields) as bridge:
        if not asks:
            kinds = []
            while (kind := bridge.answer(function)) != "end":
                kinds.append(kind)
            assert kinds == ["call", "call", "call", "call", "gradient", "gradient", "gradient", "call"]
            total_weight = total(comm.mpi, weight.grad)
        else:
            start = draw(6, seed=1)
            x = start.clone().requires_grad_()
            once = bridge.call(x)
            twice = bridge.call(once * 2)
            bridge.call(x)  # nobody asks for its gradient
            with torch.no_grad():
                assert not bridge.call(x).requires_grad
            loss = (twice.pow(2) + once).sum()
            (g,) = torch.autograd.grad(loss, x, retain_graph=True)
            (again,) = torch.autograd.grad(once.sum(), x)
            del loss, once, twice
            gc.collect()
            bridge.call(x.detach())
        whole, w = draw(6, seed=1).requires_grad_(), weight.detach().clone().requires_grad_()
        first = function(whole, w)
        loss = (function(first * 2, w).pow(2) + first).sum()
        expected = torch.autograd.grad(loss, (whole, w), retain_graph=True)
        further = torch.autograd.grad(first.sum(), (whole, w))
        if asks:
            torch.testing.assert_close(g, expected[0], rtol=1e-14, atol=1e-14)
            torch.testing.assert_close(again, further[0], rtol=1e-14, atol=1e-14)
        else:
            assert total_weight == pytest.approx(float(expected[1] + further[1]), rel=1e-13)
            assert not bridge._graphs  # the other program has told of the end


def test_the_other_program_keeps_no_more_than_there_are_graphs(mpi_world, programs):
    asks, other, comm = programs(1)
    with Bridge(other, comm, *pair(asks, comm, mpi_world, 1)) as bridge:
        if asks:
            held = []
            for number in range(40):
                x = draw(6).requires_grad_()
                held = [*held[-2:], bridge.call(x)]
                if number % 3 == 0:
                    held[-1].sum().backward()
        else:
            most = 0
            while bridge.answer(torch.exp) != "end":
                most = max(most, len(bridge._graphs))
            assert 3 <= most <= 5


def test_memory_is_used_again_when_nobody_holds_the_field(mpi_world, programs):
    """A field stays while anything holds it: the tensor, a view of it, or a graph."""
    asks, other, comm = programs(1)
    field, _ = pair(asks, comm, mpi_world, 1)
    with Bridge(other, comm, field, field) as bridge:
        if not asks:
            answer_all(bridge, lambda x: x + 1)
            return
        held, places = [], set()
        for n in range(12):
            x = torch.full(field.local_shape(comm.rank), float(n), dtype=field.dtype)
            y = bridge.call(x.requires_grad_(n % 3 == 0))
            held += [y[..., :1].detach().numpy() if n % 3 else y.square()]  # a view, or a graph that saved y
            places.add(y.data_ptr())
        for n, one in enumerate(held):
            assert bool((one == n + 1).all() if n % 3 else (one == (n + 1) ** 2).all())
        assert len(places) == 12
        del held, y, one
        gc.collect()
        again = {bridge.call(x.detach()).data_ptr() for _ in range(9)}
        assert len(again) == 1 and again <= places


def test_a_field_that_is_held_stays_whatever_python_counts(mpi_world, programs, monkeypatch):
    """Python 3.14 counts other references than its predecessors do: here any count says that memory is free."""
    monkeypatch.setattr("sys.getrefcount", lambda one: 3)
    asks, other, comm = programs(1)
    field, _ = pair(asks, comm, mpi_world, 1)
    with Bridge(other, comm, field, field) as bridge:
        if not asks:
            answer_all(bridge, lambda x: x + 1)
            return
        x = torch.zeros(field.local_shape(comm.rank), dtype=field.dtype)
        held = [bridge.call(x + n) for n in range(6)]
        assert all(bool((one == n + 1).all()) for n, one in enumerate(held))


def test_a_bridge_that_cannot_be_made_frees_its_communicators(mpi_world, programs):
    from mpi4py import MPI

    asks, other, comm = programs(1)
    field, _ = pair(asks, comm, mpi_world, 1, points=6 if asks else 7)
    bridge = Bridge.__new__(Bridge)
    with pytest.raises(ValueError, match="Bridge: the field that this program"):
        bridge.__init__(other, comm, field, field)
    assert bridge._own == bridge._other == MPI.COMM_NULL and bridge not in bridge_module._OPEN


def test_a_second_derivative_is_an_error_on_all_ranks(mpi_world, programs):
    asks, other, comm = programs(1)
    with Bridge(other, comm, *pair(asks, comm, mpi_world, 1)) as bridge:
        if asks:
            x = draw(6).requires_grad_()
            (g,) = torch.autograd.grad(bridge.call(x).sum(), x, create_graph=True)
            with pytest.raises(RuntimeError, match="no second derivative of BridgeCall"):
                torch.autograd.grad(g.pow(2).sum(), x)
        else:
            answer_all(bridge, torch.exp)


def test_what_is_no_block_is_an_error_on_every_rank_before_anything_is_sent(mpi_world, programs):
    asks, other, comm = programs(mpi_world.size - 1)
    with Bridge(other, comm, *pair(asks, comm, mpi_world, mpi_world.size - 1)) as bridge:
        if asks:
            x = torch.zeros(bridge.gives.local_shape(comm.rank), dtype=torch.float64)
            for wrong in (x[..., None], x.float(), None):
                with pytest.raises(ValueError, match=r"must give a tensor|another rank gave no block"):
                    bridge.call(wrong if comm.rank == 0 else x)
            assert bridge.call(x).shape == x.shape
        else:
            assert bridge.answer(torch.exp) == "call"
            assert bridge.answer(torch.exp) == "end"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"points": 5}, r"here it is 1 channels of 8 bytes at \[.\] points, in the other program"),
        ({"leading": (2,)}, "channels of 8 bytes"),
        ({"dtype": torch.float32}, "bytes at"),
    ],
)
def test_programs_that_describe_a_field_in_two_ways(mpi_world, programs, change, words):
    asks, other, comm = programs(1)
    with pytest.raises(ValueError, match=words):
        Bridge(other, comm, *pair(asks, comm, mpi_world, 1, **(change if asks else {})))


def test_a_rank_with_another_field_is_found(mpi_world, programs):
    asks, other, comm = programs(mpi_world.size - 1)
    gives, takes = pair(asks, comm, mpi_world, mpi_world.size - 1)
    if asks and comm.size > 1:
        takes = BridgeField(takes.decomposition, (comm.rank + 1,))
        with pytest.raises(CollectiveError, match="ask"):
            Bridge(other, comm, gives, takes)


@pytest.mark.slow
@pytest.mark.sizes(2)
@pytest.mark.parametrize("rank", [pytest.param(None, marks=pytest.mark.long), 0])
def test_an_answer_that_may_be_asked_for_its_gradient_has_a_graph_on_every_rank(mpi_world, programs, rank):
    """Else the gradient would be zeros, or the other ranks would wait in the backward."""
    asks, other, comm = programs(1)
    bridge = Bridge(other, comm, *pair(asks, comm, mpi_world, 1), timeout=1)
    if asks:
        with pytest.raises(CollectiveTimeout):
            bridge.call(draw(6).requires_grad_())
    else:
        with pytest.raises(ValueError, match="result has no graph, and the other program may ask for its gradient"):
            bridge.answer(lambda x: torch.exp(x.detach() if rank in (None, comm.rank) else x))
    mpi_world.Barrier()


def test_a_closed_bridge_says_so_and_one_that_answers_waits_for_the_end(mpi_world, programs):
    asks, other, comm = programs(1)
    with Bridge(other, comm, *pair(asks, comm, mpi_world, 1)) as bridge:
        if not asks:
            assert bridge.answer(torch.exp) == "call"
            with pytest.raises(CollectiveError, match="the other program has not ended"):
                bridge.close()
            assert bridge.answer(torch.exp) == "end"
        else:
            y = bridge.call(draw(6).requires_grad_())
    with pytest.raises(CollectiveError, match="it is closed"):
        bridge.call(draw(6)) if asks else bridge.answer(torch.exp)
    if asks:
        with pytest.raises(CollectiveError, match="it is closed"):
            y.sum().backward()


@pytest.mark.slow
@pytest.mark.sizes(2)
def test_a_program_that_opens_no_bridge_is_not_waited_for_longer_than_the_timeout(mpi_world, programs):
    asks, other, comm = programs(1)
    if asks:
        with pytest.raises(CollectiveTimeout, match=r"0.5 s for the other program"):
            Bridge(other, comm, *pair(asks, comm, mpi_world, 1), timeout=0.5)
    mpi_world.Barrier()


@pytest.mark.slow
@pytest.mark.sizes(2)
def test_waiting_ends_with_the_timeout(mpi_world, programs):
    asks, other, comm = programs(1)
    bridge = Bridge(other, comm, *pair(asks, comm, mpi_world, 1), timeout=0.5)
    if not asks:
        with pytest.raises(CollectiveTimeout, match=r"0.5 s for the other program"):
            bridge.answer(torch.exp)
    mpi_world.Barrier()  # the bridge is not closed: its messages are not at their end
