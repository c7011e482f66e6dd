"""How the blocks of keys and values come to a rank of a context group, and how their gradients go back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from commengine import Communicator, Stream, Work


class BlockExchange(Protocol):
    """Brings the blocks of all ranks to each rank, for one pass; collective over the context group."""

    def blocks(self, mine: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(Rank, its keys and values) for each rank, this rank first. mine: those of this rank, contiguous.

        The next block is on its way while the caller computes with one.
        """

    def add(self, owner: int, gradient: Tensor) -> None:
        """Add a gradient of the last block that `blocks` gave, of another rank. It may be overwritten."""

    def total(self) -> Tensor:
        """After the last block: the sum of the other ranks' gradients of this rank's block."""


class RingExchange:
    """Each block goes from rank to rank around a ring, and so do its gradients, one hop behind it.

    of_blocks, of_gradients: streams of ``comm``. A gradient does not wait behind the next block.
    """

    def __init__(self, comm: Communicator, of_blocks: Stream, of_gradients: Stream) -> None:
        self._comm, self._of_blocks, self._of_gradients = comm, of_blocks, of_gradients
        self._arriving: tuple[Work, Tensor, Tensor] | None = None

    def blocks(self, mine: Tensor) -> Iterator[tuple[int, Tensor]]:
        rank, size, block = self._comm.rank, self._comm.size, mine
        for step in range(size):
            following = self._passed_on(block, self._of_blocks) if step < size - 1 else None
            yield (rank - step) % size, block
            if following is not None:
                block = _received(following)

    def add(self, owner: int, gradient: Tensor) -> None:
        if self._arriving is not None:
            gradient = gradient.add_(_received(self._arriving))
        self._arriving = self._passed_on(gradient, self._of_gradients)

    def total(self) -> Tensor:
        assert self._arriving is not None
        return _received(self._arriving)

    def _passed_on(self, sent: Tensor, stream: Stream) -> tuple[Work, Tensor, Tensor]:
        """Begin to send to the next rank and to receive from the one before."""
        rank, size = self._comm.rank, self._comm.size
        received = torch.empty_like(sent)
        work = self._comm.sendrecv(sent, (rank + 1) % size, received, (rank - 1) % size, stream=stream)
        return work, sent, received  # what is sent must live until the work is done


class GatheredExchange:
    """One all-gather brings all blocks, and a reduce-scatter sums their gradients. stream: of ``comm``, or None."""

    def __init__(self, comm: Communicator, stream: Stream | None = None) -> None:
        self._comm, self._stream = comm, stream
        self._gradients: Tensor | None = None
        self._summing: tuple[Work, Tensor] | None = None

    def blocks(self, mine: Tensor) -> Iterator[tuple[int, Tensor]]:
        rank, size = self._comm.rank, self._comm.size
        every = mine.new_empty(size, *mine.shape)
        work = self._comm.all_gather(every, mine.unsqueeze(0), stream=self._stream)
        yield rank, mine
        work.wait()
        for step in range(1, size):
            owner = (rank - step) % size
            yield owner, every[owner]

    def add(self, owner: int, gradient: Tensor) -> None:
        rank, size = self._comm.rank, self._comm.size
        if self._gradients is None:
            self._gradients = gradient.new_empty(size, *gradient.shape)
            self._gradients[rank] = 0.0
        self._gradients[owner] = gradient
        if owner == (rank + 1) % size:  # the last one
            summed = gradient.new_empty(1, *gradient.shape)
            self._summing = self._comm.reduce_scatter(summed, self._gradients, stream=self._stream), summed

    def total(self) -> Tensor:
        assert self._summing is not None
        work, summed = self._summing
        work.wait()
        return summed[0]


def _received(message: tuple[Work, Tensor, Tensor]) -> Tensor:
    message[0].wait()
    return message[2]
