"""The parts that all layers on split fields share: the layer's geometry, its local input, its replicated parameters."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from commengine import CartesianGrid, Communicator, Decomposition
from tplayers.adjoint_pair import apply_or, apply_pair, end_of, followed
from tplayers.functions import in_forward_dtypes, outside_graphs
from tplayers.movement.plan import halo_plan
from tplayers.movement.transfer import transfer
from tplayers.placement import sum_together

from .geometry import Rule, Sliding, Span, output_bounds, read_spans
from .same_layer import require_same_layer


def per_axis(value: Any, axes: int, name: str) -> tuple[Any, ...]:
    """Return ``value`` for each of ``axes`` axes: it is one value for all of them, or one for each."""
    values = tuple(value) if isinstance(value, (tuple, list)) else (value,) * axes
    if len(values) != axes:
        raise ValueError(f"{name}={value!r} needs one value, or one for each of the {axes} axes")
    return values


def natural(value: Any, axes: int, name: str, least: int) -> tuple[int, ...]:
    """Return whole numbers of at least ``least``, one for each axis."""
    values = per_axis(value, axes, name)
    if not all(isinstance(one, int) and one >= least for one in values):
        raise ValueError(f"{name}={value!r} must be whole numbers of at least {least}")
    return values


def check_geometry(layer: str, grid: object, input: object) -> None:
    """Raise TypeError or ValueError, in which ``layer`` is named, unless a field can be split so."""
    if not isinstance(grid, CartesianGrid):
        raise TypeError(f"{layer}: grid must be a CartesianGrid, not {type(grid).__name__}")
    if not isinstance(input, Decomposition):
        made = "a Decomposition, such as grid.decompose(shape)"
        raise TypeError(f"{layer}: input must be {made}, not {type(input).__name__}")
    if input.grid_shape != grid.shape:
        raise ValueError(
            f"{layer}: the input is cut into {list(input.grid_shape)} blocks, "
            f"which does not fit a grid of {list(grid.shape)} ranks"
        )
    if len(grid.shape) not in (1, 2, 3):
        raise ValueError(f"{layer}: fields have 1 to 3 axes, not {len(grid.shape)}")
    if min(min(sizes) for sizes in input.blocks) < 1:
        raise ValueError(
            f"{layer}: a rank has no points of the input, whose blocks are {input.blocks}: use fewer ranks or a larger "
            "field"
        )


class FieldLayer(nn.Module):
    """A layer on fields [batch, channels, local space...] that are split over ``grid`` by the decomposition ``input``.

    output: the decomposition of the layer's result.
    """

    input: Decomposition
    output: Decomposition
    #: whether a field must have the dtype of ``weight``, outside of autocast
    takes_own_dtype: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        if "forward" in vars(cls):
            cls.forward = outside_graphs(cls.forward)

    def __init__(self, grid: CartesianGrid, input: Decomposition, channels: int | None = None) -> None:
        super().__init__()
        check_geometry(type(self).__name__, grid, input)
        self.grid, self.input, self.output, self.channels = grid, input, input, channels
        self._local_shape = input.local_shape(grid.coords)
        self._compared = False

    @property
    def axes(self) -> int:
        """The number of axes of the field."""
        return len(self.grid.shape)

    def check(self, x: Tensor) -> None:
        """Raise an error unless ``x`` is this rank's block of a field that the layer takes: real, of its shape.

        In the layer's first forward, and in each one if the communicator is ``checked``, the ranks compare the layer,
        its parameters and their blocks, and an error of one rank is one of all (`require_same_layer`). Later a rank
        looks at its own block only, and raises ValueError.
        """
        problem = self._problem(x)
        comm = self.grid.comm
        if comm.size > 1 and (comm.checked or not self._compared):
            self._compared = False
            require_same_layer(self, x, problem, comm)
            self._compared = True
        if problem is not None:
            raise ValueError(problem if comm.size == 1 else f"rank {self.grid.rank}: {problem}")

    def _problem(self, x: Any) -> str | None:
        layer = type(self).__name__
        if not isinstance(x, Tensor):
            return f"{layer} needs a torch.Tensor, not {type(x).__name__}: torch.from_numpy(array) shares its memory"
        fits = x.dim() == 2 + self.axes and tuple(x.shape[2:]) == self._local_shape
        if not (fits and self.channels in (None, x.shape[1])):
            needed = ["batch", str(self.channels or "channels"), *map(str, self._local_shape)]
            return f"{layer} needs a block [{', '.join(needed)}], not {list(x.shape)}"
        if not x.is_floating_point():
            return f"{layer} needs a real field, not {x.dtype}"
        own = self.weight.dtype if self.takes_own_dtype else x.dtype
        if own != x.dtype and not torch.is_autocast_enabled(x.device.type):
            return f"{layer} has parameters of {own}, and the field is {x.dtype}: convert one of them, as x.to({own})"
        return None

    def reads(
        self, rules: Sequence[Rule], modes: Sequence[str], output: Decomposition | None, *, fill: float = 0.0
    ) -> None:
        """Set the layer's ``output``, and its ``local``, which brings what this rank reads for it: see `LocalInput`."""
        self.local = LocalInput(self, rules, modes, output, fill)
        self.output = self.local.output

    def summed_parameters(self) -> tuple[Any, Any]:
        """Weight and bias, with gradients that are summed over the grid (`replicated`); None for one that is not."""
        present = [one for one in (self._parameters[name] for name in ("weight", "bias")) if one is not None]
        weight, bias, *_ = (*replicated(self.grid.comm, *present), None, None)
        return weight, bias

    def extra_repr(self) -> str:
        return f"{list(self.input.shape)} -> {list(self.output.shape)} on {list(self.grid.shape)} ranks"


