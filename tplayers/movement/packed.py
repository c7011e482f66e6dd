"""The memory of a transfer's messages, and their exchange, which are prepared once and kept.

A solver repeats its transfers: the same plan, dtype and leading sizes at each time step. Each of them has one flat
buffer for each rank that it sends to or receives from, and one `commengine.Exchange` of all. A transfer that begins
while an equal one is under way makes a second set.

The stream of the transfers owns what is kept, or the communicator, where they have none: it goes with its owner. A set
that the last `_SWEPT` transfers there have not used is let go, so memory of sizes that a program has left behind does
not stay.
"""

from __future__ import annotations

import math
import weakref

import torch
from torch import Tensor

from commengine import Communicator, Stream

from .plan import BlockPart, PartsByRank, TransferPlan

#: transfers after which an owner lets go of what none of them has used
_SWEPT = 256


class Packed:
    """The buffers of a transfer. outgoing, incoming: the pieces, and their parts of the buffers."""

    def __init__(
        self,
        like: Tensor,
        plan: TransferPlan,
        back: bool,
        comm: Communicator,
        stream: Stream | None,
        kept: _Kept | None,
    ) -> None:
        self._kept = None if kept is None else weakref.ref(kept)
        self._plan = plan  # it lives as long as its key
        sends, receives = (plan.receives, plan.sends) if back else (plan.sends, plan.receives)
        lead = like.shape[: like.dim() - len(plan.source_shape)]
        with torch.inference_mode(False):  # a tensor of inference mode could not be used outside of it
            self.outgoing, sent = _buffers(sends, lead, like)
            self.incoming, received = _buffers(receives, lead, like)
        self.exchange = comm.exchange(sent, received, stream=stream)

    @classmethod
    def of(cls, like: Tensor, plan: TransferPlan, back: bool, comm: Communicator, stream: Stream | None) -> Packed:
        """Return free buffers for one transfer. like: a tensor with the leading sizes and the dtype of the parts."""
        if not like.is_cpu:  # the allocator of a device knows which stream still reads which memory
            return cls(like, plan, back, comm, stream, None)
        owner = (comm if stream is None else stream).kept
        found = owner.get(__name__)
        if found is None:
            found = owner[__name__] = _Sets()
        kept = found.at((id(plan), back, like.dtype, like.shape[: like.dim() - len(plan.source_shape)]))
        return kept.pop() if kept else cls(like, plan, back, comm, stream, kept)

    def free(self) -> None:
        """Say that nobody uses the buffers any more."""
        if self._kept is not None and (kept := self._kept()) is not None:
            kept.append(self)


class _Kept(list[Packed]):
    """Sets of one key that nobody uses. used: by one of the last transfers."""

    used = True


class _Sets(dict[tuple[object, ...], _Kept]):
    """What one owner keeps."""

    transfers = 0

    def at(self, key: tuple[object, ...]) -> _Kept:
        """Return the free sets of ``key``."""
        self.transfers += 1
        if self.transfers % _SWEPT == 0:
            for old, kept in list(self.items()):
                if not kept.used:
                    del self[old]
                kept.used = False
        found = self.get(key)
        if found is None:
            found = self[key] = _Kept()
        found.used = True
        return found


def _buffers(
    messages: PartsByRank, lead: torch.Size, like: Tensor
) -> tuple[list[tuple[BlockPart, Tensor]], list[tuple[Tensor, int]]]:
    """Return the pieces with their parts of the buffers, and the buffers with their ranks."""
    parts, buffers = [], []
    for peer, pieces in messages:
        sizes = [lead.numel() * math.prod(piece.shape) for piece in pieces]
        buffer = torch.empty(sum(sizes), dtype=like.dtype, device=like.device)
        buffers.append((buffer, peer))
        for piece, flat in zip(pieces, buffer.split_with_sizes(sizes), strict=True):
            parts.append((piece, flat.view(*lead, *piece.shape)))
    return parts, buffers
