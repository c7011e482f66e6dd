"""Drawn calls: each with its tensors, and what every tensor must hold afterwards, computed from all ranks' seeds."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from commengine import CollectiveError, CollectiveMismatch, Communicator
from commengine.host.switch_points import SwitchPoints

from .drawing import ALL, Memory, Place, elements, reduced, reductions, values

COLLECTIVES = (
    "all_reduce", "all_reduce", "reduce", "reduce_scatter", "reduce_scatter", "all_gather", "all_gather", "broadcast",
    "gather", "scatter", "all_to_all", "all_to_all_v", "all_to_all_v", "all_gather_v", "barrier",
)  # fmt: skip
MESSAGES = ("sendrecv", "send and recv", "one message", "exchange", "exchange twice")
#: elements of the float32 tensor of calls that differ: so many go through memory where a table says so
LARGE = 1 << 21


@dataclass
class Call:
    """One drawn call. run: makes it on a stream, or at once. text: what a report says."""

    run: Callable[[Any], Any]
    places: list[Place]
    text: str


class Calls:
    """Draws the calls of one communicator. memory: where their tensors lie. by_mpi: none goes through shared memory."""

    def __init__(self, comm: Communicator, memory: Memory, by_mpi: bool) -> None:
        self.comm, self.memory = comm, memory
        # The ranks compare the calls that go through memory, and not those by MPI.
        points = [SwitchPoints.load().point(one, torch.float32, comm.size) for one in ("all_reduce", "broadcast")]
        through_memory = comm.node_size == comm.size and not by_mpi
        self.compared = through_memory and max(point.bounce for point in points) <= 4 * LARGE

    def call(self, draw: random.Random, mine: random.Random, slot: int = 0, small: bool = False) -> Call:
        """A collective or messages that every rank calls with arguments that fit. slot: two of them for each call."""
        comm, n, rank = self.comm, self.comm.size, self.comm.rank
        name = draw.choice((*COLLECTIVES, *MESSAGES))
        dtype, root, whole, seed = draw.choice(ALL), draw.randrange(n), draw.random() < 0.6, draw.randrange(2**31)
        over = 0.06 if name in ("all_reduce", "reduce") else 0.01  # these two go in pieces
        numel, op = elements(draw, dtype.itemsize, n, over), draw.choice(reductions(dtype))
        numel = min(numel, 3000) if small else numel
        one = numel * n if name in ("all_reduce", "broadcast", "reduce") and not small else numel
        inplace, shift = draw.random() < 0.4, draw.randrange(n)
        text = f"{name} {dtype} {one} op={op} root={root} whole={whole} in place={inplace} shift={shift}"

        def all_values(count: int, k: int = 0) -> list[Tensor]:
            return [values(dtype, count, seed + 17 * r + k, whole) for r in range(n)]

        def place(count: int, found: Tensor | None, number: int = 0) -> Place:
            made = self.memory.place(draw, mine, dtype, count, slot + number)
            made.fill(torch.zeros(count).to(dtype) if found is None else found)
            return made

        def made(run: Callable[[Any], Any], *places: Place) -> Call:
            lie = ", ".join(f"{one.form} at {one.start % 64}" for one in places)
            return Call(run, list(places), f"{text}: {lie}")

        own = slice(rank * numel, (rank + 1) * numel)
        if name == "barrier":
            return made(lambda stream: comm.barrier(stream=stream))
        if name in ("all_reduce", "reduce"):
            parts = all_values(one)
            a = place(one, parts[rank])
            if name == "all_reduce" or rank == root:
                a.expected = reduced(parts, op, comm.order)
            if name == "reduce":
                return made(lambda stream: comm.reduce(a.given(), root, op, stream=stream), a)
            return made(lambda stream: comm.all_reduce(a.given(), op, stream=stream), a)
        if name == "broadcast":
            parts = all_values(one)
            a = place(one, parts[rank])
            a.expected = parts[root], None
            return made(lambda stream: comm.broadcast(a.given(), root, stream=stream), a)
        if name == "reduce_scatter":
            parts = all_values(numel * n)
            right, error = reduced(parts, op, comm.order)
            b = place(numel * n, parts[rank], 1)
            if inplace:
                kept = parts[rank].clone()
                kept[own] = right[own]
                if error is not None:
                    of_own, error = error[own], torch.zeros_like(error)
                    error[own] = of_own
                b.expected = kept, error
                return made(lambda stream: comm.reduce_scatter((g := b.given())[own], g, op, stream=stream), b)
            a = place(numel, None)
            a.expected = right[own], None if error is None else error[own]
            return made(lambda stream: comm.reduce_scatter(a.given(), b.given(), op, stream=stream), a, b)
        if name == "all_gather":
            parts = all_values(numel)
            b = place(numel * n, None, 1)
            b.expected = torch.cat(parts), None
            if inplace:
                b.write(own.start, parts[rank])
                return made(lambda stream: comm.all_gather(g := b.given(), g[own], stream=stream), b)
            a = place(numel, parts[rank])
            return made(lambda stream: comm.all_gather(b.given(), a.given(), stream=stream), b, a)
        if name == "gather":
            parts = all_values(numel)
            a = place(numel, parts[rank])
            b = place(numel * n, None, 1)
            if rank == root:
                b.expected = torch.cat(parts), None
            always = draw.random() < 0.5
            target = b.given() if rank == root or always else None
            return made(lambda stream: comm.gather(target, a.given(), root, stream=stream), a, b)
        if name == "scatter":
            parts = all_values(numel * n)
            b = place(numel * n, parts[rank], 1)
            a = place(numel, None)
            a.expected = parts[root][own], None
            return made(
                lambda stream: comm.scatter(a.given(), b.given() if rank == root else None, root, stream=stream), a, b
            )
        if name == "all_to_all":
            parts = all_values(numel * n)
            a, b = place(numel * n, None), place(numel * n, parts[rank], 1)
            a.expected = torch.cat([part[own] for part in parts]), None
            return made(lambda stream: comm.all_to_all(a.given(), b.given(), stream=stream), a, b)
        if name in ("all_to_all_v", "all_gather_v"):
            return self._uneven(name, draw, numel, all_values, place, made, small)
        parts = all_values(numel)
        a, b = place(numel, parts[rank]), place(numel, None, 1)
        to, source = (rank + shift) % n, (rank - shift) % n
        if name == "one message":
            if rank == root:
                return made(lambda stream: comm.send(a.given(), to, stream=stream) if shift else None, a, b)
            if source == root and shift:
                b.expected = parts[source], None
                return made(lambda stream: comm.recv(b.given(), source, stream=stream), a, b)
            return made(lambda stream: None, a, b)
        b.expected = parts[source], None

        def both(stream: Any) -> Any:
            with comm.coalesce(stream=stream):
                comm.send(a.given(), to)
                return comm.recv(b.given(), source)

        def prepared(stream: Any) -> Any:
            exchange = comm.exchange([(a.given(), to)], [(b.given(), source)], stream=stream)
            if name == "exchange twice" and not small:
                exchange.start().wait()
            return exchange.start()

        if name.startswith("exchange"):
            return made(prepared, a, b)
        if name == "sendrecv" or small:  # blocks do not nest
            return made(lambda stream: comm.sendrecv(a.given(), to, b.given(), source, stream=stream), a, b)
        return made(both, a, b)

    def _uneven(
        self, name: str, draw: random.Random, numel: int, all_values: Any, place: Any, made: Any, small: bool
    ) -> Call:
        """Operations in which each rank gives another number of rows, some of them none."""
        comm, n, rank = self.comm, self.comm.size, self.comm.rank
        counts = [[draw.choice((0, numel, draw.randrange(numel + 1))) for _ in range(n)] for _ in range(n)]
        if name == "all_gather_v":
            rows = counts[0]
            parts = all_values(numel)
            a = place(rows[rank], parts[rank][: rows[rank]])
            b = place(sum(rows), None, 1)
            b.expected = torch.cat([part[:count] for part, count in zip(parts, rows, strict=True)]), None
            return made(lambda stream: comm.all_gather_v(b.given(), a.given(), rows, stream=stream), b, a)
        parts = all_values(numel * n)
        sent, received = counts[rank], [row[rank] for row in counts]
        of_all = [part[: sum(row)].split(row) for part, row in zip(parts, counts, strict=True)]
        a = place(sum(sent), parts[rank][: sum(sent)])
        b = place(sum(received), None, 1)
        b.expected = torch.cat([one[rank] for one in of_all]), None

        def asked(stream: Any) -> Any:
            if stream is None:
                assert comm.exchange_rows(b.given(), a.given(), sent) == received
                return None
            return comm.all_to_all_v(b.given(), a.given(), received, sent, stream=stream)

        if draw.random() < 0.5 and not small:  # a block gives no answer before its end
            return made(asked, b, a)
        return made(lambda stream: comm.all_to_all_v(b.given(), a.given(), received, sent, stream=stream), b, a)

    def block(self, draw: random.Random, mine: random.Random) -> Call:
        """Several calls in one block."""
        calls = [self.call(draw, mine, 2 * number, True) for number in range(draw.randrange(2, 6))]

        def run(stream: Any) -> Any:
            with self.comm.coalesce(stream=stream):
                for call in calls:
                    call.run(None)
            return stream.record() if stream is not None else None

        text = f"block of {'; '.join(call.text for call in calls)}"
        return Call(run, [place for call in calls for place in call.places], text)

    def refused(self, draw: random.Random, mine: random.Random) -> Call:
        """A call that raises on every rank, and after which every tensor is as it was."""
        comm, n, rank = self.comm, self.comm.size, self.comm.rank
        odd = draw.randrange(n)
        a = self.memory.place(draw, mine, torch.float32, 1 << draw.randrange(4, 16), 0)
        a.form = "tensor"
        a.fill(torch.ones_like(a.tensor))
        kinds = ["swap", "two receives", "argument"] + ["checked"] * (3 * comm.checked)
        if self.compared:
            kinds.append("large")
        kind = draw.choice(kinds)
        large = torch.ones(LARGE if kind == "large" else 0)
        error: type[CollectiveError] = CollectiveError
        how = draw.choice(("op", "root", "operation"))

        def differently(tensor: Tensor) -> None:
            if how == "op":
                comm.all_reduce(tensor, "max" if rank == odd else "sum")
            elif how == "root":
                comm.broadcast(tensor, 1 if rank == odd else 0)
            elif rank == odd:
                comm.all_reduce(tensor)
            else:
                comm.broadcast(tensor)

        def call() -> None:
            if kind == "argument":
                comm.all_reduce(a.tensor[::2], "sum")
            elif kind == "large":
                differently(large)
            elif kind == "checked":
                differently(a.tensor)
            else:
                with comm.coalesce():
                    if kind == "swap":
                        comm.send(a.tensor, (rank + 1) % n)
                    else:
                        comm.recv(a.tensor[1:], (rank - 1) % n)
                    comm.recv(a.tensor, (rank - 1) % n)

        if kind in ("large", "checked"):
            error = CollectiveMismatch

        def run(stream: Any) -> None:
            try:
                call()
            except error:
                if not bool((large == 1).all()):
                    raise AssertionError("a refused call has changed its tensor") from None
                return
            raise AssertionError("the call was not refused")

        return Call(run, [a], f"{kind} {how} odd={odd} of {a.tensor.numel()} at {a.start % 64}")
