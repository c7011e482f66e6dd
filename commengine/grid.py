"""ProcessGrid: tensor groups of adjacent ranks, and data groups across them.

The layout is that of Shoeybi et al. 2019, appendix B.1, Figure 8.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from .communicator import Communicator
from .errors import CollectiveError
from .mpi import OwnsCommunicators, load_mpi


@dataclass(frozen=True)
class GridLayout:
    """The groups of a world of ``world_size`` ranks with tensor groups of ``tensor`` ranks: pure arithmetic.

    Raises CollectiveError if ``tensor`` does not divide ``world_size``.
    """

    world_size: int
    tensor: int

    def __post_init__(self) -> None:
        if self.tensor < 1 or self.world_size % self.tensor:
            raise CollectiveError(
                f"tensor={self.tensor} does not divide the {self.world_size} ranks of the group: "
                f"the sizes that do are {divisors(self.world_size)}"
            )

    @property
    def data(self) -> int:
        """The size of a data group."""
        return self.world_size // self.tensor


def divisors(number: int) -> list[int]:
    """Return the positive divisors of ``number`` in ascending order."""
    return [n for n in range(1, number + 1) if number % n == 0]


class ProcessGrid(OwnsCommunicators):
    """The ranks of ``world`` as a grid: each rank belongs to one tensor group and one data group.

    world: the Communicator to split; it stays the caller's. Construction and `close` are collective over it.
    tensor: the size of a tensor group; it must divide ``world.size``. A data group has the other factor as its size.

    Raises CollectiveError on every rank if ``tensor`` does not divide, and CollectiveMismatch if the ranks gave
    different sizes.

    The attributes ``tensor`` and ``data`` are this rank's two Communicators, ``layout`` is the `GridLayout`.

    Warns on rank 0 when a tensor group crosses nodes, because its collectives run over the network for every layer.
    """

    def __init__(self, world: Communicator, tensor: int = 1) -> None:
        self.world = world
        problem = None
        try:
            self.layout = GridLayout(world.size, tensor)
        except CollectiveError as error:
            problem = str(error)
        world.compare(f"ProcessGrid(tensor={tensor!r})", problem)
        position, replica = world.rank % tensor, world.rank // tensor
        self.tensor = _split(world, replica, position, "tensor")
        self.data = _split(world, position, replica, "data")
        self._warn_of_crossed_nodes()

    def _warn_of_crossed_nodes(self) -> None:
        mpi = load_mpi()
        with self.world._making("ProcessGrid") as world:
            node = self.tensor.mpi.Split_type(mpi.COMM_TYPE_SHARED)
            crossing = world.allreduce(int(node.size < self.tensor.size), mpi.SUM)
            node.Free()
        if crossing and self.world.rank == 0:
            warnings.warn(
                f"tensor groups cross nodes on {crossing} of {self.world.size} ranks (cyclic placement?): every "
                "layer's collectives go over the network. Place adjacent ranks on one node (srun --distribution=block, "
                "mpirun --map-by slot) or use a smaller tensor size",
                stacklevel=3,
            )

    def close(self) -> None:
        """Free the two groups; the world stays open. Collective."""
        self.tensor.close()
        self.data.close()

    def __repr__(self) -> str:
        return f"ProcessGrid(tensor={self.tensor.size}, data={self.data.size})"


def _split(world: Communicator, color: int, key: int, name: str) -> Communicator:
    part = world.split(color, key, name=name)
    assert part is not None  # because a color was given
    return part
