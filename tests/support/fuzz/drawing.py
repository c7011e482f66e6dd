"""Drawn tensors: values, where they lie in memory, and the bytes around them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from commengine.dtypes import COMPLEX_TYPES, DTYPES, FLOATING_TYPES, reduction_error
from tests.support.exact import OPS, in_pairs

ALL = sorted(DTYPES, key=str)
#: bytes beside a tensor that must not change, and between the places of tensors in one window
GUARD, WINDOW_BYTES = 64, 10 << 20
#: sizes in bytes of the whole tensor near which a route ends, and the largest of the others
SWITCHES = (16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20, 2 << 20, 4 << 20)
OVER_PIECES = (8 << 20) + 4096
#: a longer tensor repeats as many elements. The number is prime: nothing is cut at a multiple of it
PERIOD = 65_521


def elements(draw: random.Random, itemsize: int, ranks: int, over: float) -> int:
    """The elements of one of ``ranks`` parts: few, or about as many as where another route begins.

    over: how often all parts together are longer than the tensors that MPI reduces whole.
    """
    kind = draw.random()
    if kind < 0.5:
        return draw.choice((0, 1, 1, 2, 3, 5, 7, 16, 63, 64, 65, draw.randrange(2000)))
    nbytes = OVER_PIECES if kind > 1 - over else draw.choice(SWITCHES[: 5 if kind < 0.9 else 9])
    return max(0, nbytes // itemsize // ranks + draw.randrange(-2, 3))


def repeated(period: Tensor, numel: int) -> Tensor:
    """The first ``numel`` elements of ``period``, again and again."""
    return period if len(period) >= numel else period.repeat(-(-numel // len(period)))[:numel]


def values(dtype: torch.dtype, numel: int, seed: int, whole: bool) -> Tensor:
    """Values of one rank: small whole numbers, of which every dtype has the exact sums and products, or any."""
    if numel > PERIOD:
        return repeated(values(dtype, PERIOD, seed, whole), numel)
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, (numel,), generator=generator).bool()
    if not whole and dtype in FLOATING_TYPES:
        return torch.randn(numel, generator=generator).to(dtype)
    if not whole and not dtype.is_complex:
        ends = torch.iinfo(dtype)
        return torch.randint(ends.min // 2, ends.max // 2, (numel,), generator=generator).to(dtype)
    found = torch.randint(0, 3, (2, numel), generator=generator) - int(dtype != torch.uint8)
    if dtype in COMPLEX_TYPES:
        part = COMPLEX_TYPES[dtype]
        return torch.complex(found[0].to(part), found[1].to(part))
    return found[0].to(dtype)


def reduced(parts: list[Tensor], op: str, order: str | None) -> tuple[Tensor, Tensor | None]:
    """The result of a reduction, and the error that each element may have; None: the bits are those of the result."""
    numel = len(parts[0])
    if numel > PERIOD:  # of `values`
        right, error = reduced([part[:PERIOD] for part in parts], op, order)
        return repeated(right, numel), None if error is None else repeated(error, numel)
    dtype, rows = parts[0].dtype, torch.stack(parts)
    if dtype == torch.bool:
        return (rows.any(0) if op in ("sum", "max") else rows.all(0)), None
    if op in ("max", "min"):
        return (rows.amax(0) if op == "max" else rows.amin(0)), None
    if not dtype.is_floating_point and not dtype.is_complex:
        return (rows.sum(0) if op == "sum" else rows.prod(0)).to(dtype), None  # of 64 bits, then cut: it wraps around
    if op == "sum" and order == "tree":
        return in_pairs(parts), None
    if op == "sum" and order == "rank":
        one, *others = [part.float() if dtype.itemsize == 2 else part for part in parts]
        for part in others:
            one = one + part
        return one.to(dtype), None
    wide = rows.cdouble() if dtype.is_complex else rows.double()
    total = {"sum": wide.sum, "prod": wide.prod, "avg": wide.mean}[op](0)
    largest = wide.abs().sum(0) if op != "prod" else wide.abs().prod(0)
    return total.to(dtype), len(parts) * torch.finfo(dtype).eps * largest + torch.finfo(dtype).tiny


def reductions(dtype: torch.dtype) -> list[str]:
    """The reductions of a dtype."""
    return [op for op in OPS if reduction_error(dtype, op) is None]


@dataclass
class Place:
    """One tensor of a call: its memory as bytes, where it begins there, and what the bytes were before the call."""

    memory: np.ndarray
    start: int
    tensor: Tensor
    form: str  # "tensor", "array" or "gradient"
    before: np.ndarray = field(init=False)
    expected: tuple[Tensor, Tensor | None] | None = None  # None: the tensor stays as it is

    def fill(self, found: Tensor) -> None:
        """Write values, and remember the memory."""
        self.write(0, found)
        self.low, self.high = max(0, self.start - GUARD), self.start + self.tensor.nbytes + GUARD
        self.before = self.memory[self.low : self.high].copy()

    def write(self, first: int, found: Tensor) -> None:
        """Write values from element ``first`` on, as bytes: torch crashes on complex numbers at odd addresses."""
        raw = found.contiguous().view(torch.uint8).numpy() if found.numel() else np.empty(0, np.uint8)
        start = self.start + first * found.itemsize
        self.memory[start : start + len(raw)] = raw

    def given(self) -> object:
        """What the call gets."""
        return self.tensor.numpy() if self.form == "array" else self.tensor

    def problem(self) -> str:
        """What is wrong after the call; an empty text if all is right."""
        now, start, nbytes = self.memory[self.low : self.high], self.start - self.low, self.tensor.nbytes
        if self.expected is None:
            return "" if np.array_equal(now, self.before) else "an input, or the memory beside it, was changed"
        beside = np.r_[0:start, start + nbytes : len(now)]
        if not np.array_equal(now[beside], self.before[beside]):
            return "memory beside the output was changed"
        right, error = self.expected
        if np.array_equal(now[start : start + nbytes], right.contiguous().view(torch.uint8).numpy()):
            return ""
        found = torch.frombuffer(now[start : start + nbytes].copy(), dtype=right.dtype) if nbytes else right
        if error is None:
            wrong = ~(found == right)
        else:
            wide = torch.complex128 if found.dtype.is_complex else torch.float64
            wrong = ~((found.to(wide) - right.to(wide)).abs() <= error)
        if not wrong.any():
            return ""
        at = int(wrong.nonzero()[0])
        return f"{int(wrong.sum())} of {len(right)} elements are wrong, the first at {at}: {found[at]}, not {right[at]}"


class Memory:
    """Where the tensors of one communicator's calls lie. aligned: only at multiples of the dtype's size."""

    def __init__(self, comm: object, aligned: bool) -> None:
        self._comm, self._aligned = comm, aligned
        self._windows: list[Tensor] = []
        self.inference = False  # whether new tensors are made in inference mode

    def place(self, draw: random.Random, mine: random.Random, dtype: torch.dtype, numel: int, slot: int) -> Place:
        """Memory for a tensor. draw: the same numbers on every rank; mine: this rank's own."""
        where = draw.choice(("private", "private", "window"))
        if where == "window" and slot > 3:
            where = "private"
        whole, own = draw.randrange(4096), mine.randrange(64)
        offset = whole if where == "window" else own
        if self._aligned or draw.random() < 0.5 or dtype == torch.complex128:  # which is refused elsewhere
            offset -= offset % dtype.itemsize
        room = numel * dtype.itemsize + 2 * GUARD + 4096
        if where == "window":
            while len(self._windows) <= slot:
                self._windows.append(self._comm.empty((WINDOW_BYTES,), torch.uint8).zero_())
            memory = self._windows[slot].numpy()
        else:
            memory = np.full(room, 7, np.uint8)
        if where != "window" and self._aligned:  # malloc's memory begins anywhere that fits 16 bytes
            offset = offset // 16 * 16
        start = GUARD + offset
        if numel:
            with torch.inference_mode(self.inference):
                tensor = torch.frombuffer(memory.data, dtype=dtype, count=numel, offset=start)
        else:
            tensor = torch.empty(0, dtype=dtype)
        forms = ["tensor", "tensor"] + ["array"] * (dtype != torch.bfloat16)
        form = draw.choice([*forms, "gradient"] if dtype in FLOATING_TYPES and not self.inference else forms)
        if form == "gradient":
            tensor.requires_grad_()
        return Place(memory, start, tensor, form)
