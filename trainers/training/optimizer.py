"""AdamW over the buckets, in full precision, on all of them or on this rank's shard; its state by global names."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from commengine import Work
from tplayers import Placement

from .buckets import MOMENTS, Bucket
from .reduction import GradientBuckets


class Optimizer:
    """AdamW on the segments of ``gradients``, without decay on biases and norms (paper, section 4.2).

    Half parameters get the rounded value of an fp32 master (Micikevicius et al. 2018, section 3.1). Where the buckets
    are sharded, each rank of the data group updates its part and all gather the whole (ZeRO-1, Rajbhandari et al. 2020,
    section 5.1): on the buckets' stream where they have one, so `wait_for_parameters` before they are read.

    updates: the steps done; what learning-rate schedules count.
    """

    def __init__(
        self, gradients: GradientBuckets, *, weight_decay: float, betas: tuple[float, float], eps: float
    ) -> None:
        self.gradients = gradients
        self.updates = 0
        self._steps = [_adamw(bucket, weight_decay, betas, eps) for bucket in gradients.buckets]
        self._bucket_of = {p: (bucket, n) for n, bucket in enumerate(gradients.buckets) for p in bucket.names}
        self._gathers: list[Work] = []

    def step(self, rate: float) -> None:
        """One update with learning rate ``rate``. Collective over the data group where the buckets are sharded."""
        for bucket, adamw in zip(self.gradients.buckets, self._steps, strict=True):
            for group in adamw.param_groups:
                group["lr"] = rate
            adamw.step()
            bucket.publish()
            if bucket.sharded:
                self._gather_parameters(bucket)
        self.updates += 1

    def _gather_parameters(self, bucket: Bucket) -> None:
        assert bucket.parameters is not None
        mine = bucket.parameters[bucket.mine]
        gradients = self.gradients
        self._gathers.append(gradients.data.all_gather(bucket.parameters, mine, stream=gradients.stream))

    def wait_for_parameters(self) -> None:
        """Until now the last step's parameters may be on their way: call it before a forward pass or a checkpoint."""
        for work in self._gathers:
            work.wait()
        self._gathers.clear()

    # Checkpoints ----------------------------------------------------------------------------------------------

    @property
    def masters(self) -> bool:
        """Whether there are fp32 masters of half parameters."""
        return any(bucket.mixed for bucket in self.gradients.buckets)

    def described(self) -> dict[str, tuple[torch.dtype, Placement]]:
        """What `tensors` gives: exp_avg.NAME, exp_avg_sq.NAME, and master.NAME of half parameters."""
        found = {}
        for kind in (*MOMENTS, "master"):
            for name, parameter in self.gradients.named.items():
                mixed = self._bucket_of[parameter][0].mixed
                if kind != "master" or mixed:
                    dtype = torch.float32 if mixed else parameter.dtype
                    found[f"{kind}.{name}"] = (dtype, self.gradients.placements[name])
        return found

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Rank 0 of the data group gets all state, each tensor in its parameter's shape; the others nothing.

        Collective over the data group: every rank must exhaust it. What is gathered of a sharded bucket is one of its
        kinds of state at a time; whoever takes each tensor before the next keeps no more than two alive.
        """
        for bucket, adamw in zip(self.gradients.buckets, self._steps, strict=True):
            for kind in (*MOMENTS, "master"):
                if kind == "master" and not bucket.mixed:
                    continue
                whole = self._whole(bucket, kind) if bucket.flat else None
                if self.gradients.data.rank == 0:
                    for parameter, name in bucket.names.items():
                        tensor = adamw.state[parameter][kind] if whole is None else bucket.view(whole, parameter)
                        yield f"{kind}.{name}", tensor

    def _whole(self, bucket: Bucket, kind: str) -> Tensor:
        """The bucket's state of all shards, on rank 0 of the data group."""
        mine, data = bucket.state[kind], self.gradients.data
        if not bucket.sharded or data.size == 1:
            return mine
        whole = mine.new_empty(bucket.size if data.rank == 0 else 0)
        data.gather(whole if data.rank == 0 else None, mine)
        return whole

    def fill(self, kind: str, name: str, values: Tensor) -> None:
        """Set ``kind`` ("master", which is the parameter too, or a moment) of parameter ``name``, in its shape."""
        parameter = self.gradients.named[name]
        bucket, number = self._bucket_of[parameter]
        with torch.no_grad():
            if bucket.flat:
                bucket.fill(kind, parameter, values)
            else:
                (parameter if kind == "master" else self._steps[number].state[parameter][kind]).copy_(values)

    def set_updates(self, updates: int) -> None:
        """Go on as after ``updates`` steps."""
        self.updates = updates
        for adamw in self._steps:
            for state in adamw.state.values():
                state["step"].fill_(updates)


def _adamw(bucket: Bucket, weight_decay: float, betas: tuple[float, float], eps: float) -> torch.optim.AdamW:
    """AdamW over the bucket's segments, its moments in the bucket's buffers where that has any."""
    groups = [
        {"params": values, "weight_decay": weight_decay if decayed else 0.0}
        for decayed in (True, False)
        if (values := [segment.values for segment in bucket.segments if segment.kind.decayed == decayed])
    ]
    adamw = torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=eps, fused=True)
    start = 0
    for segment in bucket.segments:
        end = start + segment.values.numel()
        adamw.state[segment.values] = {"step": torch.zeros((), dtype=torch.float32, device=segment.values.device)}
        for kind in MOMENTS:
            moment = bucket.state[kind][start:end] if bucket.flat else torch.zeros_like(segment.values)
            adamw.state[segment.values][kind] = moment
        start = end
    return adamw
