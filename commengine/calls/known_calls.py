"""Calls of a form that has passed the checks before: they skip the checks.

A program repeats its collectives with tensors of the same shapes and dtypes. The checks of such a call give the answer
that they gave before, except for what may differ between two tensors of one shape and dtype: the device, the strides,
the place in memory and lazy negation. Only these are looked at again. A call that is not known, or that seems wrong,
takes the long way through the checks, which say what is wrong.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn, Protocol

from torch import Tensor

from commengine.operations.checks import TensorLike
from commengine.operations.operation import Operation, Run, mark_written
from commengine.operations.uneven.rows import Counts

from .failures import Speaker
from .routes import MOST_FORMS, Form, Routes


class BusyMember(Speaker, Protocol):
    """A communicator, and whether a call of it is under way."""

    busy: bool

    def failed(self, operation: str, error: BaseException) -> NoReturn:
        """End a call that began and raised."""

    def refuse_second(self, operation: str) -> NoReturn:
        """Raise the error of a call that begins while another one is under way."""


class KnownCalls:
    """The calls of one communicator without a stream.

    member: the group; its ``busy`` is set while one of these calls is under way.
    """

    def __init__(self, member: BusyMember, routes: Routes) -> None:
        self._member, self._forms = member, routes.known
        self._ranks, self._rank = routes.wire.size, routes.wire.rank
        self._on_device: dict[tuple[Any, ...], Form] = {}
        self._device: object = None

    def learn(self, operation: Operation, args: tuple[Any, ...], wire: Any) -> None:
        """Keep the form of a call on device tensors, which NCCL has taken."""
        if len(self._on_device) >= MOST_FORMS:
            self._on_device.clear()
        form = None if operation.uneven else Form.of(operation, args, partial(operation.by_nccl, wire), self._rank)
        if form is not None:
            self._device = args[operation.tensors[0]].device
            self._on_device[operation.form(args)] = form

    def single(self, name: str, tensor: TensorLike, how: object) -> bool:
        """Run an operation on one tensor if its form is known. Returns whether. how: the reduction or the root."""
        try:
            on_host = tensor.is_cpu
            form = (self._forms if on_host else self._on_device).get((name, tensor.shape, tensor.dtype, how))
            if form is None or not (tensor.is_contiguous() and tensor.data_ptr()) or tensor.is_neg():
                return False
            if not on_host and tensor.device != self._device:
                return False
        except (AttributeError, RuntimeError, TypeError):  # of something that has no memory of its own
            return False
        return self.perform(name, form.run, () if form.written is None else (tensor,), tensor, how)

    def pair(self, name: str, output: TensorLike, input: TensorLike, *how: object) -> bool:
        """Run an operation on two tensors if its form is known. Returns whether. how: its other arguments."""
        try:
            on_host, key = output.is_cpu, (name, output.shape, output.dtype, input.shape, input.dtype, *how)
            form = (self._forms if on_host else self._on_device).get(key)
            if form is None or input.is_cpu is not on_host:
                return False
            if not on_host and not output.device == input.device == self._device:
                return False
            if not (output.is_contiguous() and input.is_contiguous()) or output.is_neg() or input.is_neg():
                return False
            target, source = output.data_ptr(), input.data_ptr()
            apart = source - target
            if not (target and source):
                return False
        except (AttributeError, RuntimeError, TypeError):
            return False
        if -form.second < apart < form.first and apart != form.own:
            return False
        written = () if form.written is None else ((output, input)[form.written],)
        return self.perform(name, form.run, written, output, input, *how)

    def rows(
        self, name: str, output: TensorLike, input: TensorLike, output_rows: Sequence[int], input_rows: Sequence[int]
    ) -> bool:
        """Run an operation with numbers of rows if its form is known. Returns whether.

        output_rows: `Counts` wait for the numbers.
        """
        try:
            dtype, into, given = output.dtype, output.shape, input.shape
            row = into[1:] if len(into) > 1 else ()  # a slice of a torch.Size takes as long as three other looks
            form = self._forms.get((name, dtype, row))
            if form is None or not into or input.dtype is not dtype or len(given) != len(into):
                return False
            if row and given[1:] != row:
                return False
            if not (output.is_cpu and input.is_cpu):
                return False
            if not (output.is_contiguous() and input.is_contiguous()) or output.is_neg() or input.is_neg():
                return False
            target, source, ranks = output.data_ptr(), input.data_ptr(), self._ranks
            apart = source - target
            input_rows = tuple(map(operator.index, input_rows))
            if (into[0] and not target) or (given[0] and not source):
                return False
            if -input.nbytes < apart < output.nbytes or len(input_rows) != ranks or min(input_rows) < 0:
                return False
            if sum(input_rows) != given[0]:
                return False
            if not isinstance(output_rows, Counts):
                output_rows = tuple(map(operator.index, output_rows))
                if len(output_rows) != ranks or min(output_rows) < 0 or sum(output_rows) != into[0]:
                    return False
        except (AttributeError, RuntimeError, TypeError):
            return False
        return self.perform(name, form.run, (output,), output, input, output_rows, input_rows)

    def perform(self, name: str, run: Run, written: tuple[Tensor, ...], *args: Any) -> bool:
        """Run a call that needs no checks. written: the tensors that it writes on this rank. Returns True."""
        member = self._member
        if member.busy:
            member.refuse_second(name)
        try:
            member.busy = True
            run(*args)
            if written:
                mark_written(written)
            member.busy = False
            return True
        except BaseException as error:
            member.failed(name, error)
