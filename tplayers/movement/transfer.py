"""Running a plan on tensors, at once or on a stream, forward and backward.

A plan says what each rank sends, receives and keeps (`tplayers.movement.plan`). Every pair of ranks exchanges at most
one message. The transposed operator sends the same messages the other way, and adds them up where a point was sent to
several ranks; the order of its sums is fixed, so its bits depend on the inputs only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from commengine import Communicator, Stream
from tplayers.adjoint_pair import Pair, apply_pair
from tplayers.functions import one_derivative

from .compared import compare, wants_gradient
from .packed import Packed
from .plan import BlockPart, TransferPlan


def transfer(x: Tensor, plan: TransferPlan, comm: Communicator) -> Tensor:
    """Return this rank's new block: what ``plan`` keeps of ``x`` and what the other ranks send.

    x: [..., *plan.source_shape]; the other dimensions (batch, channels), the dtype and ``requires_grad`` are the same
        on every rank. The result is [..., *plan.target_shape], in the memory format of ``x``.

    Every rank of ``comm`` must call it, and must run the backward, which is `transfer_adjoint`. It may be
    differentiated any number of times, and in forward mode, too. Raises ValueError if the shape of ``x`` is not that
    of the plan.
    """
    check_block(x, plan.source_shape, comm)
    return apply_pair(x, *_pair(plan, comm))


def transfer_adjoint(y: Tensor, plan: TransferPlan, comm: Communicator) -> Tensor:
    """Return the transposed operator of `transfer`, from new blocks [..., *plan.target_shape] back to the blocks.

    Each point of the result is the sum of all points of the new blocks that `transfer` makes of it.
    """
    check_block(y, plan.target_shape, comm)
    return apply_pair(y, *_pair(plan, comm)[::-1])


def start_transfer(x: Tensor, plan: TransferPlan, comm: Communicator, stream: Stream | None) -> StartedTransfer:
    """Begin `transfer` on ``stream``; ``wait()`` of the result ends it, and returns the new block.

    Between the two this rank computes what needs no other rank's points. The backward overlaps in the same way: it
    sends the gradient of the new block when the backward reaches ``wait()``, and waits for the sums when it reaches
    this call. It can be differentiated once. ``x`` must not be changed before ``wait()``.
    """
    check_block(x, plan.source_shape, comm)
    started = StartedTransfer(plan, comm, stream)
    started._token = _Start.apply(x, started)  # type: ignore[no-untyped-call]
    return started


class StartedTransfer:
    """A transfer under way: see `start_transfer`."""

    def __init__(self, plan: TransferPlan, comm: Communicator, stream: Stream | None) -> None:
        self._plan, self._comm, self._stream = plan, comm, stream
        self._token: Any = None
        self._forward: Any = None
        self._backward: Any = None

    def wait(self) -> Tensor:
        """Return the new block [..., *plan.target_shape]. Raises RuntimeError if it is called a second time."""
        if self._token is None:
            raise RuntimeError("wait() of a started transfer was called twice: keep the block that the first call gave")
        token, self._token = self._token, None  # the token's graph refers to this object: no circle may remain
        return _Wait.apply(token, self)  # type: ignore[no-untyped-call, no-any-return]


def check_block(x: Tensor, shape: Sequence[int], comm: Communicator) -> None:
    """Raise ValueError if the last dimensions of ``x`` are not ``shape``.

    If the communicator is checked, the ranks also compare dtypes, leading sizes and ``requires_grad``. Then the call is
    collective, and every rank raises an error: CollectiveError for a wrong block, ValueError for tensors that differ,
    CollectiveMismatch if only some ranks would run a backward.
    """
    lead, problem = x.shape[: max(0, x.dim() - len(shape))], None
    if tuple(x.shape[len(lead) :]) != tuple(shape):
        problem = f"a tensor of shape {list(x.shape)} is not this rank's block: its last sizes must be {list(shape)}"
    if comm.checked:
        comm.compare(f"a transfer with requires_grad={wants_gradient(x)}", problem)
        compare("transfer", x.new_empty(lead), comm)
    elif problem is not None:
        raise ValueError(problem)


# Without autograd -------------------------------------------------------------------------------------------------


class ForwardTransfer:
    """A transfer under way that autograd does not see: construction sends, `wait` returns the new block.

    The new block holds what the rank keeps as soon as the object is constructed; ``out`` is this tensor.
    """

    def __init__(self, x: Tensor, plan: TransferPlan, comm: Communicator, stream: Stream | None = None) -> None:
        self._messages = Messages(lambda piece: x[piece.source], x, plan, False, comm, stream)
        self.out = new_block(x, plan.target_shape)
        if not plan.filled:
            self.out.zero_()
        for piece in plan.kept:
            self.out[piece.target] = unfolded(x[piece.source], piece)

    def wait(self) -> Tensor:
        """Put the received parts into the new block, and return it."""
        self._messages.wait(self._put)
        return self.out

    def _put(self, piece: BlockPart, part: Tensor) -> None:
        self.out[piece.target] = unfolded(part, piece)


class AdjointTransfer:
    """The transposed transfer under way, which autograd does not see: construction sends, `wait` adds up."""

    def __init__(self, y: Tensor, plan: TransferPlan, comm: Communicator, stream: Stream | None = None) -> None:
        self._messages = Messages(lambda piece: folded(y[piece.target], piece), y, plan, True, comm, stream)
        self.out = new_block(y, plan.source_shape)
        kept = list(plan.kept)
        # Most often one piece is the whole block: a copy in place of zeros and an addition.
        whole = next((piece for piece in kept if piece.shape == plan.source_shape), None)
        if whole is None:
            self.out.zero_()
        else:
            self.out.copy_(folded(y[whole.target], whole))
            kept.remove(whole)
        for piece in kept:
            self.out[piece.source] += folded(y[piece.target], piece)

    def wait(self) -> Tensor:
        """Add the received parts, in the order of the ranks, and return the sums."""
        self._messages.wait(self._add)
        return self.out

    def _add(self, piece: BlockPart, part: Tensor) -> None:
        self.out[piece.source] += part


class Messages:
    """The messages of one transfer: construction packs and sends, `wait` receives.

    take: returns the part of this rank's tensor that a piece names, as the message carries it. like: a tensor with the
    leading sizes and the dtype of the parts. back: the messages of the transposed transfer.
    """

    def __init__(
        self,
        take: Callable[[BlockPart], Tensor],
        like: Tensor,
        plan: TransferPlan,
        back: bool,
        comm: Communicator,
        stream: Stream | None,
    ) -> None:
        self._packed: Packed | None = None
        if not plan.sends and not plan.receives:
            return
        self._packed = packed = Packed.of(like, plan, back, comm, stream)
        for piece, part in packed.outgoing:
            part.copy_(take(piece))
        self._done = packed.exchange.start()

    def wait(self, put: Callable[[BlockPart, Tensor], object]) -> None:
        """Wait for all messages, and give the parts to ``put``, in the order of the ranks; it may not keep them."""
        packed, self._packed = self._packed, None
        if packed is None:
            return
        self._done.wait()
        for piece, part in packed.incoming:
            put(piece, part)
        packed.free()


def unfolded(part: Tensor, piece: BlockPart) -> Tensor:
    """Return the new block's part of ``piece`` from the source's part; where a point is repeated, a size of 1."""
    return part.flip(piece.flipped) if piece.flipped else part


def folded(part: Tensor, piece: BlockPart) -> Tensor:
    """Return the gradient of the source's part of ``piece``, from that of the new block's part."""
    if piece.repeated:
        part = part.sum(piece.repeated, keepdim=True)
    return part.flip(piece.flipped) if piece.flipped else part


def new_block(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return an uninitialised tensor with the leading sizes of ``x`` in its memory format."""
    size = (*x.shape[: x.dim() - len(shape)], *shape)
    return torch.empty(size, dtype=x.dtype, device=x.device, memory_format=memory_format(x))


