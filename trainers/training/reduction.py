"""GradientBuckets: gradients in flat buckets, accumulated over microbatches and summed over the replicas."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn

from commengine import Communicator, Stream, Work
from tplayers import all_reduce_together, placements
from tplayers.canonical.shards import tree_sum
from tplayers.experts.moe import expert_parameters

from .layout import BucketLayout, Treatment, in_other_orders, lies_as, new_buffer, parts, put_back
from .sample_tree import SampleTree
from .tied import TiedWeight


@dataclass(frozen=True)
class GradientSegment:
    """A gradient, or a stretch of a bucket, whose values are treated alike.

    parameter: the gradient is this parameter's ``grad``. stretch: or it is this part of a flat buffer.
    """

    treatment: Treatment
    parameter: nn.Parameter | None = None
    stretch: Tensor | None = None

    @property
    def gradient(self) -> Tensor | None:
        """The gradient as it is now; None if there is none."""
        return self.stretch if self.parameter is None else self.parameter.grad


class GradientBucket:
    """The gradients of the parameters of ``layout``, which are reduced together, over ``data``.

    gradients: a buffer [layout.size] that holds them, in ``layout.state_dtype``, and None if there is none. There is
    none in single and double precision where ``data`` has one rank, unless the parameters are flat: nothing is sent,
    and the gradients stay where autograd puts them. In half precision ``parameter.grad`` is None after each backward,
    because the buffer has its sum in fp32. In other precisions with a buffer ``parameter.grad`` is a view of it, unless
    the parameter lies in another order than there: then it is a copy.

    run: gradients come from one sample at a time and are added up in a tree, of which this is a leaf's samples
    (`SampleTree`); ``parameter.grad`` then is None after each backward, too. None: they are added one to the other.
    stream: of ``data``, on which the bucket is reduced; None for none.
    """

    def __init__(
        self, layout: BucketLayout, data: Communicator, run: int | None = None, stream: Stream | None = None
    ) -> None:
        self.layout, self.data, self.stream = layout, data, stream
        self.waiting: set[nn.Parameter] = set()  # for their last gradient of this step
        self._fresh: set[nn.Parameter] = set()  # without a gradient in this step yet; used in half precision only
        self._copied: set[nn.Parameter] = set()  # the gradient is a copy of what is in the buffer
        self.last = False  # the step's last microbatch is under way
        self.gradients: Tensor | None = None
        self.views: dict[nn.Parameter, Tensor] = {}  # the part of `gradients` of each parameter
        if layout.flat or data.size > 1:
            self.gradients = new_buffer(layout.size, layout.state_dtype, layout.device, data)
            self.views = {parameter: layout.view(self.gradients, parameter) for parameter in layout.names}
        self.tree = None if run is None or self.gradients is None else SampleTree(layout, self.gradients, run)
        self._places = [(parameter, view, view.detach(), view.data_ptr()) for parameter, view in self.views.items()]
        self.segments = [GradientSegment(treatment, parameter) for parameter, treatment in layout.treatments.items()]
        if layout.flat:
            self.segments = [GradientSegment(one, stretch=self.reduced[part]) for one, part in layout.stretches()]

    @property
    def reduced(self) -> Tensor:
        """The gradients of this rank's share (`BucketLayout.mine`), which are the sums once they are reduced."""
        assert self.gradients is not None
        return self.gradients[self.layout.mine]

    def zero(self) -> None:
        """Start a step: all gradients are 0."""
        if self.tree is not None:
            self.tree.clear()
            self.begin_sample(last=False)
        if self.layout.mixed or self.tree is not None or self.gradients is None:
            self._fresh = set(self.layout.names)
            for parameter in self.layout.names:
                parameter.grad = None
            return
        self.gradients.zero_()
        for parameter, view in self.views.items():  # a caller that set a gradient to None took it out of the buffer
            parameter.grad = view if lies_as(view, parameter) else None

    def begin_sample(self, *, last: bool) -> None:
        """Wait for the gradients of the next sample, or microbatch. last: it is the last one of the step.

        Raises RuntimeError that names the parameters that got no gradient from the sample before.
        """
        self.last = last
        if self.tree is not None:
            if 0 < len(self.waiting) < len(self.layout.names):
                raise _incomplete(self.missing)
            self.tree.begin(last=last)
        self.waiting = set(self.layout.names)

    @property
    def missing(self) -> list[str]:
        """The names of the parameters whose gradient has not come."""
        return [self.layout.names[parameter] for parameter in self.waiting]

    def adopt(self, parameter: nn.Parameter) -> None:
        """Move a gradient that is not in the buffer into it: autograd then adds the next ones there.

        A parameter without a gradient counts as one whose gradient is zero, and still has none.
        """
        if (view := self.views.get(parameter)) is None or (grad := parameter.grad) is view:
            return
        if grad is None:
            view.zero_()
            return
        if grad.layout is not torch.strided:
            raise RuntimeError(f"{self.layout.names[parameter]}: its gradient is sparse; only dense ones are summed")
        view.copy_(grad.detach())
        parameter.grad = view
        if not lies_as(view, parameter):
            self._copied.add(parameter)
            parameter.grad = self.gradient_of(parameter)

    def gradient_of(self, parameter: nn.Parameter) -> Tensor:
        """What is in the buffer for ``parameter``, as its gradient: in the memory order of the parameter."""
        view = self.views[parameter]
        return view if lies_as(view, parameter) else torch.empty_like(parameter.detach()).copy_(view)

    def take_sums(self) -> None:
        """Give the gradients that are no views of the buffer its values."""
        for parameter in self._copied:
            if parameter.grad is not None:
                parameter.grad = self.gradient_of(parameter)
        self._copied.clear()

    def put_back(self) -> None:
        """Make the gradients views of the buffer again. ``module.to(...)`` gives those that are there other memory.

        Raises RuntimeError that names the parameter if its gradient has another dtype, shape or device now.
        """
        for parameter, view, place, address in self._places:
            if not put_back(view, place, address):
                raise RuntimeError(
                    f"{self.layout.names[parameter]}: the module has been converted from {place.dtype} on "
                    f"{place.device} to {view.dtype} on {view.device} after its gradients got their buffer; convert "
                    "it before"
                )
            if parameter.grad is view and not lies_as(view, parameter):  # the parameter has other memory now
                parameter.grad = self.gradient_of(parameter)

    def accumulate(self, parameter: nn.Parameter) -> None:
        """Move the half-precision gradient that autograd left into the fp32 sum.

        The first gradient of a step is copied, not added, so that the buffer need not be zeroed.
        """
        assert self.gradients is not None
        grad, parameter.grad = parameter.grad, None
        assert grad is not None
        if self.tree is not None:
            self.tree.put(parameter, grad)
        elif parameter in self._fresh:
            self._fresh.discard(parameter)
            self.views[parameter].copy_(grad)
        else:
            self.views[parameter].add_(grad)


