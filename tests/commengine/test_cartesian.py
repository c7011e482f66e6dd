"""CartesianGrid against MPI's own Cartesian communicators."""

import copy
import itertools
import re

import numpy as np
import pytest
import torch

from commengine import CartesianGrid, CollectiveError, CollectiveMismatch, Decomposition, ProcessGrid


def shapes(size):
    """All shapes of one to three axes with ``size`` places."""
    for axes in (1, 2, 3):
        for shape in itertools.product(range(1, size + 1), repeat=axes):
            if np.prod(shape) == size:
                yield shape


@pytest.mark.mpi(min_size=1)
@pytest.mark.every_size
def test_places_and_neighbours_are_mpis(world, mpi_world):
    from mpi4py import MPI

    for shape in shapes(world.size):
        for periodic in itertools.product((False, True), repeat=len(shape)):
            cart = mpi_world.Create_cart(shape, periodic, reorder=False)
            grid = CartesianGrid(world, shape, periodic)
            assert (grid.shape, grid.periodic, grid.size, grid.rank) == (shape, periodic, cart.size, cart.rank)
            assert grid.coords == tuple(cart.coords)
            for rank in range(cart.size):
                assert grid.coords_at(rank) == tuple(cart.Get_coords(rank))
                assert grid.rank_at(grid.coords_at(rank)) == rank
            for axis, step in itertools.product(range(len(shape)), (-5, -2, -1, 0, 1, 2, 5)):
                _, to = cart.Shift(axis, step)
                assert grid.neighbour(axis, step) == (None if to == MPI.PROC_NULL else to)
                assert grid.neighbour(axis - len(shape), step) == grid.neighbour(axis, step)
            cart.Free()


@pytest.mark.mpi(min_size=1)
@pytest.mark.every_size
def test_from_a_solvers_communicator(world, mpi_world):
    from mpi4py import MPI

    for shape in shapes(world.size):
        periods = [axis % 2 == 0 for axis in range(len(shape))]
        cart = mpi_world.Create_cart(shape, periods, reorder=True)
        same = MPI.Intracomm(cart)  # as a program in another language hands it over: the topology is in the handle
        for given in (cart, same):
            with CartesianGrid.from_mpi(given, name="solver", checked=True) as grid:
                assert (grid.shape, grid.periodic) == (shape, tuple(periods))
                assert grid.coords == tuple(cart.Get_coords(cart.rank))
                assert (grid.comm.name, grid.comm.checked) == ("solver", True)
                ones = torch.ones(1)
                grid.comm.all_reduce(ones)
                assert ones.item() == world.size
            with pytest.raises(CollectiveError, match="closed"):
                grid.comm.barrier()
            grid.close()
        assert cart.allreduce(1) == world.size  # the solver's own communicator lives
        cart.Free()


