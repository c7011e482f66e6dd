"""ContextGroup: the ranks that share a sequence, and the method by which their attention sees all of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from commengine import Communicator
from tplayers.functions import lowered
from tplayers.placement import require_one_of

from .blockwise import Blockwise
from .chunks import SequenceChunks
from .exchanges import BlockExchange, GatheredExchange, RingExchange
from .ulysses import whole_sequences

#: "ulysses": the ranks exchange positions for heads. "ring": keys and values travel around a ring. "gather": an
#: all-gather brings them.
ContextMethod: TypeAlias = Literal["ulysses", "ring", "gather"]

CONTEXT_METHODS = get_args(ContextMethod)


class ContextGroup:
    """The ranks of ``comm``, each of which has a part of every sequence. Collective over ``comm``.

    method: how attention sees the whole sequence.

    - "ulysses": two all-to-alls of queries, keys, values and results in each direction; each rank then computes some
      heads of whole sequences. ``comm.size`` must divide the heads of a rank of the tensor group. The number of
      elements that a rank sends falls with ``comm.size``.
    - "ring": each rank computes with the keys and values of one rank while those of the next one arrive. What a rank
      sends hardly falls with ``comm.size``. Grouped queries make it small, and any number of heads will do.
    - "gather": one all-gather of the keys and values, which are in memory together during the pass.

    "ring" and "gather" add results over blocks of keys, whose number is that of the ranks; so their bits depend on it.

    causal: True gives each rank an early and a late chunk of a sequence with "ring" and "gather" (`SequenceChunks`).
    threaded: host streams with threads, which move blocks while the rank computes, and take time from it. False: MPI
    moves those of "ring" while some call of it runs, and "gather" waits for its all-gather. Each group makes streams of
    its own, so make it once. Raises ValueError for another method, and CollectiveMismatch if ranks differ.
    """

    def __init__(
        self, comm: Communicator, method: ContextMethod = "ulysses", *, causal: bool = True, threaded: bool = True
    ) -> None:
        require_one_of(CONTEXT_METHODS, context_method=method)
        if comm.size > 1:  # other ways send other messages, and would wait for each other
            comm.compare(f"ContextGroup(method={method!r}, causal={causal!r}, threaded={threaded!r})")
        self.comm, self.method, self.causal = comm, method, causal
        self.chunks = SequenceChunks(comm.size, zigzag=causal and method != "ulysses")
        # NCCL's streams have no threads, and messages of device tensors that MPI carries need them.
        queued = threaded or comm.device.type != "cpu"
        count = {"ulysses": 0, "gather": int(queued), "ring": 2}[method] if comm.size > 1 else 0
        self._streams = [comm.new_stream(threaded=queued) for _ in range(count)]

    def part(self, s: int) -> int:
        """How many positions of a sequence of ``s`` a rank has."""
        return s // self.comm.size

    def positions(self, s: int, like: Tensor) -> Tensor:
        """This rank's positions in a sequence of ``s``, on the device of ``like``: int64 [s / comm.size]."""
        return self.chunks.positions(self.comm.rank, s, like.device)

    def rows(self, rows: int, shard: int, shards: int, like: Tensor) -> Tensor:
        """The positions of shard number ``shard`` of this rank's part, which has ``rows`` rows: int64 [rows]."""
        whole = rows * shards * self.comm.size
        return self.positions(whole, like)[shard * rows : (shard + 1) * rows]

    def take(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's part of ``whole`` along ``dim``, the sequence."""
        return self.chunks.take(whole, self.comm.rank, dim)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, drawn: Tensor | int | None, bias: Tensor | None, *, dropout: float,
        core: Callable[[Tensor, Tensor, Tensor, Tensor | int | None, Tensor | None], Tensor],
    ) -> Tensor:  # fmt: skip
        """The result [b, heads, s / comm.size, d] of attention to the whole sequence.

        q [b, heads, s / comm.size, d]; k, v [b, groups, s / comm.size, d]. drawn: the keys [b, heads] of a mask by
        position, the seed of a fused mask ("ulysses" alone, else ValueError), or None. bias: of whole sequences, as in
        `Blockwise`. core: attention on one rank. Every rank must call it and run its backward. It does not compile.
        """
        if torch.compiler.is_compiling():
            raise NotImplementedError("a context group does not compile: its messages have no operators of a graph")
        q, k, v = lowered(q, k, v)
        if self.comm.size == 1:
            return core(q, k, v, drawn, bias)
        if self.method == "ulysses":
            if isinstance(drawn, Tensor):  # the keys of the heads that this rank computes
                drawn = drawn.chunk(self.comm.size, 1)[self.comm.rank]
            return whole_sequences(q, k, v, self.comm, lambda q, k, v: core(q, k, v, drawn, bias))
        if isinstance(drawn, int):
            raise ValueError(
                f"dropout_mask='fused' excludes context_method={self.method!r}: a kernel that draws a mask sees some "
                "of the keys only; use 'position', or context_method='ulysses'"
            )
        way = Blockwise(self.chunks, self.comm.rank, self._exchange, self.causal, dropout)
        return way(q, k, v, drawn, bias)

    def _exchange(self) -> BlockExchange:
        if self.method == "gather":
            return GatheredExchange(self.comm, *self._streams)
        return RingExchange(self.comm, *self._streams)
