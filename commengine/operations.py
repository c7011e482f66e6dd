"""The table of operations: what every transport can do, and what the other tables of the project derive from.

To add an operation, add a row here. `tests/test_operations_tables.py` then fails once for every place that lacks it:
the methods of `Communicator` and of the transports, the cost formulas and the tables of the benchmarks.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Operation:
    """One operation of a `Communicator`.

    name: the method of `Communicator` and of every transport.
    arguments: of the transports' method, in order. "tensor", "output", "input", "sent" and "received" are tensors,
        "op" is the reduction, "root", "dst" and "src" are ranks of the group.
    counted: the argument that traces and error reports describe; its bytes are the size of the call. None: no tensor.
    whole: the argument whose dim 0 is the group's size times that of the other one; None: all have one shape, or the
        parts of the ranks have different sizes.
    counts_part: ``counted`` is one rank's part, so the size of the call is that of all parts together.
    in_memory: large host tensors can go through the shared memory of a node.
    formula: the operation of `commengine.cost` that predicts its time; None: there is no formula.
    """

    name: str
    arguments: tuple[str, ...]
    counted: str | None
    whole: str | None = None
    counts_part: bool = False
    in_memory: bool = False
    formula: str | None = None

    @property
    def reduces(self) -> bool:
        """Whether it computes: sum, prod, min, max or avg."""
        return "op" in self.arguments

    @property
    def rooted(self) -> bool:
        """Whether one rank has a special role."""
        return "root" in self.arguments

    @property
    def pairwise(self) -> bool:
        """Whether it is point to point: between pairs of ranks, not collective over the group."""
        return "dst" in self.arguments or "src" in self.arguments

    @property
    def split(self) -> bool:
        """Whether some tensor holds a part for each rank, as in every operation with an output and an input."""
        return {"output", "input"} <= set(self.arguments)

    def nbytes(self, counted: int, ranks: int) -> int:
        """The size of a call as nccl-tests counts it: a rank's whole buffer, or the larger of its two buffers.

        counted: bytes of the ``counted`` argument. ranks: the size of the group.
        """
        return counted * ranks if self.counts_part else counted


_ROWS = (
    Operation("all_reduce", ("tensor", "op"), "tensor", in_memory=True, formula="all_reduce"),
    Operation("reduce_scatter", ("output", "input", "op"), "input", "input", in_memory=True, formula="reduce_scatter"),
    Operation("all_gather", ("output", "input"), "output", "output", in_memory=True, formula="all_gather"),
    Operation("broadcast", ("tensor", "root"), "tensor", in_memory=True, formula="broadcast"),
    Operation("reduce", ("tensor", "root", "op"), "tensor", formula="reduce"),
    Operation("gather", ("output", "input", "root"), "input", "output", counts_part=True),
    Operation("scatter", ("output", "input", "root"), "output", "input", counts_part=True),
    Operation("all_to_all", ("output", "input"), "input", formula="all_to_all"),
    Operation("barrier", (), None),
    Operation("send", ("tensor", "dst"), "tensor", formula="p2p"),
    Operation("recv", ("tensor", "src"), "tensor", formula="p2p"),
    Operation("sendrecv", ("sent", "dst", "received", "src"), "sent", formula="p2p"),
)

#: all operations by name
OPERATIONS = {operation.name: operation for operation in _ROWS}

#: the operations that have a way through shared memory, and those of them that reduce
IN_MEMORY = tuple(operation.name for operation in _ROWS if operation.in_memory)
REDUCING_IN_MEMORY = tuple(operation.name for operation in _ROWS if operation.in_memory and operation.reduces)

#: the operations that `commengine.cost` has formulas for
FORMULAS = tuple(dict.fromkeys(operation.formula for operation in _ROWS if operation.formula is not None))