@pytest.mark.mpi(min_size=1)
@pytest.mark.every_size
def test_sub_grids_are_those_of_cart_sub(world, mpi_world):
    from mpi4py import MPI

    for shape in [(world.size,), (1, world.size), *([(2, 1, world.size // 2)] if world.size % 2 == 0 else [])]:
        cart = mpi_world.Create_cart(shape, [True] * len(shape))
        grid = CartesianGrid(world, shape, periodic=True)
        for count in range(len(shape) + 1):
            for axes in itertools.combinations(range(len(shape)), count):
                # Without an axis each rank is alone; there Intel's MPI gives COMM_NULL to all ranks but one.
                theirs = cart.Sub([axis in axes for axis in range(len(shape))]) if axes else MPI.COMM_SELF.Dup()
                with grid.sub(axes) as part:
                    assert part.shape == tuple(shape[axis] for axis in axes)
                    assert part.coords == tuple(grid.coords[axis] for axis in axes)
                    assert part.periodic == (True,) * count
                    members = torch.empty(part.size, dtype=torch.int64)
                    part.comm.all_gather(members, torch.tensor([world.rank]))
                    assert members.tolist() == theirs.allgather(world.rank)
                theirs.Free()
        world.barrier()  # sub and its close leave the grid's own communicator open
        cart.Free()


@pytest.mark.mpi(min_size=4)
def test_space_and_data_together(world):
    """Two replicas, each on a grid of two ranks: over the tensor group of a ProcessGrid, or by sub-grids."""
    with ProcessGrid(world, tensor=2) as groups:
        space = CartesianGrid(groups.tensor, (2,))
        whole = CartesianGrid(world, (2, 2))
        with whole.sub([1]) as part, whole.sub([0]) as replicas:
            assert space.coords == part.coords == (world.rank % 2,)
            assert (replicas.rank, replicas.size) == (groups.data.rank, groups.data.size) == (world.rank // 2, 2)
            total = torch.tensor([float(world.rank)])
            part.comm.all_reduce(total)
            assert total.item() == (1 if world.rank < 2 else 5)
            replicas.comm.all_reduce(total)
            assert total.item() == 6


@pytest.mark.mpi(min_size=1)
@pytest.mark.every_size
def test_what_layers_need(world):
    grid = CartesianGrid(world, np.array([1, world.size]))
    assert grid.decompose((3, 7)) == Decomposition.even((3, 7), (1, world.size))
    assert copy.deepcopy(grid) is grid
    grid.close()
    world.barrier()  # the grid did not make the communicator
    assert repr(grid) == f"CartesianGrid(shape=[1, {world.size}], periodic=[False, False])"


@pytest.mark.mpi(min_size=1)
@pytest.mark.every_size
def test_bad_input_is_one_error_on_every_rank(world, mpi_world):
    size = world.size
    for shape, periodic, words in (
        ((size + 1,), False, rf"shape \[{size + 1}\] does not fit the group 'world' of {size} ranks"),
        ((-size, -1), False, "must be positive"),
        ((size, 1), [True], r"periodic=\[True\] has 1 values for the 2 axes"),
        ("x", False, "shape='x' and periodic=False"),
        (size, False, f"shape={size} and periodic=False"),
    ):
        with pytest.raises(CollectiveError, match=words):
            CartesianGrid(world, shape, periodic)
    grid = CartesianGrid(world, (1, size))
    with pytest.raises(CollectiveError, match="axis 2 is not an axis"):
        grid.neighbour(2, 1)
    with pytest.raises(CollectiveError, match="not a place"):
        grid.rank_at((0,))
    for axes in ([1, 0], [0, 0]):
        with pytest.raises(CollectiveError, match="ascending order"):
            grid.sub(axes)
    with pytest.raises(CollectiveError, match="Cartesian topology"):
        CartesianGrid.from_mpi(mpi_world)
    with pytest.raises(CollectiveError, match="Cartesian topology"):
        CartesianGrid.from_mpi(world)
    world.barrier()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("wrong", [None, [2.7], [-1], [2**62], [2**63], [2**80], [2, 2], [], "x"], ids=str)
def test_a_block_of_one_rank_that_is_none_is_an_error_on_every_rank(world, wrong):
    grid = CartesianGrid(world, (world.size,))
    told = re.escape(f"{wrong!r} at [{world.size - 1}]")
    with pytest.raises(CollectiveError, match=rf"not those of one field .*\[2\] at \[0\].*{told}"):
        grid.decomposition_of(wrong if world.rank == world.size - 1 else [2])
    assert grid.decomposition_of([2 + world.rank]).blocks == (tuple(range(2, 2 + world.size)),)


@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(2, only=True)
def test_ranks_that_differ_are_told_so(world):
    with pytest.raises(CollectiveMismatch, match=r"rank 0 asked for .*shape=\[2\].*rank 1 asked for .*shape=\[1, 2\]"):
        CartesianGrid(world, (2,) if world.rank == 0 else (1, 2))
    with pytest.raises(CollectiveMismatch, match=r"periodic=\[True\]"):
        CartesianGrid(world, (2,), periodic=world.rank == 0)
    with pytest.raises(CollectiveError, match=r"rank 1: .* numbers of ranks and bools"):
        CartesianGrid(world, (2,) if world.rank == 0 else 2)
    grid = CartesianGrid(world, (1, 2))
    with pytest.raises(CollectiveMismatch, match=r"sub\(\[0\]\)"):
        grid.sub([0] if world.rank == 0 else [1])
    world.barrier()
