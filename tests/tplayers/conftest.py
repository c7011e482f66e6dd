"""A tensor group under test, and the global tensors of which its ranks hold parts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import tplayers
from commengine import Communicator

if TYPE_CHECKING:
    from mpi4py import MPI


def draw(*shape: int, seed: int = 0) -> Tensor:
    """A float64 tensor that is the same on all ranks."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def draw_whole_numbers(*shape: int, seed: int = 0) -> Tensor:
    """Small whole numbers as float64: sums are exact in any order, so that tests compare exactly."""
    return torch.randint(-50, 50, shape, generator=torch.Generator().manual_seed(seed)).double()


class Group:
    """What tests ask of a group. The ranks' tensors travel by pickle over MPI: no code under test."""

    def __init__(self, comm: Communicator) -> None:
        self.comm, self.rank, self.size = comm, comm.rank, comm.size

    def ranks(self, x: Tensor) -> list[Tensor]:
        """Every rank's ``x``."""
        return [torch.from_numpy(part) for part in self.comm.mpi.allgather(x.detach().contiguous().numpy())]

    def mine(self, whole: Tensor, dim: int = -1) -> Tensor:
        """This rank's slice of ``whole``."""
        return whole.chunk(self.size, dim)[self.rank].clone()

    def joined(self, part: Tensor, dim: int = -1) -> Tensor:
        """The ranks' slices as one."""
        return torch.cat(self.ranks(part), dim)

    def same(self, x: Tensor) -> Tensor:
        """``x``, once it is shown to be bit-identical on all ranks."""
        for other in self.ranks(x):
            torch.testing.assert_close(other, x.detach(), rtol=0, atol=0, equal_nan=True)
        return x.detach()

    def assembled(self, module: nn.Module, parts: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """The global tensors of which each rank holds ``parts``, by parameter (default: the parameters' values)."""
        parts = {name: p.detach() for name, p in module.named_parameters()} if parts is None else parts
        found = {}
        for name, placement in tplayers.placements(module).items():
            assert parts[name].shape == placement.local_shape
            found[name] = placement.assemble(self.ranks(parts[name])) if placement.sharded else self.same(parts[name])
        return found

    def gradients(self, module: nn.Module) -> dict[str, Tensor]:
        """The global gradient of each parameter."""
        gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
        return self.assembled(module, gradients)

    def fill(self, module: nn.Module, seed: int = 1, scale: float = 0.5) -> dict[str, Tensor]:
        """Give every parameter its part of a random global tensor; return those as leaves, by name."""
        wholes = {}
        with torch.no_grad():
            for number, (name, placement) in enumerate(tplayers.placements(module).items()):
                whole = scale * draw(*placement.shape, seed=100 * seed + number)
                module.get_parameter(name).copy_(placement.part(whole))
                wholes[name] = whole.requires_grad_()
        return wholes

    def load(self, module: nn.Module, wholes: dict[str, Tensor]) -> None:
        """Give every parameter its part of ``wholes``."""
        with torch.no_grad():
            for name, placement in tplayers.placements(module).items():
                module.get_parameter(name).copy_(placement.part(wholes[name]))

    def call(self, module: nn.Module, wholes: dict[str, Tensor], *args: Any) -> Tensor:
        """module(*args) as a differentiable function of its global parameters, on leaves that all ranks hold."""
        parts = {}
        for name, placement in tplayers.placements(module).items():
            part = wholes[name]
            if placement.sharded:
                view = part.reshape(placement.view)
                part = tplayers.scatter_to_tensor_parallel_region(view, self.comm, placement.dim)
            parts[name] = part.reshape(placement.local_shape)
        return functional_call(module, parts, args)

    def numerically_right(self, module: nn.Module, wholes: dict[str, Tensor], x: Tensor, split: str = "") -> None:
        """Compare the gradients of the module, as a function of global tensors, with finite differences.

        split: "in", "out" or "in out", where the module's input or output is this rank's slice of the last
        dimension. All ranks evaluate the same sequence, so gradcheck runs in lock-step.
        """
        names = list(wholes)

        def function(x: Tensor, *leaves: Tensor) -> Tensor:
            if "in" in split:
                x = tplayers.scatter_to_tensor_parallel_region(x, self.comm)
            y = self.call(module, dict(zip(names, leaves, strict=True)), x)
            return tplayers.gather_from_tensor_parallel_region(y, self.comm) if "out" in split else y

        inputs = [x.detach().clone()] + [whole.detach().clone() for whole in wholes.values()]
        inputs = [leaf.requires_grad_(leaf.is_floating_point()) for leaf in inputs]
        assert torch.autograd.gradcheck(function, inputs, fast_mode=True)


@pytest.fixture(scope="module")
def world(mpi_world: MPI.Intracomm) -> Iterator[Communicator]:
    """All ranks of the job, for the tests of a file."""
    with Communicator(mpi_world) as world:
        yield world
        world.close()


@pytest.fixture(scope="module")
def groups(world: Communicator) -> Iterator[list[Communicator]]:
    """All ranks; in the job of 4 ranks also a group of the first three. A rank gets the groups that it belongs to."""
    three = world.split(0 if world.rank < 3 else None, name="three") if world.size == 4 else None
    yield [world] if three is None else [world, three]
    if three is not None:
        three.close()


@pytest.fixture
def group(mpi_world: MPI.Intracomm) -> Iterator[Group]:
    """All ranks of the job as one tensor group."""
    with Communicator(mpi_world, name="tensor") as comm:
        yield Group(comm)


@pytest.fixture
def alone() -> Iterator[Group]:
    """A group of this rank only: the model that is not split."""
    from mpi4py import MPI

    with Communicator(MPI.COMM_SELF, name="alone") as comm:
        yield Group(comm)


@pytest.fixture
def ranks_of() -> Any:
    """``ranks_of(n)``: n stand-ins for a Communicator. They are all that a module needs which runs no collective."""

    def ranks_of(size: int) -> list[SimpleNamespace]:
        def block(part: int, rank: int) -> SimpleNamespace:
            return SimpleNamespace(rank=rank % part, size=part)

        return [SimpleNamespace(rank=rank, size=size, block=partial(block, rank=rank)) for rank in range(size)]

    return ranks_of


@pytest.fixture
def close() -> Any:
    """assert_close for float64 results that differ only in the order of sums."""
    return lambda actual, expected: torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10)


@pytest.fixture
def random() -> Any:
    return draw


@pytest.fixture
def whole_numbers() -> Any:
    return draw_whole_numbers
