"""ProcessGrid: the ranks of a job along four axes, with a group for each axis.

Tensor and data are the axes of Shoeybi et al. 2019, appendix B.1, Figure 8. The pipeline is that of Narayanan et al.
2021 (arXiv 2104.04473, section 3), the slowest axis, so that its messages are those that cross nodes.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

from .communicator import Communicator
from .errors import CollectiveError, CollectiveTimeout
from .mpi import OwnsCommunicators, load_mpi, reduced
from .operations.checks import is_c_int
from .options.ranges import divisors

#: the axes of a grid. The rank's number grows fastest along the first one
AXES = ("tensor", "context", "data", "pipeline")


@dataclass(frozen=True)
class GridLayout:
    """The groups of a world of ``world_size`` ranks along the axes of `AXES`: pure arithmetic.

    tensor, context, pipeline: the sizes of these groups. ``data`` is what remains of the world. expert: the size of
    the expert groups, into which each data group is cut.

    Raises CollectiveError if the product of the first three does not divide ``world_size``, or ``expert`` not ``data``.
    """

    world_size: int
    tensor: int
    context: int = 1
    pipeline: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        given = {"tensor": self.tensor, "context": self.context, "pipeline": self.pipeline}
        wrong = dict([item for item in given.items() if not is_c_int(item[1], 1)][:1])  # the first is named
        if not wrong and self.world_size % math.prod(given.values()) == 0:
            if not is_c_int(self.expert, 1) or self.data % self.expert:
                raise CollectiveError(
                    f"expert={self.expert!r} does not divide the {self.data} ranks of a data group: the sizes that do "
                    f"are {divisors(self.data)}"
                )
            return
        sizes = wrong or {name: size for name, size in given.items() if name == "tensor" or size != 1}
        said = " times ".join(f"{name}={size!r}" for name, size in sizes.items())
        product = "" if wrong or len(sizes) == 1 else f"is {math.prod(sizes.values())}, which "
        raise CollectiveError(
            f"{said} {product}does not divide the {self.world_size} ranks of the group: the sizes that do are "
            f"{divisors(self.world_size)}"
        )

    @property
    def data(self) -> int:
        """The size of a data group."""
        return self.world_size // (self.tensor * self.context * self.pipeline)

    def place(self, rank: int) -> dict[str, int]:
        """The number of ``rank`` within its group of each axis, in the order of `AXES`."""
        found = {}
        for axis in AXES:
            rank, found[axis] = divmod(rank, getattr(self, axis))
        return found

    def group(self, rank: int, axis: str) -> list[int]:
        """The ranks of ``rank``'s group along ``axis``, in order: all that differ in this place only."""
        before = AXES[: AXES.index(axis)]
        step = math.prod(getattr(self, one) for one in before)
        first = rank - step * self.place(rank)[axis]
        return [first + step * number for number in range(getattr(self, axis))]

    def expert_group(self, rank: int) -> list[int]:
        """The ranks of ``rank``'s expert group, in order: adjacent ones of its data group."""
        first = self.place(rank)["data"] // self.expert * self.expert
        return self.group(rank, "data")[first : first + self.expert]


