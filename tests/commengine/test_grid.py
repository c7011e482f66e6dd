"""ProcessGrid: who is in a group with whom."""

import itertools
import math
import warnings

import pytest
import torch

from commengine import CollectiveError, GridLayout, ProcessGrid
from commengine.grid import AXES, divisors
from tests.support import mpirun


def test_the_papers_figure_8():
    """512 GPUs, 8 to a model."""
    assert GridLayout(512, 8).data == 64


def shapes(size):
    """Every (tensor, context, data, pipeline) of ``size`` ranks."""
    return [shape for shape in itertools.product(divisors(size), repeat=4) if math.prod(shape) == size]


@pytest.mark.parametrize("size", range(1, 17))
def test_groups_of_every_shape(size):
    """Against the definition: ranks are counted with the tensor axis inside, then context, data, pipeline."""
    for tensor, context, data, pipeline in shapes(size):
        layout = GridLayout(size, tensor, context, pipeline)
        assert layout.data == data
        places = [
            {"tensor": t, "context": c, "data": d, "pipeline": p}
            for p in range(pipeline) for d in range(data) for c in range(context) for t in range(tensor)
        ]  # fmt: skip
        assert [layout.place(rank) for rank in range(size)] == places
        for rank, axis in itertools.product(range(size), AXES):
            mates = [r for r in range(size) if all(places[r][one] == places[rank][one] for one in AXES if one != axis)]
            assert layout.group(rank, axis) == mates
            assert mates.index(rank) == places[rank][axis]


@pytest.mark.parametrize(
    "sizes, said",
    [
        ((8, 2, 1, 3), "tensor=2 times pipeline=3 is 6, which does not divide the 8 ranks"),
        ((4, 1, 0, 1), "^context=0 does not divide the 4 ranks"),
        ((4, 1, 1, 2.0), "^pipeline=2.0 does not divide the 4 ranks"),
        ((4, None, 1, 1), "^tensor=None does not divide the 4 ranks"),
        ((4, 2, 2, 2), "tensor=2 times context=2 times pipeline=2 is 8, which does not divide the 4 ranks"),
        ((4, -1, 1, -1), "^tensor=-1 does not divide the 4 ranks"),
    ],
)
def test_sizes_of_which_the_product_does_not_divide(sizes, said):
    with pytest.raises(CollectiveError, match=said):
        GridLayout(*sizes)


@pytest.mark.parametrize("expert", [3, 8, 0, -1, 2.0, None])
def test_expert_groups_that_do_not_divide_the_data_groups(expert):
    with pytest.raises(
        CollectiveError, match=rf"^expert={expert} does not divide the 4 ranks of a data group: .*\[1, 2, 4"
    ):
        GridLayout(8, 2, expert=expert)


@pytest.mark.parametrize("world_size, tensor", [(6, 4), (2, 3), (4, 0), (4, -2), (1, 2)])
def test_a_size_that_does_not_divide(world_size, tensor):
    with pytest.raises(CollectiveError) as caught:
        GridLayout(world_size, tensor)
    assert f"tensor={tensor} does not divide the {world_size} ranks of the group" in str(caught.value)
    assert str(divisors(world_size)) in str(caught.value)


@pytest.mark.mpi(min_size=1)
@pytest.mark.every_size
def test_communicators_of_a_grid(world):
    for tensor in divisors(world.size):
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # one machine: no group crosses nodes
            grid = ProcessGrid(world, tensor=tensor)
        with grid:
            # As in the paper's figure 8: adjacent ranks hold one model, and every tensor-th rank the same part of it.
            first = world.rank - world.rank % tensor
            for comm, group in (
                (grid.tensor, range(first, first + tensor)),
                (grid.data, range(world.rank % tensor, world.size, tensor)),
            ):
                members = torch.zeros(comm.size, dtype=torch.int64)
                comm.all_gather(members, torch.tensor([world.rank]))
                assert members.tolist() == list(group)
                assert comm.rank == list(group).index(world.rank)
                assert comm.world_rank == world.rank
            assert (grid.tensor.name, grid.data.name) == ("tensor", "data")
            assert (grid.context.size, grid.pipeline.size) == (1, 1)
            total = torch.tensor([1.0])
            grid.tensor.all_reduce(total)
            grid.data.all_reduce(total)
            assert total.item() == world.size
        with pytest.raises(CollectiveError, match="closed"):
            grid.tensor.barrier()
        world.barrier()