class LocalInput:
    """What one rank reads for its outputs: its block with its halo, cut to size and padded at the physical borders.

    layer: its grid and input, and its name for errors.
    rules: one for each axis. modes: the padding of each axis, one of PADDINGS, or "clipped": inputs outside the
    field are left out. Circular wraps around, whether the grid is periodic or not. fill: the value of "zeros".
    output: the decomposition of the outputs; None: each output belongs to the rank of its centre (`geometry`). An axis
    on which a rank would have none is cut evenly, if it has enough outputs.

    ``span`` are the global positions that this rank reads along each axis, padding included.
    ``plan`` is the transfer that brings them here.
    ``native`` is the padding that the caller gives to torch's operation: along an axis that is not split, the operation
    pads with zeros itself, which saves a copy. Raises ValueError on every rank if a rank would have no output.
    """

    def __init__(
        self,
        layer: FieldLayer,
        rules: Sequence[Rule],
        modes: Sequence[str],
        output: Decomposition | None,
        fill: float,
    ) -> None:
        grid, decomposition, name = layer.grid, layer.input, type(layer).__name__
        expected = tuple(rule.outputs(n) for rule, n in zip(rules, decomposition.shape, strict=True))
        if output is None:
            bounds = [output_bounds(rule, sizes) for rule, sizes in zip(rules, decomposition.blocks, strict=True)]
            blocks = [tuple(b - a for a, b in itertools.pairwise(ends)) for ends in bounds]
            for axis, (sizes, points) in enumerate(zip(blocks, expected, strict=True)):
                if min(sizes) < 1 and points >= len(sizes):
                    blocks[axis] = Decomposition.even((points,), (len(sizes),)).blocks[0]
            output = Decomposition(tuple(blocks))
        elif output.shape != expected or output.grid_shape != grid.shape:
            raise ValueError(
                f"{name}: output={output.blocks} must cut {list(expected)} points over {list(grid.shape)} ranks"
            )
        if min(min(sizes) for sizes in output.blocks) < 1:
            raise ValueError(
                f"{name}: some ranks would have no output: {list(decomposition.shape)} points in the blocks "
                f"{decomposition.blocks} give {[max(n, 0) for n in expected]} points in the blocks {output.blocks}; "
                "use another padding, a smaller kernel, fewer ranks or a larger field"
            )
        self.output = output
        spans = [list(read_spans(rule, output.bounds(axis))) for axis, rule in enumerate(rules)]
        native = []
        for axis, (rule, mode, points) in enumerate(zip(rules, modes, decomposition.shape, strict=True)):
            alone = mode == "zeros" and len(spans[axis]) == 1
            alone = alone and isinstance(rule, Sliding) and rule.before == rule.after and not rule.ceil
            native.append(rule.before if alone and isinstance(rule, Sliding) else 0)
            if native[axis]:
                spans[axis] = [(0, points)]
            elif mode == "clipped":
                spans[axis] = [(max(low, 0), min(high, points)) for low, high in spans[axis]]
        self.native = tuple(native)
        self.span = tuple(ends[c] for ends, c in zip(spans, grid.coords, strict=True))
        self._comm, self._fill = grid.comm, fill
        self.plan = halo_plan(
            decomposition, grid.rank, spans, ["zeros" if mode == "clipped" else mode for mode in modes]
        )
        self._outside = []
        for axis, ((start, stop), points) in enumerate(zip(self.span, decomposition.shape, strict=True)):
            ends = ((start, min(stop, 0)), (max(start, points), stop))
            self._outside += [(axis - len(spans), low - start, high - low) for low, high in ends if low < high]
        own = [list(itertools.pairwise(decomposition.bounds(axis))) for axis in range(len(spans))]
        #: whether every rank reads its own block and nothing else
        self.is_block = spans == own

    def __call__(self, x: Tensor) -> Tensor:
        """Return the part of the field that this rank's outputs read. Differentiable. Collective over the grid."""
        if self.is_block:
            return x
        x = transfer(x, self.plan, self._comm)
        if self._fill:
            for dim, start, length in self._outside:
                x.narrow(dim, start, length).fill_(self._fill)
        return x


