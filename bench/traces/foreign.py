"""The middle form of other tools' traces: a call as it is read, and a rank's trace as it is written.

The readers of foreign formats make a `ForeignCall` of each communication; `as_recording` makes of all ranks' calls the
JSON types that `bench.step_study.recording.parse` checks.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.step_study.recording import Group
from commengine import Trace, UsageError
from commengine.dtypes import REDUCTIONS
from commengine.operations import OPERATIONS

#: elements of the largest call that is believed
MOST_ELEMENTS = 1 << 38
#: other tools' names of dtypes, in small letters and without "c10::", as names of torch. A dtype that torch has but no
#: collective is replayed as bytes
DTYPES = {
    "float": "float32", "float32": "float32", "double": "float64", "float64": "float64", "half": "float16",
    "float16": "float16", "bfloat16": "bfloat16", "long": "int64", "long int": "int64", "int64": "int64",
    "int": "int32", "int32": "int32", "short": "int16", "int16": "int16", "char": "int8", "signed char": "int8",
    "int8": "int8", "byte": "uint8", "unsigned char": "uint8", "uint8": "uint8", "bool": "bool",
    "complex<float>": "complex64", "complexfloat": "complex64", "complex<double>": "complex128",
    "complexdouble": "complex128", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8", "float8_e4m3fnuz": "uint8",
    "float8_e5m2fnuz": "uint8",
}  # fmt: skip

#: PyTorch's names of operations, of their letters alone, as ours. all_to_allv is one of them if its parts are equal
OPERATIONS_OF = {
    **dict.fromkeys(("allreduce", "allreducecoalesced"), "all_reduce"),
    **dict.fromkeys(("allgather", "allgatherbase", "allgatherintotensorcoalesced", "allgathercoalesced"), "all_gather"),
    **dict.fromkeys(("reducescatter", "reducescatterbase", "reducescattertensorcoalesced"), "reduce_scatter"),
    **dict.fromkeys(("broadcast", "broadcastoop"), "broadcast"), **dict.fromkeys(("reduce", "reduceoop"), "reduce"),
    **dict.fromkeys(("alltoall", "alltoallv", "alltoallbase"), "all_to_all"),
    "gather": "gather", "scatter": "scatter", "barrier": "barrier", "send": "send", "recv": "recv",
}  # fmt: skip


class Written(NamedTuple):
    """This rank's trace, as it is written into a file of another tool's format.

    rank, size: of the run. groups: the world ranks of this rank's groups, by name. numbers: of all ranks' groups
    (`numbered`). span: when the step began and ended, on the clock of the trace.
    """

    path: Path
    rank: int
    size: int
    trace: Trace
    groups: dict[str, list[int]]
    numbers: dict[tuple[str, tuple[int, ...]], int]
    span: tuple[float, float] | None = None

    def number(self, group: str) -> str:
        """The number of one of this rank's groups, in words."""
        return str(self.numbers[group, tuple(self.groups[group])])


def numbered(groups: Iterable[tuple[str, Sequence[int]]]) -> dict[tuple[str, tuple[int, ...]], int]:
    """A number from 1 on for each group, (name, ranks). ASTRA-sim reserves 0 for all ranks."""
    found = sorted({(name, tuple(ranks)) for name, ranks in groups}, key=lambda group: (group[1], group[0]))
    return {group: number for number, group in enumerate(found, start=1)}


def dtype_of(name: str) -> str | None:
    """The name of torch for another tool's name of a dtype; None if it is unknown."""
    return DTYPES.get(name.strip().lower().removeprefix("c10::"))


def operation_of(name: str) -> str | None:
    """Our operation by PyTorch's name for it, of which the letters count; None if there is none."""
    return OPERATIONS_OF.get("".join(letter for letter in name.lower() if letter.isalpha()))


def kind_of(name: str, dtype: object, splits: Sequence[str] = ()) -> tuple[str, str] | str:
    """(operation, dtype) of PyTorch's call ``name``, or the kind of a call that is left out. splits: lists in JSON."""
    kind = operation_of(name)
    if kind is None:
        return name
    if kind == "all_to_all" and any(len(set(json.loads(split))) > 1 for split in splits):
        return f"{name} with unequal parts"
    found = dtype_of(str(dtype)) if kind != "barrier" else "uint8"
    return f"{name} of {dtype}" if found is None else (kind, found)