def _incomplete(missing: Sequence[str]) -> RuntimeError:
    return RuntimeError(f"no gradient in the last microbatch's backward for: {', '.join(missing)}")


class GradientBuckets:
    """The gradients of ``module`` in buckets, summed over the replicas. It owns no parameters and no optimizer state.

    data: the ranks that hold the same parameters, and build it from them in the same order. Experts have a group of
    their own.
    experts: the ranks that hold the same experts. It is needed if ``module`` has experts over an expert group
        (`tplayers.MoE`), else ValueError.
    overlap: reduce a bucket on a stream of its group as soon as it is complete, while backward goes on.
    bucket_size: the largest number of elements of a bucket, unless one parameter is larger.
    tensor: the tensor group. It is needed if a parameter's placement is ``partial``, else ValueError.
    shard: reduce-scatter instead of all-reduce. This rank then gets the sum of its share of a bucket only (ZeRO-1,
        Rajbhandari et al. 2020, section 5.1), for an optimizer that is sharded in the same way.
    reduce_in_fp32: send the fp32 sums of half-precision gradients as they are, instead of rounding them to the
        parameters' dtype.
    masters: half-precision parameters have fp32 masters, and gradient sums in fp32. Without, they are treated as other
        parameters are, for optimizers that know no masters.
    op: "sum", or "avg" for the mean of the ranks' gradients.
    run: every microbatch is one sample, and the sum over the samples of the global batch is taken in a binary tree with
        leaves of ``run`` samples (`SampleTree`). Needs ``reduce_in_fp32``. None: they are added one to the other.
    chunk_of: the number of a parameter's chunk, by its name. Chunks get their last gradients at different times.
    tied: a weight of which autograd does not have the whole gradient, or not in one sum.
    twins: by a parameter's name, others of which the gradients are summed apart and then added to its own, in a tree.
        With ``run`` only.

    Parameters that require no gradient have no place in a bucket.

    Construction and `finish` are collective over ``data`` and ``experts``, and `finish` over ``tensor``, too. In a
    group of several ranks construction raises CollectiveError on all of them if a parameter is sparse or has elements
    that share memory.

    A step is: `zero`; for each microbatch a backward, the last backward inside `last_microbatch`; `finish`. The loss is
    already divided by the global count, so the sum over the group is the gradient: see ``segments``. An expert's
    gradient is that of all tokens of its expert group, so its sum is not over these ranks again.

    The gradients of a run in fp32 on one data-parallel rank (the README's first run) pass through no buffer: there is
    nothing to send, and a buffer would cost two more passes over memory, to zero it and to add to it. They stay in
    ``parameter.grad``, `finish` sends nothing, and ``segments`` are those very tensors. See `GradientBucket`.

    Buckets follow the parameters backwards, as backward computes their gradients, and are sent in the order of their
    numbers, which is the same on every rank. Nothing is sent before the last microbatch.
    """

    def __init__(
        self, module: nn.Module, data: Communicator, *, overlap: bool, bucket_size: int,
        experts: Communicator | None = None, tensor: Communicator | None = None, shard: bool = False,
        reduce_in_fp32: bool = False, masters: bool = True, op: str = "sum", run: int | None = None,
        chunk_of: Callable[[str], int] = lambda _: 0, tied: TiedWeight | None = None,
        twins: Mapping[str, Sequence[nn.Parameter]] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self.data, self.tensor, self.tied = data, tensor, tied
        self.shard, self.reduce_in_fp32, self.op = shard, reduce_in_fp32, op
        self.named = dict(module.named_parameters())
        self.placements = placements(module)
        trained = [(name, parameter) for name, parameter in self.named.items() if parameter.requires_grad]
        if tied is not None:  # it is complete last, and no other bucket waits for it
            trained.sort(key=lambda named: named[0] != tied.name)
        of_experts = expert_parameters(module)
        if of_experts and experts is None:
            raise ValueError("the module has experts over an expert group: GradientBuckets needs experts=")
        groups = dict.fromkeys([data, *([experts] if of_experts and experts is not None else [])])
        streams = {group: group.new_stream() for group in groups if overlap and group.size > 1}

        def group_of(name: str) -> Communicator:
            return experts if experts is not None and name in of_experts else data

        apart = set[str]()
        for group in groups:
            apart |= in_other_orders({name: p for name, p in trained if group_of(name) is group}, group)

        def new(part: list[tuple[str, nn.Parameter]]) -> GradientBucket:
            name = part[0][0]
            counted = tied is None or tied.counted or name != tied.name
            group = group_of(name)
            layout = BucketLayout(
                part, self.placements, group, shard=shard, masters=masters, flat=run is not None, counted=counted,
                expert=name in of_experts, apart=apart,
            )  # fmt: skip
            return GradientBucket(layout, group, run, streams.get(group))

        def kind(name: str) -> tuple[int, bool]:
            return chunk_of(name), tied is not None and name == tied.name

        backwards = trained[::-1]
        found = [
            part
            for chosen in (False, True)
            for part in parts([one for one in backwards if (one[0] in of_experts) == chosen], bucket_size, kind)
        ]
        places = {name: number for number, (name, _) in enumerate(backwards)}
        found.sort(key=lambda part: places[part[-1][0]])  # by the parameter that is complete last
        self.buckets = [new(part) for part in found]
        self._chunks = [kind(next(iter(bucket.layout.names.values()))) for bucket in self.buckets]
        #: the gradient of the other use of a tied weight, apart from the first; it has no place in an optimizer
        self._twin: GradientBucket | None = None
        if tied is not None and tied.twin is not None:
            self._twin = new([(tied.name, tied.twin)])
        #: the gradients of twins, apart
        self._of_twins: dict[GradientBucket, list[GradientBucket]] = {}
        for bucket in self.buckets:
            names = list(bucket.layout.names.values())
            others = zip(*(twins.get(name, ()) for name in names), strict=True)
            self._of_twins[bucket] = [new(list(zip(names, part, strict=True))) for part in others]
        #: the gradients after `finish`, of this rank's shares if sharded; in the order of the module's parameters
        self.segments = [segment for bucket in reversed(self.buckets) for segment in reversed(bucket.segments)]
        if tensor is None and any(placed.partial for placed in self.placements.values()):
            raise ValueError("a parameter's gradient is partial: GradientBuckets needs tensor=, to sum it over")
        self._overlap = bool(streams)
        self._complete = 0  # the buckets, from the first one on, that need not be waited for
        #: by number, for each bucket that was sent: its Work, and the tensor that has the result when the Work is done;
        #: None: the result is where it belongs
        self._in_flight: dict[int, tuple[Work, Tensor | None]] = {}
        bucket_of = {p: bucket for bucket in self._all for p in bucket.layout.names}
        self._hooks = [
            p.register_post_accumulate_grad_hook(lambda p, bucket=bucket: self._arrived(p, bucket))  # type: ignore[no-untyped-call]
            for p, bucket in bucket_of.items()
        ]

    @property
    def _all(self) -> list[GradientBucket]:
        of_tied = [] if self._twin is None else [self._twin]
        return [*self.buckets, *of_tied, *itertools.chain(*self._of_twins.values())]

    def zero(self) -> None:
        """Start a step: all gradients are 0."""
        self.drain()
        for bucket in self._all:
            bucket.zero()

    def drain(self) -> None:
        """Wait for what a step that failed has sent: a buffer in flight must not be written to."""
        for work, _ in self._in_flight.values():
            work.wait()
        self._in_flight.clear()
        self._complete = 0

    @contextlib.contextmanager
    def last_microbatch(self, chunk: int = 0) -> Iterator[None]:
        """A block around the last backward of a step through ``chunk``. With ``overlap``, it sends gradients."""
        mine = [bucket for bucket, (of, _) in zip(self.buckets, self._chunks, strict=True) if of == chunk]
        mine += [] if self._twin is None else [self._twin]
        mine += [twin for bucket in mine for twin in self._of_twins.get(bucket, ())]
        for bucket in mine:
            bucket.begin_sample(last=True)
        try:
            yield
        finally:
            for bucket in mine:
                bucket.last = False

    def complete(self) -> list[str]:
        """End the last microbatch although gradients are missing: they count as zero, or as accumulated before.

        A parameter that never got one keeps ``grad`` None. Returns the names of the parameters that got no gradient in
        the last microbatch. Not collective; `finish` then is, as always.
        """
        late = self._missing()
        for bucket in self.buckets:
            for parameter in bucket.waiting:
                bucket.adopt(parameter)
            bucket.waiting.clear()
        self._send_complete()
        return late

    def finish(self) -> None:
        """End a step: every gradient is the sum over its replicas, and a partial one over the tensor group too.

        Collective over these groups. Raises RuntimeError that names the parameters that got no gradient in the last
        microbatch.
        """
        if missing := self._missing():
            raise _incomplete(missing)
        for index, (bucket, (_, tied)) in enumerate(zip(self.buckets, self._chunks, strict=True)):
            if index >= self._complete:
                self._add_twins(bucket)
            if tied:
                self._finish_tied(bucket)
            if bucket.data.size > 1 and not (tied and bucket.tree is not None):
                work, received = self._in_flight.get(index) or self._send(bucket)
                work.wait()
                if received is not None:
                    bucket.reduced.copy_(received)
                bucket.take_sums()
        self._in_flight.clear()
        self._complete = 0
        self._sum_partial()

    def _add_twins(self, bucket: GradientBucket) -> None:
        """Add the gradients of the twins of its parameters to those of ``bucket``."""
        if twins := self._of_twins[bucket]:
            tree_sum(one.gradients for one in (bucket, *twins) if one.gradients is not None)

    def _finish_tied(self, bucket: GradientBucket) -> None:
        """Add the gradient of the tied weight's other use to that of ``bucket``. With a tree, sum both over the data.

        The tree then has each use apart, and the sum is the same at every layout. With ZeRO-1 it is whole here, too.
        """
        assert self.tied is not None
        if bucket.tree is not None:
            for one in (bucket, self._twin):
                if one is not None and one.gradients is not None:
                    self.data.all_reduce(one.gradients, self.op)
            if self._twin is not None and self._twin.gradients is not None and bucket.gradients is not None:
                bucket.gradients += self._twin.gradients
        (gradient,) = [bucket.gradients] if bucket.gradients is not None else [p.grad for p in bucket.layout.names]
        assert gradient is not None
        self.tied.add(gradient)

    def _missing(self) -> list[str]:
        return [name for bucket in self._all for name in bucket.missing]

    def remove(self) -> None:
        """Take the hooks off the module."""
        for hook in self._hooks:
            hook.remove()

    def _arrived(self, parameter: nn.Parameter, bucket: GradientBucket) -> None:
        """Autograd's hook: the parameter's gradient of this microbatch is complete."""
        if bucket.layout.mixed or bucket.tree is not None:
            bucket.accumulate(parameter)
        else:
            bucket.adopt(parameter)
        bucket.waiting.discard(parameter)
        if bucket.tree is not None and not bucket.waiting:
            bucket.tree.end()
            if not bucket.last:
                bucket.begin_sample(last=False)
        if bucket.last:
            self._send_complete()

    def _send_complete(self) -> None:
        """With a stream: send each bucket that is complete and next in order."""
        while self._overlap and self._complete < len(self.buckets) and self._may_go(number := self._complete):
            self._add_twins(self.buckets[number])
            if self.buckets[number].data.size > 1:
                self._in_flight[number] = self._send(self.buckets[number])
            self._complete += 1

    def _may_go(self, number: int) -> bool:
        """Whether bucket ``number`` has all gradients of the step, and needs none of another stage."""
        _, tied = self._chunks[number]
        bucket = self.buckets[number]
        return not tied and all(one.last and not one.waiting for one in (bucket, *self._of_twins[bucket]))

    def _send(self, bucket: GradientBucket) -> tuple[Work, Tensor | None]:
        """Start to sum ``bucket`` over its group. Returns the Work, and the tensor that then has the result.

        On the host, gradients that are not rounded are summed in their buffer: the ranks of a node then hold one copy
        of a sharded sum together, and no other.
        """
        assert bucket.gradients is not None
        sent, dtype = bucket.gradients, bucket.layout.dtype
        rounded = not self.reduce_in_fp32 and sent.dtype != dtype
        if rounded:
            sent = sent.to(dtype)
        if not self.shard:
            return bucket.data.all_reduce(sent, self.op, stream=bucket.stream), sent if rounded else None
        mine = bucket.layout.mine
        received = sent[mine] if sent.is_cpu else sent.new_empty(mine.stop - mine.start)
        work = bucket.data.reduce_scatter(received, sent, self.op, stream=bucket.stream)
        return work, received if rounded or not sent.is_cpu else None

    def _sum_partial(self) -> None:
        """Sum the partial gradients over the tensor group, in one all-reduce.

        A bucket's segments have the same bounds on all ranks of a tensor group, sharded or not.
        """
        if self.tensor is not None:
            gradients = (segment.gradient for segment in self.segments if segment.treatment.partial)
            all_reduce_together([gradient for gradient in gradients if gradient is not None], self.tensor)
