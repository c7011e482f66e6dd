"""The calls of another tool's trace, and how they become the events of a recording.

The readers of foreign formats make a `ForeignCall` of each communication; `as_recording` makes of all ranks' calls the
JSON types that `bench.step_study.recording.parse` checks.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from bench.step_study.recording import Group
from commengine import UsageError
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


def dtype_of(name: str) -> str | None:
    """The name of torch for another tool's name of a dtype; None if it is unknown."""
    return DTYPES.get(name.strip().lower().removeprefix("c10::"))


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
    many calls of which kinds are not replayed. Raises UsageError if there are no calls.
    """
    calls = [sorted(of_rank, key=lambda call: call.enqueue) for of_rank in ranks]
    overlapped = {call.group for of_rank in calls for call in of_rank if call.overlapped}
    found = []
    for rank, of_rank in enumerate(calls):
        groups = {call.group.name: list(call.group.ranks) for call in of_rank if rank in call.group.ranks}
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
    whole = OPERATIONS[operation].counted == "output"
    found = sent * size if operation == "all_gather" else received if whole else sent
    if not 0 <= found < MOST_ELEMENTS:
        raise ValueError(f"{operation} of {found} elements")
    return found


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
