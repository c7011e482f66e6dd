"""Calls whose tensors have a form that has passed the checks before: they skip the checks, and small ones go to MPI.

A program repeats its collectives with tensors of the same shapes and dtypes. The checks of such a call give the answer
that they gave before, except for what may differ between two tensors of one shape and dtype: the device, the strides,
the place in memory and lazy negation. Only these are looked at again. A call that is not known, or that seems wrong,
takes the long way through the checks, which say what is wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from commengine.dtypes import REAL_TYPES
from commengine.host.small_buffers import GatheredSmall
from commengine.host.transport import LONG_BYTES, SMALL_BYTES, HostTransport

from .checks import BusyMember, TensorLike, busy_error, transport_error

if TYPE_CHECKING:
    from mpi4py import MPI

#: forms that are kept: a program has a few dozens, and one that never repeats itself must not fill the memory
MOST_FORMS = 128


class Form(NamedTuple):
    """What is known about calls of one operation, reduction or root, shapes and dtypes.

    sent, received: bytes of the input and of the output. own: the bytes from the output's begin to the input's if the
    call is in place; None if it cannot be. alone: one call of MPI does them in a group that has no windows.
    beside_windows: the same in a group that has, and the ranks need not compare their calls. datatype, op: for MPI.
    small: the memory for small tensors that torch reduces.
    """

    sent: int
    received: int
    own: int | None
    alone: bool
    beside_windows: bool
    datatype: MPI.Datatype
    op: MPI.Op | None
    small: GatheredSmall | None


class KnownForms:
    """The forms of one communicator's calls without a stream, on host tensors.

    member: the group; its ``busy`` is set while one of these calls is under way. host: its transport. failures: the
    exceptions of a transport.
    """

    def __init__(self, member: BusyMember, host: HostTransport, failures: tuple[type[Exception], ...]) -> None:
        self._member, self._host, self._failures = member, host, failures
        self._windows, calls = host.windows, host.calls
        self._compare: Any = (
            None if host.routes is None else host.routes.compare_private
        )  # a single rank has no windows
        self._address, self._in_place = host.address, host.in_place
        self._all_reduce, self._reduce_scatter = calls.Allreduce, calls.Reduce_scatter_block
        self._all_gather, self._broadcast = calls.Allgather, calls.Bcast
        self._forms: dict[tuple[object, ...], Form] = {}

    def pair(self, name: str, op: str | None, output: TensorLike, input: TensorLike) -> bool:
        """Run an all-gather, for which ``op`` is None, or a reduce-scatter, if its form is known. Returns whether."""
        try:
            form = self._forms.get((name, op, output.shape, input.shape, output.dtype, input.dtype))
            if form is None or not (output.is_cpu and input.is_cpu):
                return False
            if not (output.is_contiguous() and input.is_contiguous()) or output.is_neg() or input.is_neg():
                return False
            target, source = output.data_ptr(), input.data_ptr()
        except (AttributeError, RuntimeError, TypeError):  # of something that has no memory of its own
            return False
        sent, received, own, alone, beside_windows, datatype, mpi_op, small = form
        together = -sent < source - target < received
        if together and source - target != own:
            return False
        member = self._member
        if member.busy:
            raise busy_error(member, name)
        member.busy = True
        try:
            if self._windows and alone and not beside_windows:  # another rank's tensor may lie in a window
                whole = max(sent, received)
                alone = small is None and self._compare(name, whole, op or "", output, input)
            if alone and small is not None:
                self._host.reduce_small(input, small, op or "", output)
            elif alone:
                address = self._address
                result = address(target, received), datatype
                if op is None:
                    self._all_gather(self._in_place if together else (address(source, sent), datatype), result)
                else:
                    self._reduce_scatter((address(source, sent), datatype), result, mpi_op)
            elif op is None:
                self._host.all_gather(output, input)
            else:
                self._host.reduce_scatter(output, input, op)
        except self._failures as error:
            raise transport_error(member, name, error) from error
        finally:
            member.busy = False
        return True

    def single(self, name: str, how: Any, tensor: TensorLike) -> bool:
        """Run an all-reduce or a broadcast if its form is known. Returns whether. how: the reduction or the root."""
        try:
            form = self._forms.get((name, how, tensor.shape, tensor.dtype))
            if form is None or not (tensor.is_cpu and tensor.is_contiguous()) or tensor.is_neg():
                return False
            start = tensor.data_ptr()
        except (AttributeError, RuntimeError, TypeError):
            return False
        nbytes, _, _, alone, beside_windows, datatype, mpi_op, small = form
        member = self._member
        if member.busy:
            raise busy_error(member, name)
        member.busy = True
        try:
            if self._windows and alone and not beside_windows:
                alone = small is None and self._compare(name, nbytes, how, tensor, tensor)
            if alone and small is not None:
                self._host.reduce_small(tensor, small, how, tensor)
            elif alone and mpi_op is not None:
                self._all_reduce(self._in_place, (self._address(start, nbytes), datatype), mpi_op)
            elif alone:
                self._broadcast((self._address(start, nbytes), datatype), how)
            else:
                getattr(self._host, name)(tensor, how)
        except self._failures as error:
            raise transport_error(member, name, error) from error
        finally:
            member.busy = False
        return True

    def learn_pair(self, name: str, op: str | None, output: Tensor, input: Tensor) -> None:
        """Know a call from now on that has passed all checks."""
        if output.is_cpu:
            key = name, op, output.shape, input.shape, output.dtype, input.dtype
            own = self._member.rank * input.nbytes if name == "all_gather" else None
            self._learn(key, input.nbytes, output, own, op)

    def learn_single(self, name: str, how: object, tensor: Tensor) -> None:
        """Know a call from now on that has passed all checks."""
        if tensor.is_cpu:
            op = how if isinstance(how, str) else None
            self._learn((name, how, tensor.shape, tensor.dtype), tensor.nbytes, tensor, None, op)

    def _learn(self, key: tuple[Any, ...], sent: int, output: Tensor, own: int | None, op: str | None) -> None:
        dtype, received, host, name = output.dtype, output.nbytes, self._host, key[0]
        nbytes = max(sent, received)
        if dtype not in REAL_TYPES or not nbytes:
            return
        datatype, mpi_op, small, once = host.types.move[dtype], None, None, True
        if op is not None and dtype in host.in_order:
            once = nbytes <= SMALL_BYTES and host.size > 1
            small = host.small[dtype, output.shape] if once else None
        elif op is not None:
            once = op != "avg" and (nbytes <= LONG_BYTES or name != "all_reduce")
            datatype, mpi_op = host.types.reduce[dtype, op]
        alone, beside = (nbytes < least for least in host.leasts(name, dtype))
        if len(self._forms) >= MOST_FORMS:
            self._forms.clear()
        self._forms[key] = Form(sent, received, own, once and alone, once and beside, datatype, mpi_op, small)
