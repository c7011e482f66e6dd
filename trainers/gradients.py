"""Gradients in flat buckets: their reduction over the data group, their norm, clipping."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from commengine import Communicator, Stream, Work
from tplayers import placement_of


@dataclass
class _Bucket:
    """Parameters whose gradients are views of one flat tensor."""

    flat: Tensor | None
    names: dict[nn.Parameter, str]
    waiting: set[nn.Parameter] = field(default_factory=set)
    work: Work | None = None


class GradientBuckets:
    """The gradients of ``module`` in flat buffers, summed over the data group.

    data: the data group. Every rank must build it from the same parameters in the same order.
    overlap: reduce a bucket on a stream of its own as soon as its last gradient is there, while backward goes on.
    bucket_size: elements, at most, unless one parameter is larger.

    In a data group of one rank there is nothing to send, and the gradients stay where autograd puts them: filling
    and adding into a buffer would cost two passes over memory.

    A step is: `zero`; for each microbatch a backward, the last one inside `last_microbatch`; `finish`. The loss is
    already divided by the global number of tokens, so the sum over the group is the gradient. Buckets follow the
    parameters backwards, and are launched by index, so in one order on every rank; nothing is sent before the last
    microbatch. A parameter that got no gradient is a RuntimeError that names it.
    """

    def __init__(self, module: nn.Module, data: Communicator, *, overlap: bool, bucket_size: int) -> None:
        self.data = data
        parts = _parts(reversed(list(module.named_parameters())), bucket_size)
        self.buckets = [_bucket(part, flat=data.size > 1) for part in parts]
        self._stream: Stream | None = data.new_stream() if overlap and data.size > 1 else None
        self._last = False
        self._launched = 0
        bucket_of = {p: bucket for bucket in self.buckets for p in bucket.names}
        self._hooks = [
            p.register_post_accumulate_grad_hook(lambda p, bucket=bucket: self._arrived(p, bucket))  # type: ignore[no-untyped-call]
            for p, bucket in bucket_of.items()
        ]

    def zero(self) -> None:
        """Start a step: all gradients are 0."""
        for bucket in self.buckets:
            if bucket.flat is None:
                for p in bucket.names:
                    p.grad = None
                continue
            bucket.flat.zero_()
            bucket.work = None
            offset = 0
            for p in bucket.names:  # whoever set a gradient to None took it out of the bucket
                view = bucket.flat[offset : offset + p.numel()].view_as(p)
                if p.grad is None or p.grad.data_ptr() != view.data_ptr():
                    p.grad = view
                offset += p.numel()
        self._launched = 0

    @contextlib.contextmanager
    def last_microbatch(self) -> Iterator[None]:
        """Around the backward after which nothing is added any more."""
        for bucket in self.buckets:
            bucket.waiting = set(bucket.names)
        self._last = True
        try:
            yield
        finally:
            self._last = False

    def finish(self) -> None:
        """End a step: every gradient is the sum over the data group. Collective over it."""
        missing = [bucket.names[p] for bucket in self.buckets for p in bucket.waiting]
        if missing:
            raise RuntimeError(f"no gradient in the last microbatch's backward for: {', '.join(missing)}")
        for bucket in self.buckets:
            if bucket.work is not None:
                bucket.work.wait()
            elif bucket.flat is not None:
                self.data.all_reduce(bucket.flat)

    def remove(self) -> None:
        """Take the hooks off the module."""
        for hook in self._hooks:
            hook.remove()

    def _arrived(self, parameter: nn.Parameter, bucket: _Bucket) -> None:
        if not self._last:
            return
        bucket.waiting.discard(parameter)
        if self._stream is None:
            return
        while self._launched < len(self.buckets) and not self.buckets[self._launched].waiting:
            ready = self.buckets[self._launched]
            ready.work = self.data.all_reduce(ready.flat, stream=self._stream)
            self._launched += 1


def gradient_norm(module: nn.Module, tensor: Communicator) -> float:
    """The Euclidean norm of the whole model's gradient: the same at every TP size. Collective over ``tensor``.

    The squares of split parameters are summed over the tensor group; replicated ones, and a tied one, count once.
    """
    squares = torch.zeros(2, dtype=torch.float64)
    gradients: tuple[list[Tensor], list[Tensor]] = ([], [])
    for parameter in module.parameters():
        if parameter.grad is not None:
            gradients[placement_of(parameter).sharded].append(parameter.grad)
    for kind, grads in enumerate(gradients):
        if grads:
            squares[kind] = torch.stack(torch._foreach_norm(grads)).double().square().sum()
    sharded = squares[1:]
    tensor.all_reduce(sharded)
    return float(squares.sum().sqrt())


def clip(module: nn.Module, norm: float, largest: float) -> None:
    """Scale all gradients of ``module`` by ``largest / norm`` where ``norm`` is larger; 0 turns it off."""
    if largest > 0 and norm > largest:
        torch._foreach_mul_([p.grad for p in module.parameters() if p.grad is not None], largest / (norm + 1e-6))


def _parts(parameters: Iterable[tuple[str, nn.Parameter]], size: int) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """Runs of one dtype, of at most ``size`` elements each (or one parameter)."""
    part: list[tuple[str, nn.Parameter]] = []
    elements = 0
    for name, parameter in parameters:
        full = elements + parameter.numel() > size
        if part and (full or part[0][1].dtype != parameter.dtype):
            yield part
            part, elements = [], 0
        part.append((name, parameter))
        elements += parameter.numel()
    if part:
        yield part


def _bucket(part: list[tuple[str, nn.Parameter]], *, flat: bool) -> _Bucket:
    names = {parameter: name for name, parameter in part}
    if not flat:
        return _Bucket(None, names)
    total = sum(parameter.numel() for parameter in names)
    first = part[0][1]
    buffer = torch.zeros(total, dtype=first.dtype, device=first.device)
    return _Bucket(buffer, names)