@pytest.mark.mpi(min_size=1)
@pytest.mark.every_size
def test_expert_groups_of_every_shape(world):
    """Against the definition: the data axis is cut into blocks, and a place in them has the same experts everywhere."""
    for tensor, context, data, pipeline in shapes(world.size):
        for expert in divisors(data):
            with ProcessGrid(world, tensor, context=context, pipeline=pipeline, expert=expert) as grid:
                places = [grid.layout.place(rank) for rank in range(world.size)]
                mine = places[world.rank]

                def alike(rank, *axes, of=places, to=mine):
                    return all(of[rank][axis] == to[axis] for axis in axes)

                data_group = [r for r in range(world.size) if alike(r, "tensor", "context", "pipeline")]
                block = [r for r in data_group if places[r]["data"] // expert == mine["data"] // expert]
                copies = [
                    r
                    for r in range(world.size)
                    if alike(r, "tensor", "pipeline") and places[r]["data"] % expert == mine["data"] % expert
                ]
                assert grid.layout.expert_group(world.rank) == block
                for comm, group in ((grid.expert, block), (grid.expert_replicas, copies)):
                    members = torch.zeros(comm.size, dtype=torch.int64)
                    comm.all_gather(members, torch.tensor([world.rank]))
                    assert members.tolist() == group
                assert (grid.expert_replicas is grid.replicas) == (expert == 1)
                assert len(set(map(id, grid.groups))) == len(grid.groups) == 3 + 2 * (context > 1) + 2 * (expert > 1)
                assert ("expert=" in repr(grid)) == (expert > 1)


@pytest.mark.mpi(min_size=1)
@pytest.mark.every_size
def test_communicators_of_every_shape(world):
    for tensor, context, data, pipeline in shapes(world.size):
        with ProcessGrid(world, tensor, context=context, pipeline=pipeline) as grid:
            for axis, size in zip(AXES, (tensor, context, data, pipeline), strict=True):
                comm = getattr(grid, axis)
                members = torch.zeros(comm.size, dtype=torch.int64)
                comm.all_gather(members, torch.tensor([world.rank]))
                assert (comm.name, comm.size) == (axis, size)
                assert members.tolist() == grid.layout.group(world.rank, axis)
            places = [grid.layout.place(rank) for rank in range(world.size)]
            same = [
                r
                for r in range(world.size)
                if all(places[r][a] == places[world.rank][a] for a in ("tensor", "pipeline"))
            ]
            members = torch.zeros(grid.replicas.size, dtype=torch.int64)
            grid.replicas.all_gather(members, torch.tensor([world.rank]))
            assert members.tolist() == same
            assert (grid.replicas is grid.data) == (context == 1)
            assert repr(grid).count("=") == 2 + (context > 1) + (pipeline > 1)


@pytest.mark.mpi(min_size=2)
@pytest.mark.every_size
@pytest.mark.parametrize("other", [2.0, None, "2"])
def test_a_size_that_is_no_number_on_one_rank_is_an_error_on_all(world, other):
    with pytest.raises(CollectiveError):
        ProcessGrid(world, pipeline=other if world.rank == 0 else world.size)
    world.barrier()


@pytest.mark.mpi(min_size=2)
@pytest.mark.every_size
def test_who_knows_two_axes_refuses_a_third(world):
    from trainers.data_parallel import DataParallel

    words = r"DataParallel knows the axes tensor and data .* has pipeline, too"
    with ProcessGrid(world, pipeline=world.size) as grid, pytest.raises(CollectiveError, match=words):
        DataParallel(torch.nn.Linear(2, 2), grid)
    world.barrier()


@pytest.mark.mpi(min_size=2)
@pytest.mark.every_size
def test_stages_pass_a_message_on(world):
    """What a pipeline sends: each stage gets the sum of the stages before it."""
    with ProcessGrid(world, pipeline=world.size) as grid:
        stage, total = grid.pipeline, torch.zeros(3)
        if stage.rank > 0:
            stage.recv(total, stage.rank - 1)
        total += stage.rank
        if stage.rank < stage.size - 1:
            stage.send(total, stage.rank + 1)
        assert total.tolist() == [sum(range(stage.rank + 1))] * 3


@pytest.mark.mpi(min_size=1)
@pytest.mark.every_size
def test_grid_that_cannot_be_makes_nothing(world):
    with pytest.raises(CollectiveError, match="does not divide"):
        ProcessGrid(world, tensor=world.size + 1)
    world.barrier()


@pytest.mark.mpi(min_size=2)
@pytest.mark.every_size
def test_two_grids_in_one_process(world):
    with ProcessGrid(world, tensor=1) as one, ProcessGrid(world, tensor=world.size) as other:
        assert (one.tensor.size, other.tensor.size) == (1, world.size)
        tensor = torch.ones(1)
        one.data.all_reduce(tensor, stream=one.data.new_stream()).wait()
        other.tensor.all_reduce(tensor, stream=other.tensor.new_stream()).wait()
        assert tensor.item() == world.size**2


class AloneOnItsNode:
    """An MPI communicator that says that every rank has a node of its own."""

    def __init__(self, comm):
        self.comm = comm

    def Split_type(self, kind):  # noqa: N802 (mpi4py's name)
        return self.comm.Split(self.comm.rank)

    def __getattr__(self, name):
        return getattr(self.comm, name)


@pytest.mark.mpi(min_size=2)
@pytest.mark.every_size
def test_tensor_groups_that_cross_nodes_are_warned_of(world, monkeypatch):
    split = world.split

    def split_over_nodes(*args, **named):
        part = split(*args, **named)
        part.mpi = AloneOnItsNode(part.mpi)
        return part

    monkeypatch.setattr(world, "split", split_over_nodes)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ProcessGrid(world, tensor=world.size).close()
        ProcessGrid(world, tensor=1).close()  # groups of one cannot cross
    told = [str(warning.message) for warning in caught]
    if world.rank == 0:
        assert len(told) == 1
        assert f"tensor groups cross nodes on {world.size} of {world.size} ranks" in told[0]
        assert caught[0].filename == __file__
    else:
        assert told == []


@pytest.mark.slow
def test_warning_on_nodes_that_mpich_makes_up():
    """MPIR_CVAR_NOLOCAL: each rank believes that it is alone on its node."""
    program = (
        "import sys; from mpi4py import MPI\n"
        "if 'MPICH' not in MPI.Get_library_version(): print('no MPICH', flush=True); sys.exit()\n"
        "from commengine import Communicator, ProcessGrid\n"
        "world = Communicator(MPI.COMM_WORLD); ProcessGrid(world, tensor=2).close(); world.close()\n"
    )
    done = mpirun.run(2, "-c", program, env={"MPIR_CVAR_NOLOCAL": "1"})
    if "no MPICH" in done.stdout:
        pytest.skip("needs MPICH")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("tensor groups cross nodes on 2 of 2 ranks") == 1, done.stderr