class ProcessGrid(OwnsCommunicators):
    """The ranks of ``world`` as a grid: each rank belongs to one group of each axis.

    world: the Communicator to split; it stays the caller's. Construction and `close` are collective over it.
    tensor, context, pipeline: the sizes of these groups; their product must divide ``world.size``. A data group has
        the remaining factor as its size.
    expert: the size of the expert groups, which must divide that of a data group.

    Raises CollectiveError on every rank if a size does not divide, and CollectiveMismatch if the ranks gave
    different sizes.

    The attributes ``tensor``, ``context``, ``data`` and ``pipeline`` are this rank's Communicators: adjacent ranks form
    a tensor group, then come context, data and pipeline. ``layout`` is the `GridLayout`. ``replicas`` joins the context
    and the data groups of the ranks that have the same parameters: their gradients are summed over it. It is ``data``
    itself if context groups have one rank. ``expert`` has ranks of one data group that together have all experts of a
    mixture (Lepikhin et al. 2020, arXiv 2006.16668, section 3.1). ``expert_replicas`` has the ranks of ``replicas``
    with the same experts, and is ``replicas`` itself if expert groups have one rank.

    Warns on rank 0 when a tensor group crosses nodes, because its collectives run over the network for every layer.
    """

    def __init__(
        self, world: Communicator, tensor: int = 1, context: int = 1, pipeline: int = 1, expert: int = 1
    ) -> None:
        self.world = world
        problem = None
        try:
            self.layout = GridLayout(world.size, tensor, context, pipeline, expert)
        except CollectiveError as error:
            problem = str(error)
        more = "" if (context, pipeline) == (1, 1) else f", context={context!r}, pipeline={pipeline!r}"
        more += "" if expert == 1 else f", expert={expert!r}"
        world.compare(f"ProcessGrid(tensor={tensor!r}{more})", problem)
        made: list[Communicator] = []
        try:
            self._split(made)
        except CollectiveTimeout:  # another rank is not here
            raise
        except CollectiveError:  # on every rank, such as where MPI has no communicator left
            for comm in made:
                comm.close()
            raise
        self._warn_of_crossed_nodes()

    def _split(self, made: list[Communicator]) -> None:
        """Make the groups. made: gets each of them. Collective over the world."""
        world, layout = self.world, self.layout
        place = layout.place(world.rank)

        def split(color: int, key: int, name: str) -> Communicator:
            part = world.split(color, key, name=name)
            assert part is not None  # because a color was given
            made.append(part)
            return part

        self.tensor, self.context, self.data, self.pipeline = (
            split(layout.group(world.rank, axis)[0], place[axis], axis) for axis in AXES
        )
        self.replicas = self.data
        first = place["pipeline"] * layout.tensor + place["tensor"]
        if layout.context > 1:
            self.replicas = split(first, world.rank, "replicas")
        mine = layout.expert_group(world.rank)
        number = mine.index(world.rank)
        self.expert = split(mine[0], number, "expert")
        self.expert_replicas = self.replicas
        if layout.expert > 1:
            # Those of `replicas` have the first rank of a replica in common, and these the place in the expert group.
            self.expert_replicas = split(first * layout.expert + number, world.rank, "expert_replicas")

    def _warn_of_crossed_nodes(self) -> None:
        mpi = load_mpi()
        with self.world._making("ProcessGrid") as world:
            node = self.tensor.mpi.Split_type(mpi.COMM_TYPE_SHARED)
            crossing = reduced(world, int(node.size < self.tensor.size), mpi.SUM)
            node.Free()
        if crossing and self.world.rank == 0:
            warnings.warn(
                f"tensor groups cross nodes on {crossing} of {self.world.size} ranks (cyclic placement?): every "
                "layer's collectives go over the network. Place adjacent ranks on one node (srun --distribution=block, "
                "mpirun --map-by slot) or use a smaller tensor size",
                stacklevel=3,
            )

    @property
    def groups(self) -> list[Communicator]:
        """The groups that a training step uses, each once. Those of context and experts only if they have several."""
        shared = [] if self.replicas is self.data else [self.context, self.replicas]
        of_experts = [] if self.expert_replicas is self.replicas else [self.expert, self.expert_replicas]
        return [self.tensor, *shared, self.data, *of_experts, self.pipeline]

    def require_axes(self, user: str, *axes: str) -> None:
        """Raise CollectiveError, on every rank, if an axis that ``user``, a name, does not know has several ranks."""
        more = [axis for axis in (*AXES, "expert") if axis not in axes and getattr(self.layout, axis) > 1]
        if more:
            raise CollectiveError(
                f"{user} knows the axes {' and '.join(axes)} of a grid, and {self!r} has {more[0]}, too"
            )

    def close(self) -> None:
        """Free the groups; the world stays open. Collective."""
        for comm in (*self.groups, self.context, self.expert):
            comm.close()

    def __repr__(self) -> str:
        sizes = {axis: getattr(self.layout, axis) for axis in (*AXES, "expert")}
        shown = [f"{axis}={size}" for axis, size in sizes.items() if axis in ("tensor", "data") or size > 1]
        return f"ProcessGrid({', '.join(shown)})"
