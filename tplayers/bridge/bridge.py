"""Bridge: a call of another program of the job as an operator with an adjoint. docs/bridge.md has the protocol."""

from __future__ import annotations

import atexit
import time
import weakref
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from commengine import CollectiveError, CollectiveTimeout, Communicator
from commengine.host.polling import PollingCalls
from commengine.job_end import abort, in_this_process, say
from commengine.mpi import OwnsCommunicators, load_mpi
from commengine.startup.start import SLOW_SECONDS
from tplayers.functions import one_derivative, outside_graphs

from .blocks import WORDS, BridgeField, SharedPart, shared_parts

if TYPE_CHECKING:
    from mpi4py import MPI

VERSION = 1
#: the tags of messages: what a program asks of the other one, its answer, and parts of fields
_ASK, _ANSWER, _DATA = 1, 2, 3
#: what a program asks
_END, _CALL, _GRADIENT, _FORGET = 0, 1, 2, 3
#: the fields of a program: the one that it gives when it calls or answers, and the one that it takes
_GIVEN, _TAKEN = 0, 1
#: the bridges of this process that are not closed
_OPEN: set[Bridge] = set()


def _end_the_other_program() -> None:
    """At the end of the process: a program of which the bridge is open would wait for ever."""
    for bridge in _OPEN:
        if not bridge._ended and not load_mpi().Is_finalized():
            name = f"rank {bridge.comm.rank} of {bridge.comm.name!r}"
            say(f"Bridge: {name} ends and has not closed its bridge: ending the job")
            abort(1)


atexit.register(in_this_process(_end_the_other_program))


