"""Gradients in flat buckets: accumulated over microbatches, summed over the data group."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor, nn

from commengine import Communicator, Stream, Work
from tplayers import all_reduce_together, placements

from .buckets import Bucket, parts


class GradientBuckets:
    """The gradients of ``module`` in flat buffers, summed over the data group.

    data: the data group. Every rank must build it from the same parameters in the same order.
    overlap: reduce a bucket on a stream of its own as soon as its last gradient is there, while backward goes on.
    bucket_size: elements, at most, unless one parameter is larger.
    tensor: the tensor group; needed where a parameter's placement is ``partial``.
    shard: reduce-scatter instead of all-reduce: this rank gets the sum of its part of a bucket only (ZeRO-1,
        Rajbhandari et al. 2020, section 5.1), for an optimizer that is sharded alike.
    reduce_in_fp32: send the fp32 sums of half parameters as they are, not rounded to the parameters' dtype.

    In single precision, in a data group of one rank, there is nothing to send, and the gradients stay where autograd
    puts them: filling and adding into a buffer would cost two passes over memory. The gradients of half parameters are
    added up in fp32 as autograd delivers them, and ``parameter.grad`` is None after a backward.

    Half parameters, and all where the buckets are sharded, become views of flat buffers: build it when the parameters
    have their values, which the masters copy.

    A step is: `zero`; for each microbatch a backward, the last one inside `last_microbatch`; `finish`. The loss is
    already divided by the global number of tokens, so the sum over the group is the gradient: it is ``values.grad`` of
    each of ``segments``. Buckets follow the parameters backwards, and are launched by index, so in one order on every
    rank; nothing is sent before the last microbatch. A parameter that got no gradient is a RuntimeError that names it.
    """

    def __init__(
        self,
        module: nn.Module,
        data: Communicator,
        *,
        overlap: bool,
        bucket_size: int,
        tensor: Communicator | None = None,
        shard: bool = False,
        reduce_in_fp32: bool = False,
    ) -> None:
        self.data, self.tensor = data, tensor
        self.shard, self.reduce_in_fp32 = shard, reduce_in_fp32
        self.named = dict(module.named_parameters())
        self.placements = placements(module)
        self.buckets = [
            Bucket(part, self.placements, data, shard=shard)
            for part in parts(reversed(list(self.named.items())), bucket_size)
        ]
        #: in the order of the module's parameters
        self.segments = [segment for bucket in reversed(self.buckets) for segment in reversed(bucket.segments)]
        if tensor is None and any(placed.partial for placed in self.placements.values()):
            raise ValueError("a parameter's gradient is partial: GradientBuckets needs tensor=, to sum it over")
        self.stream: Stream | None = data.new_stream() if overlap and data.size > 1 else None
        self._last = False
        self._in_flight: list[tuple[Work, Tensor]] = []  # of the buckets launched, what each will have received
        bucket_of = {p: bucket for bucket in self.buckets for p in bucket.names}
        self._hooks = [
            p.register_post_accumulate_grad_hook(lambda p, bucket=bucket: self._arrived(p, bucket))  # type: ignore[no-untyped-call]
            for p, bucket in bucket_of.items()
        ]

    def zero(self) -> None:
        """Start a step: all gradients are 0."""
        for work, _ in self._in_flight:  # of a step that failed: a buffer in flight is not touched
            work.wait()
        self._in_flight.clear()
        for bucket in self.buckets:
            bucket.zero()

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
        """End a step: every gradient is the sum over the data group, and a partial one over the tensor group.

        Collective over both.
        """
        missing = [bucket.names[p] for bucket in self.buckets for p in bucket.waiting]
        if missing:
            raise RuntimeError(f"no gradient in the last microbatch's backward for: {', '.join(missing)}")
        if self.data.size > 1:
            for index, bucket in enumerate(self.buckets):
                work, received = self._in_flight[index] if self.stream is not None else self._send(bucket)
                work.wait()
                if received is not bucket.gradients:
                    bucket.reduced.copy_(received)
            self._in_flight.clear()
        self._sum_partial()

    def remove(self) -> None:
        """Take the hooks off the module."""
        for hook in self._hooks:
            hook.remove()

    def _arrived(self, parameter: nn.Parameter, bucket: Bucket) -> None:
        if bucket.mixed:
            bucket.accumulate(parameter)
        if not self._last:
            return
        bucket.waiting.discard(parameter)
        if self.stream is None:
            return
        while (launched := len(self._in_flight)) < len(self.buckets) and not self.buckets[launched].waiting:
            self._in_flight.append(self._send(self.buckets[launched]))

    def _send(self, bucket: Bucket) -> tuple[Work, Tensor]:
        """Start to sum ``bucket`` over the data group: the Work, and the tensor that then has the result."""
        assert bucket.gradients is not None
        sent = bucket.gradients if self.reduce_in_fp32 else bucket.gradients.to(bucket.dtype)
        if not self.shard:
            return self.data.all_reduce(sent, stream=self.stream), sent
        received = sent.new_empty(bucket.size // self.data.size)
        return self.data.reduce_scatter(received, sent, stream=self.stream), received

    def _sum_partial(self) -> None:
        """Sum over the tensor group what each of its ranks has a part of, in one all-reduce.

        A bucket's segments have the same bounds on all ranks of a tensor group, sharded over the data group or not.
        """
        gradients = [segment.values.grad for segment in self.segments if segment.kind.partial]
        if self.tensor is not None:
            all_reduce_together([gradient for gradient in gradients if gradient is not None], self.tensor)
