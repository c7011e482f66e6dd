"""StageMessages: the activations and gradients that a pipeline stage exchanges with its neighbours."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from commengine import Communicator, Stream, Work

from .orders import Action, in_turn


class StageMessages:
    """The messages of one rank of ``pipeline``, while it computes. Collective over it.

    A rank sends activations to the next rank, and gradients to the one before; the last rank and the first one are
    neighbours if ranks have several ``chunks``. A message is [s, b, h], or with sequence parallelism this rank's shard
    of it (Narayanan et al. 2021, section 4.1).

    threaded: host streams with threads, which move messages while the rank computes, and take time from it. Otherwise
    MPI moves a message while some call of it runs. Messages of device tensors go on streams in any case.

    Each sender sends in the order of its actions, and its receiver knows this order. A receive begins one message
    before it is needed. No message waits behind another one: where a stream does one thing after the other, each
    direction of each link has a stream of its own.

    On a device the first training pass and the first evaluation are different. CUDA loads a kernel when it is launched
    for the first time, and may then wait until the device has nothing left to do (CUDA Programming Guide, "Lazy
    Loading"). A receive that runs meanwhile must not need a later message of this rank, and a message that was sent
    must find its receive. So there is one order of the actions of all ranks, and each receive begins before the first
    action that comes after the sender's (`trainers.pipeline.orders.in_turn`).
    """

    def __init__(self, pipeline: Communicator, chunks: int, *, threaded: bool) -> None:
        self.pipeline, self.chunks = pipeline, chunks
        rank, size = pipeline.rank, pipeline.size
        self._after, self._before = (rank + 1) % size, (rank - 1) % size
        queued = threaded or pipeline.device.type != "cpu"
        #: the number of the stream of link n, which joins rank n to the next one. A rank's two links have two numbers
        self._links = [n % 2 if queued else 0 for n in range(size)]
        if queued and size % 2 and chunks > 1:
            self._links[-1] = 2
        count = max(self._links) + 1
        self.activation_streams, self.gradient_streams = (
            [pipeline.new_stream(threaded=queued) for _ in range(count)] for _ in ("activations", "gradients")
        )
        self._sent: deque[Work] = deque()  # each keeps its tensor
        self._on_host = pipeline.device.type == "cpu"
        self._connected = self._on_host
        self._loaded: set[bool] = set()  # whether passes with backwards, and without, have loaded their kernels

    def begin(self, orders: Sequence[Sequence[Action]], like: Callable[[int], Tensor], most: int | None = None) -> None:
        """Begin a pass in which each rank does its order. like: new memory for a message of a micro-batch.

        most: messages that may be on their way before a further send waits. None: the order bounds them.
        """
        self._most = most
        if not self._connected and any(orders):
            self._connect(like)
        backward = any(action.backward for one in orders for action in one)
        ahead = self._on_host or backward in self._loaded
        self._loaded.add(backward)
        self._turns = iter([] if ahead else in_turn(orders))
        rank, after, before = self.pipeline.rank, self._after, self._before
        sent = [self._target(before, action) for action in orders[before] if not action.backward]
        given = [self._target(after, action) for action in orders[after] if action.backward]
        inputs, gradients = self.activation_streams[self._links[before]], self.gradient_streams[self._links[rank]]
        self._inputs = _Inbox(self.pipeline, before, inputs, sent, like, ahead, backward=False)
        self._incoming = _Inbox(self.pipeline, after, gradients, given, like, ahead, backward=True)

    def _connect(self, like: Callable[[int], Tensor]) -> None:
        """Send a message over every link in each direction, before a pass.

        NCCL connects two ranks at their first message, and until then it blocks the host. A stage that begins to
        receive early would wait for its neighbour, which begins to receive from it.
        """
        rank, last = self.pipeline.rank, self.pipeline.size if self.chunks > 1 else self.pipeline.size - 1
        ways = ((self.activation_streams, "send", "recv"), (self.gradient_streams, "recv", "send"))
        for number in sorted(set(self._links)):
            for streams, after, before in ways:
                with self.pipeline.coalesce(stream=streams[number]):
                    for link, peer, name in ((rank, self._after, after), (self._before, self._before, before)):
                        if link < last and self._links[link] == number:
                            getattr(self.pipeline, name)(like(0), peer)
        self._connected = True

    def before(self, action: Action) -> None:
        """Begin the receives that must begin before an action. To call before each action of a pass."""
        for rank, done in self._turns:
            if rank == self.pipeline.rank:
                assert done == action
                return
            neighbour, inbox = (self._after, self._incoming) if done.backward else (self._before, self._inputs)
            if rank == neighbour and self._target(rank, done) is not None:
                inbox.begin()

    def _target(self, rank: int, action: Action) -> tuple[int, int] | None:
        """(Micro-batch, chunk of the receiver) of what ``rank`` sends after ``action``; None if it sends nothing."""
        stages = self.pipeline.size
        virtual = action.chunk * stages + rank + (-1 if action.backward else 1)
        return (action.microbatch, virtual // stages) if 0 <= virtual < stages * self.chunks else None

    def activations(self, microbatch: int, chunk: int) -> Tensor:
        """Wait for the activations that come into ``chunk``."""
        return self._inputs.take(microbatch, chunk)

    def gradient(self, microbatch: int, chunk: int) -> Tensor:
        """Wait for the gradient of what ``chunk`` has sent."""
        return self._incoming.take(microbatch, chunk)

    def send_activations(self, tensor: Tensor) -> None:
        """Send the result of a forward to the next rank. Nobody may write to ``tensor`` before `finish`."""
        self._send(tensor, self._after, self.activation_streams[self._links[self.pipeline.rank]])

    def send_gradient(self, tensor: Tensor) -> None:
        """Send the gradient of what came from the rank before. Nobody may write to ``tensor`` before `finish`."""
        self._send(tensor, self._before, self.gradient_streams[self._links[self._before]])

    def _send(self, tensor: Tensor, to: int, stream: Stream) -> None:
        tensor = tensor.detach().contiguous()
        while self._sent and (len(self._sent) == self._most or self._sent[0].done()):
            self._sent.popleft().wait()
        self._sent.append(self.pipeline.send(tensor, to, stream=stream))

    def finish(self) -> None:
        """Wait until all that was sent has gone."""
        while self._sent:
            self._sent.popleft().wait()


class _Inbox:
    """The messages of one kind from one rank, in the order in which it sends them.

    ahead: one receive begins before it is needed. Otherwise the owner begins each of them.
    """

    def __init__(
        self, comm: Communicator, src: int, stream: Stream, sent: Iterable[tuple[int, int] | None],
        like: Callable[[int], Tensor], ahead: bool, *, backward: bool,
    ) -> None:  # fmt: skip
        self._comm, self._src, self._stream, self._like, self._backward = comm, src, stream, like, backward
        self._ahead = ahead
        self._coming = deque(one for one in sent if one is not None)
        self._begun: dict[tuple[int, int], tuple[Work, Tensor]] = {}
        if ahead:
            self.begin()

    def begin(self) -> None:
        """Begin the next receive, if there is one."""
        if self._coming:
            key = self._coming.popleft()
            tensor = self._like(key[0])
            with self._comm.about(f"stage {self._comm.rank}, {Action(self._backward, *key)}"):
                self._begun[key] = self._comm.recv(tensor, self._src, stream=self._stream), tensor

    def take(self, microbatch: int, chunk: int) -> Tensor:
        """Wait for a message, and begin the next one if one is to be ahead."""
        while (microbatch, chunk) not in self._begun:
            self.begin()
        work, tensor = self._begun.pop((microbatch, chunk))
        work.wait()
        if self._ahead and not self._begun:
            self.begin()
        return tensor
