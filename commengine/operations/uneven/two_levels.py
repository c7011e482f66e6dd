"""The way of an all_to_all_v between nodes, in two levels: inside each node, and between the nodes."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from commengine.host.wire import MpiWire
from commengine.mpi import load_mpi
from commengine.shared_memory.copying import copy_bytes
from commengine.shared_memory.flags import PRIVATE
from commengine.shared_memory.sequence import SequenceMemory

from .rows import Counts, Received, Rows, in_bytes, in_place_of, row_bytes_of, starts_of, too_many


def in_two_levels(
    memory: SequenceMemory, output: Tensor, input: Tensor, output_rows: Received, input_rows: Rows
) -> None:
    """Rank number l of a node collects what all its ranks send to number l of each node, and sends it there.

    So a rank sends one message to each other node, and not one to each of its ranks.
    """
    flags, width, table = memory.flags, row_bytes_of(input), memory.node.table
    if isinstance(output_rows, Counts):
        output_rows.extend(counts_of(memory.whole.wire, input_rows))
    words = flags.words_of("all_to_all_v", width, input.dtype)
    ranks, windows = table[memory.node.index], memory.windows
    at = flags.begin_uneven(words, windows.number_of(input), input_rows)
    unfit, kept = too_many(output_rows, output), None
    given = [told[at : at + len(input_rows) + 1].tolist() for told in flags.told]
    me = ranks[memory.rank]
    for peer, own in zip(ranks, given, strict=True):
        if own[me + 1] - own[me] != output_rows[peer]:
            unfit = f"rank {peer} sends {own[me + 1] - own[me]} rows, and output_rows say {output_rows[peer]}"
    if unfit is not None:
        output = in_place_of(output, output_rows)
    places = [told[flags.place] for told in flags.told]
    if PRIVATE in places:
        kept, begins = _by_messages(memory, input, given, width)
    else:
        bases = [windows.address_of(number, peer) for peer, number in enumerate(places)]
        begins = [[base + start * width for start in own] for base, own in zip(bases, given, strict=True)]
    starts, target = starts_of(output_rows), output.data_ptr()
    for peer, begin, own in zip(ranks, begins, given, strict=True):
        nbytes = min(own[me + 1] - own[me], output_rows[peer]) * width
        copy_bytes(target + starts[peer] * width, begin[me], nbytes)
    _across(memory, output, begins, given, output_rows, width)
    del kept
    flags.meet_unless(unfit)


def _by_messages(
    memory: SequenceMemory, input: Tensor, given: list[list[int]], width: int
) -> tuple[Tensor, list[list[int]]]:
    """Bring the rows of the node's ranks for the ranks of this one's number on all nodes, where no window has them.

    given: for each rank of the node, where its rows for each rank begin. Returns the memory of the rows, and for each
    rank of the node where its rows for each of those ranks begin.
    """
    table, number = memory.node.table, memory.rank
    own = given[number]
    packed = torch.empty(input.nbytes, dtype=torch.uint8, device="cpu")
    at = packed.data_ptr()
    sent = []
    for peer in range(memory.size):
        before = at
        for ranks in table:
            first, last = own[ranks[peer]] * width, own[ranks[peer] + 1] * width
            copy_bytes(at, input.data_ptr() + first, last - first)
            at += last - first
        sent.append(at - before)
    received = [sum(one[ranks[number] + 1] - one[ranks[number]] for ranks in table) * width for one in given]
    arrived = torch.empty(sum(received), dtype=torch.uint8, device="cpu")
    _exchange(memory.inside.wire, packed, sent, arrived, received, starts_of(received))
    begins = [[0] * (len(own) - 1) for _ in given]
    at = arrived.data_ptr()
    for begin, one in zip(begins, given, strict=True):
        for ranks in table:
            begin[ranks[number]] = at
            at += (one[ranks[number] + 1] - one[ranks[number]]) * width
    return arrived, begins


def _across(
    memory: SequenceMemory, output: Tensor, begins: list[list[int]], given: list[list[int]], output_rows: Received,
    width: int,
) -> None:  # fmt: skip
    """The messages between nodes. begins: the address of the rows of each rank of this node for each other rank."""
    table, here, number = memory.node.table, memory.node.index, memory.rank
    others = [(node, ranks[number]) for node, ranks in enumerate(table) if node != here]
    sent, received = [0] * len(table), [0] * len(table)
    for node, to in others:
        sent[node] = sum(one[to + 1] - one[to] for one in given) * width
        received[node] = sum(output_rows[rank] for rank in table[node]) * width
    collected = torch.empty(sum(sent), dtype=torch.uint8, device="cpu")
    at = collected.data_ptr()
    for _, to in others:
        for begin, one in zip(begins, given, strict=True):
            nbytes = (one[to + 1] - one[to]) * width
            copy_bytes(at, begin[to], nbytes)
            at += nbytes
    starts = starts_of(in_bytes(output_rows, width))
    if memory.node.in_order:  # what a node sends is one stretch of the output
        _exchange(memory.across.wire, collected, sent, output, received, [starts[ranks[0]] for ranks in table])
        return
    arrived = torch.empty(sum(received), dtype=torch.uint8, device="cpu")
    _exchange(memory.across.wire, collected, sent, arrived, received, starts_of(received))
    at, target = arrived.data_ptr(), output.data_ptr()
    for node, _ in others:
        for rank in table[node]:
            nbytes = output_rows[rank] * width
            copy_bytes(target + starts[rank], at, nbytes)
            at += nbytes


def _exchange(
    wire: MpiWire, source: Tensor, sent: list[int], target: Tensor, received: list[int], places: list[int]
) -> None:
    """MPI's all-to-all of bytes."""
    datatype = wire.types.move[torch.uint8]
    wire.calls.Alltoallv(
        (wire.address(source.data_ptr(), source.nbytes), sent, starts_of(sent), datatype),
        (wire.address(target.data_ptr(), target.nbytes), received, places, datatype),
    )


def counts_of(wire: MpiWire, sent: Sequence[int]) -> list[int]:
    """Tell each rank how much it gets."""
    received = array("q", bytes(8 * wire.size))
    datatype = load_mpi().INT64_T
    wire.calls.Alltoall((array("q", sent), datatype), (received, datatype))
    return received.tolist()