def narrowed(y: Tensor, spans: Sequence[Span]) -> Tensor:
    """Return the part (first, number) of ``spans`` of each axis of ``y`` [batch, channels, space...]: a view, or y."""
    for dim, (first, number) in enumerate(spans, start=2):
        if y.shape[dim] != number:
            y = y.narrow(dim, first, number)
    return y


def replicated(comm: Communicator, *parameters: Tensor) -> tuple[Tensor, ...]:
    """Return ``parameters``, whose gradients are summed over ``comm`` in the backward: one all-reduce for all of them.

    parameters: of one dtype, and equal on all ranks. Every rank must run the backward. All ranks get the same bits.
    A layer gives all its parameters in one call. Then autograd computes all their gradients where one is wanted, and a
    further derivative of a bias leads, by the gradient of the weight, to the layer's input on every rank: of a linear
    loss, the gradient of the bias itself does not depend on it.
    """
    if comm.size == 1 or not parameters or not followed():
        return parameters
    return apply_or(functools.partial(_plain_replicated, comm, parameters), _Replicated, comm, *parameters)  # type: ignore[no-any-return]


def _plain_replicated(comm: Communicator, parameters: Sequence[Tensor]) -> tuple[Tensor, ...]:
    total = functools.partial(_total, comm)
    return _side_by_side(lambda flat: apply_pair(flat, torch.clone, total, again=total), parameters)


def _side_by_side(function: Callable[[Tensor], Tensor], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """``function`` of all ``tensors`` as one vector: a derivative by any of them runs it for all."""
    found = function(torch.cat([one.reshape(-1) for one in tensors]))
    parts = torch.split(found, [one.numel() for one in tensors])
    return tuple(part.view(one.shape) for part, one in zip(parts, tensors, strict=True))


def _total(comm: Communicator, x: Tensor) -> Tensor:
    found = x.clone(memory_format=torch.contiguous_format)
    comm.all_reduce(found)
    return found


def summed_over_ranks(comm: Communicator, x: Tensor, tie: Tensor | None = None) -> Tensor:
    """Return the sum over the ranks. What they compute of it are terms of one sum, so it is its own adjoint."""
    total = functools.partial(_total, comm)
    return apply_pair(x, total, total, tie)


class _Replicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, comm: Communicator, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.comm = comm
        outputs = tuple(parameter.view_as(parameter) for parameter in parameters)
        ctx.save_for_backward(outputs[0])  # its own output, of which a tie is made when one is needed
        return outputs

    @staticmethod
    @in_forward_dtypes
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if followed() and not torch.compiler.is_compiling():
            total = functools.partial(summed_over_ranks, ctx.comm, tie=end_of(*ctx.saved_tensors))
            return None, *_side_by_side(total, grads)
        needed = [grad for grad, wanted in zip(grads, ctx.needs_input_grad[1:], strict=True) if wanted]
        sums = iter(sum_together(needed, ctx.comm))
        return None, *(next(sums) if wanted else None for wanted in ctx.needs_input_grad[1:])