class Bridge(OwnsCommunicators):
    """Fields and gradients between this program and another one of the same MPI job, whatever language it has.

    One program calls the other (`call`), and the other one answers (`answer`, or the functions of
    ``commengine_bridge.h``). Both may have any number of ranks, and blocks of their own. Each point travels once, from
    the rank that has it to the rank that needs it.

    other: an intercommunicator to the other program, such as ``launch.split_world().other``. It is duplicated.
    comm: this program's ranks, in the order of the intercommunicator's local group.
    gives, takes: the fields that this program gives and takes when it calls or answers.
    timeout: seconds after which waiting for the other program raises CollectiveTimeout; None: never. After a minute a
        program says that it waits.

    Collective over both programs. The ranks of both tell each other their blocks once: 30 numbers a rank. Raises
    ValueError on every rank of this program if the other one describes the fields in another way, or its blocks do not
    have each point once. Such an error ends both programs within `launch.abort_on_error`.

    Each rank of a program must make the same calls, and run the backward of each; every program must close it.
    """

    def __init__(
        self,
        other: MPI.Intercomm,
        comm: Communicator,
        gives: BridgeField,
        takes: BridgeField,
        *,
        timeout: float | None = None,
    ) -> None:
        self.comm, self.gives, self.takes, self.timeout = comm, gives, takes, timeout
        for name, field in (("gives", gives), ("takes", takes)):
            blocks = np.prod(field.decomposition.grid_shape)
            if blocks != comm.size:
                raise ValueError(f"Bridge: {name} has {blocks} blocks for the {comm.size} ranks of this program")
        comm.compare(f"Bridge(gives={gives}, takes={takes})")
        self._since, self._told, self._own = 0.0, array("q"), comm.mpi.Dup()
        self._other: Any = load_mpi().COMM_NULL
        self._waiting = PollingCalls(self._own, self._look)
        try:
            if (version := self._meet(other)) != VERSION:
                raise CollectiveError(f"Bridge: the other program's bridge is of version {version}, not {VERSION}")
            self._other = other.Dup()
            self._parts = self._shared()
        except CollectiveTimeout:  # MPI still has the messages
            raise
        except (CollectiveError, ValueError):  # on every rank
            self._free()
            raise
        self._calls, self._answers, self._ended = 0, False, False
        self._forgotten: list[int] = []
        #: of this program's answers: the inputs and results by the number of the call
        self._graphs: dict[int, tuple[Tensor, Tensor]] = {}
        #: memory for messages of points that do not lie one behind the other, by the rank of the other program
        self._messages: dict[int, Tensor] = {}
        #: the memory of the last two fields of each kind, and what was given of it
        self._received: list[list[tuple[np.ndarray[Any, Any], weakref.ref[Any]]]] = [[], []]
        _OPEN.add(self)

    def _shared(self) -> list[list[SharedPart]]:
        """What this rank gives to each rank of the other program, and what it takes. Collective over both programs."""
        mine = array("q", [*self.gives.words(self.comm.rank), *self.takes.words(self.comm.rank)])
        theirs = np.empty((self._other.remote_size, len(mine)), np.int64)
        self._other.Allgather([mine, load_mpi().INT64_T], [theirs, load_mpi().INT64_T])
        described = theirs[:, WORDS:], theirs[:, :WORDS]  # it takes what this program gives
        found = []
        for name, field, words in zip(("gives", "takes"), (self.gives, self.takes), described, strict=True):
            try:
                found.append(shared_parts(field, self.comm.rank, words))
            except ValueError as error:
                raise ValueError(f"Bridge: the field that this program {name}: {error}") from None
        return found

    # This program calls ------------------------------------------------------------------------------------------

    @outside_graphs
    def call(self, x: Tensor) -> Tensor:
        """Return the other program's answer to ``x``. Its backward asks the other program for the gradient.

        x: this rank's block of ``gives``: [*leading, *block]. The result is this rank's block of ``takes``, on the
        device of ``x``. It can be differentiated once. Collective over this program. Raises ValueError on every rank if
        ``x`` of one rank is no such tensor, and CollectiveTimeout.
        """
        self._require_open()
        problem = self.gives.problem(x, self.comm.rank)
        wanted = problem is None and x.requires_grad and torch.is_grad_enabled()
        _, (wrong, followed) = self.comm.extremes([problem is not None, wanted])
        if wrong:
            raise ValueError(f"Bridge.call: {problem or 'another rank gave no block of the field'}")
        if wanted != followed:
            x = x.detach().requires_grad_()
        return _BridgeCall.apply(x, self)  # type: ignore[no-untyped-call, no-any-return]

    def _ask(self, what: int, number: int, keep: bool, given: Tensor) -> Tensor:
        """Send a field, or the gradient of the one that was taken, and return what the other program answers."""
        self._require_open()
        while self._forgotten:
            self._tell(_ASK, _FORGET, self._forgotten.pop(), False)
        self._tell(_ASK, what, number, keep)
        gives, takes = (_GIVEN, _TAKEN) if what == _CALL else (_TAKEN, _GIVEN)
        self._send(gives, given)
        if self._hear(_ANSWER)[0] != what:
            asked = "gradient" if what == _GRADIENT else "call"
            raise CollectiveError(f"Bridge: the other program was asked for a {asked}, and answered something else")
        return self._receive(takes)

    # This program answers ----------------------------------------------------------------------------------------

    def answer(self, function: Callable[[Tensor], Tensor]) -> Literal["call", "gradient", "end"]:
        """Wait for what the other program asks, answer it, and return what it was.

        function: from this rank's block of ``takes`` to its block of ``gives``; differentiable by torch. Its graph
        stays until the other program has no more use for it.

        "call": the function was called. "gradient": the gradient of a call went to the other program, and the gradients
        of parameters that the function uses were added to their ``grad``. "end": the other program has closed its
        bridge. Collective over this program. Raises ValueError if the function's result is no such block.
        """
        self._require_open()
        self._answers = True
        what, number, keep = self._hear(_ASK)
        while what == _FORGET:
            self._graphs.pop(number, None)
            what, number, keep = self._hear(_ASK)
        if what == _END:
            self._ended = True
            self._graphs.clear()
            return "end"
        if what == _CALL:
            x = self._receive(_TAKEN).requires_grad_(bool(keep))
            with torch.set_grad_enabled(bool(keep)):
                y = function(x)
            if problem := self.gives.problem(y, self.comm.rank):
                raise ValueError(f"Bridge.answer: the function's result is no block of the field: {problem}")
            if keep:
                low, _ = self.comm.extremes([y.requires_grad])
                if not low[0]:
                    lacks = "this rank's" if not y.requires_grad else "another rank's"
                    raise ValueError(
                        f"Bridge.answer: {lacks} result has no graph, and the other program may ask for its gradient: "
                        "compute it without torch.no_grad() and detach()"
                    )
                self._graphs[number] = x, y
            self._tell(_ANSWER, _CALL, number, False)
            self._send(_GIVEN, y.detach())
            return "call"
        if number not in self._graphs:
            raise CollectiveError(
                f"Bridge.answer: call {number} was not to be kept, or is forgotten: it has no gradient"
            )
        x, y = self._graphs[number]
        torch.autograd.backward(y, self._receive(_GIVEN).to(y.device), retain_graph=True)
        self._tell(_ANSWER, _GRADIENT, number, False)
        found, x.grad = x.grad, None  # it may be asked for again
        self._send(_TAKEN, torch.zeros_like(x) if found is None else found)
        return "gradient"

    # Messages ----------------------------------------------------------------------------------------------------

    def _tell(self, tag: int, what: int, number: int, keep: bool) -> None:
        """Rank 0 tells rank 0 of the other program."""
        if self.comm.rank == 0:
            self._other.Send([array("q", [what, number, keep]), load_mpi().INT64_T], 0, tag)

    def _hear(self, tag: int) -> list[int]:
        """Return (what, number, keep) that the other program told, on every rank.

        The wait leaves the core to other programs: the other one may compute on it.
        """
        self._told, self._since = array("q", bytes(24)), time.monotonic()  # MPI writes there after a timeout, too
        words = [self._told, load_mpi().INT64_T]
        if self.comm.rank == 0:
            self._waiting.wait(self._other.Irecv(words, 0, tag).Test)
        self._waiting.wait(self._own.Ibcast(words, 0).Test)
        return list(self._told)

    def _meet(self, other: MPI.Intercomm) -> int:
        """Wait until the other program opens its bridge, too. Returns its version."""
        here, there, self._since = array("i", [VERSION]), array("i", [VERSION]), time.monotonic()
        self._opening = here, there  # MPI writes there after a timeout, too
        mpi = load_mpi()
        if self.comm.rank == 0:
            sent, came = other.Isend([here, mpi.INT], 0, _ASK), other.Irecv([there, mpi.INT], 0, _ASK)
            self._waiting.wait(lambda: mpi.Request.Testall([sent, came]))
        self._waiting.wait(self._own.Ibcast([there, mpi.INT], 0).Test)
        return int(there[0])

    def _require_open(self) -> None:
        if self._other == load_mpi().COMM_NULL:
            raise CollectiveError("Bridge: it is closed")

    def _look(self) -> None:
        waited = time.monotonic() - abs(self._since)
        if self.timeout is not None and waited > self.timeout:
            raise CollectiveTimeout(
                f"rank {self.comm.rank} of {self.comm.name!r} has waited for {self.timeout:g} s for the other program "
                "of its bridge, or for a rank of its own program that has not asked or answered"
            )
        if self._since > 0 and waited > SLOW_SECONDS:
            self._since = -self._since  # said
            if self.comm.rank == 0:
                say(f"Bridge: the ranks of {self.comm.name!r} have waited for {SLOW_SECONDS:g} s for the other program")

    def _send(self, which: int, x: Tensor) -> None:
        x, started = x.detach().cpu(), []
        for part in self._parts[which]:
            piece = x[part.at]
            message = self._message(piece, part.peer)
            if message is not piece:
                message.copy_(piece)
            started.append(self._other.Isend(message.numpy(), part.peer, _DATA))
        self._complete(started)

    def _receive(self, which: int) -> Tensor:
        out = torch.from_numpy(self._memory_of(which))
        pieces = [(part.peer, out[part.at]) for part in self._parts[which]]
        messages = [(peer, piece, self._message(piece, peer)) for peer, piece in pieces]
        self._complete([self._other.Irecv(message.numpy(), peer, _DATA) for peer, _, message in messages])
        for _, piece, message in messages:
            if message is not piece:
                piece.copy_(message)
        return out

    def _complete(self, started: list[MPI.Request]) -> None:
        """Wait for messages. A poll, which can time out, moves large ones more slowly."""
        if self.timeout is None:
            load_mpi().Request.Waitall(started)
        else:
            self._since = time.monotonic()
            self._waiting.wait(lambda: load_mpi().Request.Testall(started))

    def _memory_of(self, which: int) -> np.ndarray[Any, Any]:
        """Memory for a field: that of an earlier one that nobody holds, because new memory takes time to write to.

        NumPy asks for huge pages, and torch does not: 64 MB of new memory are written in a third of the time. Each
        field gets a view of its own, which its tensors hold: the memory is free when the view is gone.
        """
        kept = self._received[which]
        memory = next((one for one, given in kept if given() is None), None)
        if memory is None:
            field = self.takes if which == _TAKEN else self.gives
            memory = np.empty(field.local_shape(self.comm.rank), f"f{field.dtype.itemsize}")
        found = memory.view()
        others = [(one, given) for one, given in kept if one is not memory]
        self._received[which] = [(memory, weakref.ref(found)), *others[:1]]
        return found

    def _message(self, piece: Tensor, peer: int) -> Tensor:
        """``piece`` itself if it is contiguous, otherwise memory for it: new memory would cost as much as its copy."""
        if piece.is_contiguous():
            return piece
        memory = self._messages.get(peer)
        if memory is None or memory.numel() < piece.numel() or memory.dtype != piece.dtype:
            memory = self._messages[peer] = torch.empty(piece.numel(), dtype=piece.dtype)
        return memory[: piece.numel()].view(piece.shape)

    def close(self) -> None:
        """Free the communicators; may be called again. A program that has not answered tells the other one the end.

        Collective over both programs.
        """
        if self._other == load_mpi().COMM_NULL:
            return
        if self._answers and not self._ended:
            raise CollectiveError("Bridge.close: the other program has not ended: answer() until it returns 'end'")
        _OPEN.discard(self)
        if not self._answers:
            self._tell(_ASK, _END, 0, False)
        self._free()

    def _free(self) -> None:
        for one in (self._other, self._own):
            if one != load_mpi().COMM_NULL:
                one.Free()


class _Kept:
    """A call that the other program keeps for its gradient, until the graph here is gone."""

    def __init__(self, bridge: Bridge, number: int) -> None:
        self._forgotten, self.number = bridge._forgotten, number

    def __del__(self) -> None:
        self._forgotten.append(self.number)


class _BridgeCall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bridge: Bridge) -> Tensor:
        keep = ctx.needs_input_grad[0]
        bridge._calls += 1
        ctx.bridge, ctx.kept = bridge, _Kept(bridge, bridge._calls) if keep else None
        ctx.save_for_backward(x)
        return bridge._ask(_CALL, bridge._calls, keep, x).to(x.device)

    @staticmethod
    @one_derivative
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return ctx.bridge._ask(_GRADIENT, ctx.kept.number, True, grad).to(x.device), None