def memory_format(x: Tensor) -> torch.memory_format:
    """Return the memory format of ``x``: channels-last where it is that and not contiguous, too."""
    if not x.is_contiguous():
        if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
            return torch.channels_last
        if x.dim() == 5 and x.is_contiguous(memory_format=torch.channels_last_3d):
            return torch.channels_last_3d
    return torch.contiguous_format


# With autograd ----------------------------------------------------------------------------------------------------


def _pair(plan: TransferPlan, comm: Communicator) -> Pair:
    return (
        lambda x: ForwardTransfer(x, plan, comm).wait(),
        lambda y: AdjointTransfer(y, plan, comm).wait(),
    )


class _Start(torch.autograd.Function):
    """Sends the block; its output is an empty tensor that leads autograd from `_Wait` to here."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, started: StartedTransfer) -> Tensor:
        ctx.started = started
        started._forward = ForwardTransfer(x, started._plan, started._comm, started._stream)
        return x.new_empty(0)

    @staticmethod
    @one_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        adjoint, ctx.started._backward = ctx.started._backward, None
        return adjoint.wait(), None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, started: StartedTransfer) -> Tensor:
        ctx.started = started
        forward, started._forward = started._forward, None
        result: Tensor = forward.wait()
        return result

    @staticmethod
    @one_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        started = ctx.started
        started._backward = AdjointTransfer(grads[0], started._plan, started._comm, started._stream)
        return grads[0].new_empty(0), None
