"""What an operation of a Communicator is: its row in the tables, and its ways to the wire; `Call` is one call of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from commengine.agreement import Shown, describe
from commengine.torch_private import private

#: runs a call whose form it was made for; gets the arguments of the operation
Run = Callable[..., None]

#: the arguments that are tensors, and those of them that the operation reads and writes
TENSORS = ("tensor", "output", "input", "sent", "received")
_READ, _WRITTEN = ("tensor", "input", "sent"), ("tensor", "output", "received")


def _marker() -> Callable[[tuple[Tensor, ...]], object]:
    """What tells autograd that tensors are written: torch's public function takes two times as long as its own one."""
    own: Callable[[tuple[Tensor, ...]], object] = private("_increment_version")
    try:
        own(())
    except TypeError:  # of an older torch, whose function takes one tensor
        return lambda tensors: list(map(torch.autograd.graph.increment_version, tensors))
    return own


mark_written = _marker()


class Touched(NamedTuple):
    """A tensor of a call, and whether the call reads and writes it."""

    tensor: Tensor
    read: bool
    written: bool


class Operation:
    """One operation, from the public call to the wire. A subclass has a file of its own in this folder.

    name: the method of `Communicator`.
    arguments: of the ways below, in order. "tensor", "output", "input", "sent" and "received" are tensors, "op" is the
        reduction, "root", "dst" and "src" are ranks of the group.
    counted: the argument that traces and error reports describe; its bytes are the size of the call. None: no tensor.
    whole: the argument whose dim 0 is the group's size times that of the other one; None: all have one shape, or the
        parts of the ranks have different sizes.
    counts_part: ``counted`` is one rank's part, so the size of the call is that of all parts together.
    in_memory: the arguments that may lie in a window, if large host tensors can go through the memory of a node.
    formula: the operation of `commengine.cost` that predicts its time; None: there is no formula.
    in_place: one rank's rows of one tensor may be the other tensor.
    uneven: each rank gives another number of rows (`commengine.operations.uneven.rows`).

    The ways get what carries the data, and then the operation's arguments, which have been checked. `by_nccl` enqueues
    a call. `by_mpi` prepares the calls of one form: it gets the arguments of the first one, and what it
    returns runs every call whose tensors have these shapes and dtypes, and whose other arguments are the same.
    An operation ``in_memory`` has two or three more ways, which a node's ranks take together: `in_window`, where the
    tensor lies in a window, `in_slots`, where it is private, and `in_two_levels`, if it reduces. Their last argument is
    the reduction, the root, or "".
    """

    name: ClassVar[str]
    arguments: ClassVar[tuple[str, ...]]
    counted: ClassVar[str | None]
    whole: ClassVar[str | None] = None
    counts_part: ClassVar[bool] = False
    in_memory: ClassVar[tuple[str, ...]] = ()
    formula: ClassVar[str | None] = None
    in_place: ClassVar[bool] = False
    uneven: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        if "arguments" in vars(cls):
            cls.tensors = tuple(place for place, name in enumerate(cls.arguments) if name in TENSORS)
            cls.place = None if cls.counted is None else cls.arguments.index(cls.counted)

    #: the places of the tensors among the arguments, and that of ``counted``
    tensors: ClassVar[tuple[int, ...]]
    place: ClassVar[int | None]

    def by_mpi(self, wire: Any, *args: Any) -> Run:
        """Return what runs calls of the form of ``args`` by MPI. wire: a `commengine.host.wire.MpiWire`."""
        raise NotImplementedError

    def by_nccl(self, wire: Any, *args: Any) -> None:
        """Enqueue a call. wire: a `commengine.device.nccl.NcclWire`."""
        raise NotImplementedError

    def in_window(self, memory: Any, place: Any, *args: Any) -> None:
        """Run a call on tensors in windows. memory: a `commengine.shared_memory.sequence.SequenceMemory`."""
        raise NotImplementedError

    def in_slots(self, memory: Any, *args: Any) -> None:
        """Run a call on private tensors."""
        raise NotImplementedError

    def in_two_levels(self, memory: Any, place: Any, *args: Any) -> None:
        """Run a call of a group that spans nodes: inside each node, and between the nodes. place: None if private."""
        raise NotImplementedError

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

    def form(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return what `by_mpi` depends on: the name, each tensor's shape and dtype, and the other arguments."""
        key: tuple[Any, ...] = (self.name,)
        for argument in args:
            key += (argument.shape, argument.dtype) if isinstance(argument, Tensor) else (argument,)
        return key

    def touched(self, args: tuple[Any, ...]) -> list[Touched]:
        """Return the tensors of a call on this rank, and whether it reads and writes them."""
        named = [(self.arguments[place], args[place]) for place in self.tensors if args[place] is not None]
        return [Touched(one, name in _READ, name in _WRITTEN and self.name != "send") for name, one in named]

    def written(self, args: tuple[Any, ...], rank: int) -> tuple[Tensor, ...]:
        """Return the tensors that a call writes on this rank."""
        at_root = self.rooted and args[self.arguments.index("root")] == rank
        only_read = {"broadcast": at_root, "reduce": not at_root}.get(self.name, False)
        return () if only_read else tuple(one.tensor for one in self.touched(args) if one.written)

    def mark(self, args: tuple[Any, ...], rank: int) -> None:
        """Tell autograd which tensors a call writes on this rank, so that a backward that needs the old ones fails."""
        if written := self.written(args, rank):
            mark_written(written)

    def standing(self, args: tuple[Any, ...]) -> Tensor | None:
        """Return the tensor that stands for a call, None for a barrier."""
        return None if self.place is None else args[self.place]

    def called(self, args: tuple[Any, ...], ranks: int) -> Call:
        """Return the call with these arguments, as the row describes it. ranks: the group's size."""
        named = dict(zip(self.arguments, args, strict=True))
        tensor = self.standing(args)
        peers = tuple(named[argument] for argument in ("dst", "src") if argument in named)
        root = named.get("root", peers[0] if peers else None)
        nbytes = 0 if tensor is None else self.nbytes(tensor.nbytes, ranks)
        return Call(self, args, tensor, named.get("op"), root, nbytes, peers)

    def spans(self, args: tuple[Any, ...]) -> list[tuple[int, int, bool]]:
        """Return the memory of a call's tensors: its begin, its end, and whether the call writes it.

        It is the same on all ranks whose tensors lie alike: a rooted operation counts as writing on every rank, and a
        reduce-scatter in place, which writes other rows on each rank, as writing its whole input.
        """
        touched = [one for one in self.touched(args) if one.tensor.nbytes]
        found = [(one.tensor.data_ptr(), one.tensor.data_ptr() + one.tensor.nbytes, one.written) for one in touched]
        if len(found) == 2:
            (start, end, _), (other, its_end, _) = found
            if start < its_end and other < end:
                return [(min(start, other), max(end, its_end), True)]
        return found


class Call(NamedTuple):
    """A call of an operation, and what comparisons, traces and reports say about it.

    tensor: the tensor that stands for the call, None for a barrier. redop: the reduction. root: the root, or the peer
    of a send or receive. nbytes: the size of the call. peers: the ranks that a message goes to and comes from.
    """

    operation: Operation
    args: tuple[Any, ...]
    tensor: Tensor | None
    redop: str | None
    root: int | None
    nbytes: int
    peers: tuple[int, ...]

    def __str__(self) -> str:
        return describe(self.name, self.compared, self.redop, self.root)

    @property
    def name(self) -> str:
        """The operation's name."""
        return self.operation.name

    @property
    def rows(self) -> tuple[Any, ...]:
        """The numbers of rows among the arguments; a list is filled while the call runs."""
        return tuple(one for one in self.args if isinstance(one, tuple | list)) if self.operation.uneven else ()

    @property
    def compared(self) -> Tensor | Shown | None:
        """What the ranks compare of its tensor."""
        tensor = self.tensor
        if tensor is None or not self.operation.uneven:
            return tensor
        return Shown(tensor.shape[1:], tensor.dtype, tensor.is_cpu)