def item_bytes(dtype: str) -> int:
    """The bytes of an element of a dtype, by torch's name."""
    found: torch.dtype = getattr(torch, dtype)
    return found.itemsize


@dataclass
class ForeignCall:
    """One communication of a rank.

    elements: of the argument that `commengine.operations` counts. root: a rank of the group, for a message the other
    one's, for a sendrecv the one that it sends to. source, received: of a sendrecv, the rank that it receives from, and
    the bytes that come. redop: of an operation that reduces; "sum" by default. enqueue, waited: when the rank began the
    call, and when it began to wait for it, or None for never; any numbers, because their order alone counts.
    overlapped: the rank did something else in between. guessed: the trace does not say the dtype. exact: fields of an
    event that are known and are not made from the others.
    """

    operation: str
    group: Group
    dtype: str
    elements: int
    enqueue: float
    waited: float | None
    seconds: float
    overlapped: bool = False
    redop: str | None = None
    root: int | None = None
    source: int | None = None
    received: int = 0
    guessed: bool = False
    exact: dict[str, Any] = field(default_factory=dict)


def paired(calls: Sequence[ForeignCall]) -> list[ForeignCall]:
    """The calls of a rank, in order, with a send and a receive of a group that follow each other as one sendrecv.

    Other runtimes let a send end before its receive begins; in a replay all ranks of a ring would wait in their sends.
    A receive and the send after it stay apart if the rank waited for the receive between them.
    """
    found: list[ForeignCall] = []
    for call in calls:
        last = found[-1] if found else None
        if last is not None and last.group == call.group and {last.operation, call.operation} == {"send", "recv"}:
            send, receive = (last, call) if last.operation == "send" else (call, last)
            if last is send or last.waited is None or last.waited > call.enqueue:
                waits = [one.waited for one in (last, call) if one.waited is not None and one.waited > call.enqueue]
                found[-1] = replace(
                    send, operation="sendrecv", source=receive.root, enqueue=last.enqueue,
                    received=receive.elements * item_bytes(receive.dtype), waited=min(waits, default=None),
                    seconds=max(last.seconds, call.seconds), overlapped=last.overlapped or call.overlapped,
                )  # fmt: skip
                continue
        found.append(call)
    return found


def marked(calls: list[ForeignCall]) -> list[ForeignCall]:
    """The calls of a rank, in order; a call is overlapped if the next one begins before the rank waits for it."""
    for call, following in itertools.pairwise(calls):
        call.overlapped = call.waited is None or call.waited > following.enqueue
    return calls


def as_recording(
    folder: Path, title: str, ranks: Sequence[Iterable[ForeignCall]], left_out: Counter[str]
) -> dict[str, Any]:
    """All ranks' calls as the JSON types of a recording, with the notes that a reader of its replay needs.

    The calls of a group run on a stream of it if any of its ranks did something else during one of them. left_out: how
    many calls of which kinds are not replayed. Raises UsageError if there are no calls, or if a rank, its root or its
    peer is not in the group of a call.
    """
    calls = [sorted(of_rank, key=lambda call: call.enqueue) for of_rank in ranks]
    overlapped = {call.group for of_rank in calls for call in of_rank if call.overlapped}
    found = []
    for rank, of_rank in enumerate(calls):
        for call in of_rank:
            _check_ranks(f"{folder}: rank {rank}, {call.operation}", rank, call)
        groups = {call.group.name: list(call.group.ranks) for call in of_rank}
        found.append([groups, [_event(call, call.group in overlapped) for call in of_rank]])
    notes = [f"read as a trace of {title}"]
    guessed = sum(call.guessed for of_rank in calls for call in of_rank)
    if guessed:
        notes.append(f"{guessed} calls do not say their dtype: replayed as float32, or as bytes where 4 do not divide")
    if left_out:
        notes.append("not replayed: " + ", ".join(f"{count} {kind}" for kind, count in sorted(left_out.items())))
    if not any(calls):
        raise UsageError(f"{folder}: no rank communicates: nothing to replay ({'; '.join(notes)})")
    return {"folder": str(folder), "ranks": found, "notes": notes}


