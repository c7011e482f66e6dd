"""The route of a call on host tensors: decided once for each form of call, and kept as something that can be called.

| route      | used for                                       | the operation's way |
|------------|------------------------------------------------|---------------------|
| window     | tensors that lie in windows, inside one node   | `in_window`         |
| slots      | private tensors, inside one node               | `in_slots`          |
| two levels | reductions of a group that spans nodes         | `in_two_levels`     |
| node       | numbers of rows, on ranks that share memory    | `in_node`           |
| MPI        | everything else                                | `by_mpi`            |

The form of a call is its operation, the shapes and dtypes of its tensors and its other arguments. A table of switch
points (`commengine.host.switch_points`) says from which size on each route is faster than MPI. A call asks for no more
than where its tensors lie, and only in a group that has windows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from commengine.host.switch_points import Point, SwitchPoints, kind_of
from commengine.host.wire import MpiWire
from commengine.operations.operation import Operation, Run
from commengine.operations.uneven.rows import UnevenOperation
from commengine.shared_memory.flags import PRIVATE
from commengine.shared_memory.nodes import Node
from commengine.shared_memory.sequence import SequenceMemory
from commengine.shared_memory.windows import SharedTensors

#: forms that are kept: a program has a few dozens, and one that never repeats itself must not fill the memory
MOST_FORMS = 128


class Form(NamedTuple):
    """What is known about the calls of one form.

    run: runs one. first, second: the bytes of its first and its second tensor. own: the bytes from the first tensor's
    begin to the second's if the call is in place; None if it cannot be. written: the place, among the arguments, of the
    tensor that it writes on this rank.
    """

    run: Run
    first: int
    second: int
    own: int | None
    written: int | None

    @classmethod
    def of(cls, operation: Operation, args: tuple[Any, ...], run: Run, rank: int) -> Form | None:
        """Return the form of a call that has been checked; None if each call of it must be."""
        tensors = [args[place] for place in operation.tensors]
        if not tensors or any(one is None or one.is_complex() for one in tensors):
            return None
        written = operation.written(args, rank)
        place = next((place for place in operation.tensors if any(args[place] is one for one in written)), None)
        if operation.uneven:
            return cls(run, 0, 0, None, place)
        if not all(one.nbytes for one in tensors):
            return None
        rows_of_output = operation.in_place and operation.whole == "output"
        own = rank * tensors[-1].nbytes if rows_of_output else None
        return cls(run, tensors[0].nbytes, tensors[-1].nbytes, own, place)


class Routes:
    """Runs operations on host tensors, for one sequence of collectives: the caller's own, or that of one stream.

    wire: the MPI of the sequence. shared: the tensors in windows; None: everything goes by MPI. points: the same table
    on every rank.
    """

    def __init__(self, wire: MpiWire, shared: SharedTensors | None = None, points: SwitchPoints | None = None) -> None:
        self.wire = wire
        self._shared = shared if wire.size > 1 else None
        self._points = points or SwitchPoints({})
        self._runs: dict[tuple[Any, ...], Run] = {}
        #: the forms of real, dense tensors with memory, whose calls need no more than a look at where the tensors lie
        self.known: dict[tuple[Any, ...], Form] = {}
        self._memory: SequenceMemory | None = None
        self._opened = False

    def run(self, operation: Operation, args: tuple[Any, ...]) -> None:
        """Run a call to its end, on the calling thread. args: the operation's, which have been checked."""
        self.prepared(operation, args)(*args)

    def prepared(self, operation: Operation, args: tuple[Any, ...]) -> Run:
        """Return what runs this call, and any other call of its form, when it gets the call's arguments."""
        form = operation.form(args)
        run = self._runs.get(form)
        if run is None:
            if len(self._runs) >= MOST_FORMS:
                self._runs.clear()
                self.known.clear()
            run = self._runs[form] = self._prepare(operation, args)
            if (known := Form.of(operation, args, run, self.wire.rank)) is not None:
                self.known[form] = known
        return run

    def open(self) -> SequenceMemory | None:
        """Make flags and slots, unless they were made; None, on all ranks, if there is no memory. Collective.

        A stream does it when it is made, because its worker thread would wait in calls that keep the core.
        """
        if not self._opened:
            self._opened = True
            node = None if self._shared is None else self._shared.node
            if self._shared is not None and node is not None:
                self._memory = SequenceMemory.make(
                    self.wire.comm,
                    self._shared,
                    slots=self._points.private_too(node.size, spanning=not node.alone),
                    wait=self.wire.wait,
                    over=lambda comm: Routes(self.wire.over(comm)),
                )
        return self._memory

    def close(self) -> None:
        """Free what was made; the communicator is the caller's. Collective."""
        memory = self._memory
        self.abandon()
        self.wire.free_requests(all=True)
        if memory is not None:
            memory.close()

    def abandon(self) -> None:
        """Let go of what was made, and leave its MPI communicators to the end of MPI. Not collective."""
        self._runs.clear()
        self.known.clear()
        self._memory = None

    def stop(self, reason: str, *, between: bool = False) -> None:
        """Tell the ranks of the node that this one takes part in no more calls. between: see `Flags.stop`."""
        if self._memory is not None:
            self._memory.flags.stop(reason, between=between)

    @property
    def stopped(self) -> str | None:
        """Why a rank of the node has stopped, if it has told."""
        return None if self._memory is None else self._memory.flags.stopped

    def _prepare(self, operation: Operation, args: tuple[Any, ...]) -> Run:
        run = operation.by_mpi(self.wire, *args)
        if operation.in_memory and self._shared is not None:
            run = self._through_memory(operation, args, run, self._shared)
        elif isinstance(operation, UnevenOperation) and self._shared is not None:
            run = self._through_node(operation, run, self._shared)
        return run

    def _through_node(self, operation: UnevenOperation, by_mpi: Run, shared: SharedTensors) -> Run:
        """Return what runs an operation with numbers of rows on ranks that share memory.

        Its sizes differ between the ranks, so no size decides: the ranks of a node tell each other where their inputs
        lie. A group that spans nodes takes MPI.
        """
        windows = shared.segments
        in_node: Run | None = None

        def run(*args: Any) -> None:
            nonlocal in_node
            if in_node is None:
                if operation.needs_windows and not windows:
                    by_mpi(*args)
                    return
                node = shared.node  # asked in a call, because all ranks answer it together
                memory = None if node is None or not node.alone else self.open()
                in_node = by_mpi if memory is None else operation.in_node(memory, by_mpi, *args)
            in_node(*args)

        return run

    def _through_memory(self, operation: Operation, args: tuple[Any, ...], by_mpi: Run, shared: SharedTensors) -> Run:
        """Return what takes the way through memory where that is faster, and ``by_mpi`` elsewhere."""
        assert operation.place is not None
        tensor, name = args[operation.place], operation.name
        nbytes, dtype = tensor.nbytes, tensor.dtype
        kind = kind_of(name, dtype)
        private, beside_windows = (self._points.least_of(name, kind, windows=given) for given in (False, True))
        if nbytes < max(1, beside_windows):
            return by_mpi
        how: Any = self.wire.tree + args[-1] if operation.reduces else args[-1] if operation.rooted else ""
        asked, windows, find = (dtype, how), shared.segments, shared.find
        places = tuple(operation.arguments.index(argument) for argument in operation.in_memory)
        tensors = len(operation.tensors)
        ways: _Ways | None = None

        def run(*args: Any) -> None:
            nonlocal ways
            if nbytes < (beside_windows if windows else private):
                by_mpi(*args)
                return
            if ways is None:
                ways = self._ways(operation, nbytes, dtype)
            memory = ways.memory
            place = next(filter(None, (find(args[one]) for one in places)), None) if windows else None
            if memory is None:
                by_mpi(*args)
            elif ways.two_levels and (place is not None or memory.slots is not None):
                operation.in_two_levels(memory, place, *args[:tensors], how)
            elif ways.window and place is not None:
                operation.in_window(memory, place, *args[:tensors], how)
            elif ways.slots and place is None:
                operation.in_slots(memory, *args[:tensors], how)
            else:
                if windows and ways.compared:  # a rank whose tensor lies elsewhere may take another way, and would wait
                    memory.flags.begin(name, PRIVATE if place is None else place.number, nbytes, asked)
                by_mpi(*args)

        return run

    def _ways(self, operation: Operation, nbytes: int, dtype: torch.dtype) -> _Ways:
        """Return the ways of calls of ``nbytes``. Collective, because the first one makes the memory."""
        node = None if self._shared is None else self._shared.node
        point = Point() if node is None else self._points.point(operation.name, dtype, node.size)
        memory = None if point == Point() else self.open()
        if memory is None or node is None:
            return _Ways(None, False, False, False, False)
        if not node.alone:
            two_levels = operation.reduces and nbytes >= point.two_level and self._two_levels_keep_the_order(node)
            return _Ways(memory, False, False, two_levels, False)
        window, slots = nbytes >= point.window, nbytes >= point.bounce
        return _Ways(memory, window, slots and memory.slots is not None, False, window or slots)

    def _two_levels_keep_the_order(self, node: Node) -> bool:
        """Never in rank order, and in a tree if the ranks of each node are a subtree: 2^k neighbours."""
        if self.wire.order is None:
            return True
        in_order = [rank for ranks in node.table for rank in ranks] == list(range(self.wire.size))
        return self.wire.order == "tree" and in_order and node.size.bit_count() == 1


class _Ways(NamedTuple):
    """The ways of the calls of one form; memory: None if there is none. compared: where windows are, also by MPI."""

    memory: SequenceMemory | None
    window: bool
    slots: bool
    two_levels: bool
    compared: bool