def _check_ranks(where: str, rank: int, call: ForeignCall) -> None:
    """Raise UsageError unless the rank is in the call's group, and the root or the peer, too."""
    name, ranks = call.group.name, list(call.group.ranks)
    if rank not in ranks:
        raise UsageError(f"{where}: the rank is not in {name!r}, which has ranks {ranks}")
    if call.root is not None and not 0 <= call.root < len(ranks):
        raise UsageError(f"{where}: the root or peer {call.root} is no rank of {name!r}, which has ranks {ranks}")


def _event(call: ForeignCall, on_stream: bool) -> dict[str, Any]:
    operation, size = OPERATIONS[call.operation], len(call.group.ranks)
    elements, width = call.elements, item_bytes(call.dtype)
    if operation.split and not operation.counts_part:
        elements = -(-elements // size) * size  # one part a rank
    nbytes = operation.nbytes(elements * width, size)
    # Nothing lies in a window, so only a sendrecv needs its buffers: its two have different sizes.
    buffers = [[nbytes, False], [call.received, False]] if call.operation == "sendrecv" else []
    shape = [elements]
    if call.operation == "barrier":
        nbytes, shape, buffers = 0, [], []
    return {
        "operation": call.operation, "redop": (call.redop or "sum") if operation.reduces else None, "root": call.root,
        "peers": [peer for peer in (call.root, call.source) if peer is not None] if operation.pairwise else [],
        "dtype": "none" if call.operation == "barrier" else call.dtype, "shape": shape,
        "bytes": nbytes, "buffers": buffers, "group": call.group.name, "size": size,
        "stream": f"{call.group.name}/stream1" if on_stream else None, "enqueue": call.enqueue, "start": call.enqueue,
        "end": call.enqueue + call.seconds, "wait_start": call.waited if on_stream else None,
        "wait_end": None if call.waited is None or not on_stream else max(call.waited, call.enqueue + call.seconds),
    } | call.exact  # fmt: skip


def counted_elements(operation: str, sent: int, received: int, size: int) -> int:
    """The elements of the argument that `commengine.operations` counts.

    sent, received: the elements of a rank's input and output. Raises ValueError if there are too many to believe.
    """
    if operation == "barrier":
        return 0
    whole = operation == "recv" or OPERATIONS[operation].counted == "output"
    return believed(operation, sent * size if operation == "all_gather" else received if whole else sent)


def believed(operation: str, elements: int) -> int:
    """``elements``. Raises ValueError if there are too many to believe, or less than none."""
    if not 0 <= elements < MOST_ELEMENTS:
        raise ValueError(f"{operation} of {elements} elements")
    return elements


def ranks_of(found: Any) -> tuple[int, ...]:
    """A list of ranks in JSON. Raises ValueError for anything else."""
    if not isinstance(found, list) or not found or not all(type(one) is int and one >= 0 for one in found):
        raise ValueError(f"{str(found)[:50]} is not a list of ranks")
    if len(set(found)) < len(found):
        raise ValueError(f"{str(found)[:50]} has a rank twice")
    return tuple(found)


def elements_of(shape: Any) -> int:
    """The elements of a tensor, or of all tensors in a list, from a shape of JSON, or a list of shapes."""
    if not isinstance(shape, list):
        raise ValueError(f"{str(shape)[:50]} is not a shape")
    if any(isinstance(one, list) for one in shape):
        return sum(elements_of(one) for one in shape)
    if not all(type(one) is int and one >= 0 for one in shape):
        raise ValueError(f"{str(shape)[:50]} is not a shape")
    return math.prod(shape)


def reduction_of(name: str) -> str | None:
    """The reduction that a name contains as a word, such as that of NCCL's kernels; None if it contains none."""
    words = re.split(r"[^a-z]+", name.lower())
    return next((word for word in words if word in REDUCTIONS), "avg" if "premulsum" in words else None)
