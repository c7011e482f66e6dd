"""DataParallel: any module on several replicas, whose gradients are averaged as part of ``loss.backward()``.

    replicas = DataParallel(net, comm)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for x, y in my_batches:
        optimizer.zero_grad()
        loss(net(x), y).backward()
        optimizer.step()

Uneven batches, accumulation, clipping, sharded optimizers and checkpoints are here, too.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from commengine import CollectiveError, Communicator, ProcessGrid
from trainers.checkpoints.module_checkpoint import load, save
from trainers.checks.replicas import begin_equal, require_equal_gradients, require_same_structure
from trainers.settings import derived
from trainers.training.backwards import Backwards
from trainers.training.clipping import clip, gradient_norm
from trainers.training.module_state import ModuleBuffers
from trainers.training.reduction import GradientBuckets
from trainers.training.sharded_optimizer import ShardedOptimizer

#: a rank's note of a parameter that lacked a gradient in the backward, and of one that has none at all; else it is 0
_LATE, _ABSENT = 1, -1


class DataParallel:
    """The gradients of ``module``, averaged over replicas. The module itself stays as it is: call it as before.

    module: any ``nn.Module``. Its gradients are dense, and the set of parameters that require one stays the same.
    ranks: the Communicator whose ranks each hold a replica; or a `ProcessGrid`, each of whose tensor groups holds one
        together, by layers of tplayers that split parameters or fields. It stays the caller's.
    make_equal: all replicas begin with the parameters and buffers of the first one. False: a difference is an error
        that names the first parameter and the ranks.
    allow_unused: a backward may leave parameters without a gradient. It counts as zero on that rank; where it is
        missing on all ranks, ``grad`` stays None. False: that is an error, which names the parameters.
    equal_buffers: after each averaging the buffers get the values of the first replica.
    overlap: send a bucket of gradients on a stream as soon as it is complete, while the backward goes on. None: on
        devices only, because on the host the ranks already use all cores.
    bucket_size: the largest number of elements of a bucket; None: 4 million on the host, 40 million on devices.

    Construction and `close` are collective. Every backward outside of `no_sync` is, too: on its return
    ``parameter.grad`` is the mean of the ranks' gradients, the same bits on all replicas. A loss that is a mean over
    this rank's samples then gives the gradient of the mean over all samples, if the ranks have equally many; otherwise
    see `sample_weight`. Gradients that ``torch.autograd.grad`` returns are this rank's own. The averages have no graph,
    although the backward had ``create_graph=True``; a penalty on gradients takes them from ``torch.autograd.grad``.

    A backward that reaches no parameter of the module is not noticed, so on a rank that has no use for the module the
    others would wait: call `no_samples` there.

    Raises CollectiveError on every rank if the module differs between ranks in structure, or with
    ``make_equal=False`` in values; and in the first backward if the ranks of a tensor group have different gradients of
    a parameter that each of them holds. A backward raises RuntimeError on every rank if a gradient is missing, or if
    the backward itself changes parameters, as an optimizer in a gradient's hook does.
    """

    def __init__(
        self, module: nn.Module, ranks: Communicator | ProcessGrid, *, make_equal: bool = True,
        allow_unused: bool = False, equal_buffers: bool = True, overlap: bool | None = None,
        bucket_size: int | None = None,
    ) -> None:  # fmt: skip
        self.module, self.allow_unused, self.equal_buffers = module, allow_unused, equal_buffers
        if not isinstance(ranks, Communicator | ProcessGrid):
            raise CollectiveError(f"DataParallel needs a commengine.Communicator or ProcessGrid, not {ranks!r}")
        if isinstance(ranks, ProcessGrid):
            ranks.require_axes("DataParallel", "tensor", "data")
        require_same_structure(ranks if isinstance(ranks, Communicator) else ranks.world, module)
        self._trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if not self._trained:
            raise CollectiveError("DataParallel: the module has no parameter that requires a gradient")
        self._own_grid = isinstance(ranks, Communicator)
        self.grid = ProcessGrid(ranks) if isinstance(ranks, Communicator) else ranks
        self.buffers = ModuleBuffers(module, self.grid.data)
        try:
            begin_equal(self.grid, module, copy=make_equal)
        except CollectiveError:  # on every rank
            self._close_grid()
            raise
        self._gradients_compared = self.grid.tensor.size == 1
        self._block = contextlib.ExitStack()  # of the last backward of a step, while it runs
        self._backwards = Backwards(
            self._trained.values(), begun=self._begin, ended=lambda: self._finish(excused=False), failed=self._abandon
        )
        device = next(iter(self._trained.values())).device
        try:
            self.gradients = GradientBuckets(  # its hooks run after those above
                module, self.grid.data, tensor=self.grid.tensor, overlap=derived.overlapped(overlap, device),
                masters=False, bucket_size=derived.bucket_size(bucket_size, device, self.grid.data.size), op="avg",
            )  # fmt: skip
        except CollectiveError:  # on every rank
            self._backwards.remove()
            self._close_grid()
            raise
        self._buckets = {p: bucket for bucket in self.gradients.buckets for p in bucket.views}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self.module(*args, **kwargs)

    # A step -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """A block whose backwards add to this rank's gradients and send nothing. The next backward sends the sums."""
        self._backwards.forget()
        before, self._backwards.suspended = self._backwards.suspended, True
        try:
            yield
        finally:
            self._backwards.suspended = before

    def sample_weight(self, samples: float) -> float:
        """The factor of the *sum* of this rank's losses that makes the averaged gradient that of the mean of all.

        It is the number of replicas divided by all samples. samples: of this rank in the whole step, over all its
        backwards; it may be 0, and counts what the loss counts: samples, tokens, or cells. Collective over the data
        group, once a step; the ranks of a tensor group give the same number. Raises ValueError, on all ranks, unless
        the numbers are finite, none is negative, and one is positive.
        """
        usable = math.isfinite(samples) and samples >= 0
        counted = torch.tensor([samples if usable else 0.0, 0.0 if usable else 1.0], dtype=torch.float64, device="cpu")
        self.grid.data.all_reduce(counted)
        total, refused = counted.tolist()
        if refused or total == 0:
            raise ValueError(f"sample_weight({samples}): the samples of all ranks must be at least 0, and not all 0")
        return float(self.grid.data.size / total)

    def no_samples(self) -> None:
        """Take part in a step of the other ranks without a backward: this rank has no samples, its gradient is zero.

        Collective with the other ranks' backwards. If this rank has accumulated gradients by `no_sync`, they count.
        """
        self._backwards.start()
        self._finish(excused=True)

    def clip(self, largest: float) -> float:
        """Divide all gradients by norm / ``largest`` if their norm exceeds it. Returns the norm before.

        It is that of the whole model's gradient, the same on all ranks. 0: do not clip. Collective over the tensor
        group, between the last backward and the optimizer's step.
        """
        norm = gradient_norm(self.gradients.segments, self.grid.tensor)
        clip(self.gradients.segments, norm, largest)
        return norm

    def _begin(self) -> None:
        self._block.enter_context(self.gradients.last_microbatch())
        for bucket in self.gradients.buckets:
            bucket.put_back()

    def _abandon(self) -> None:
        """Forget a backward that raised an error, when what it sent has been received."""
        self._block.close()
        self.gradients.drain()

    def _finish(self, *, excused: bool) -> None:
        """Send what is left and wait for everything. excused: this rank has had no backward."""
        updated = self._backwards.updated()
        late = self.gradients.complete()
        self._block.close()
        self._backwards.stop()
        altered = self._altered()
        noted, any_altered, any_updated, apart = self._exchange(
            set() if excused or self.allow_unused else set(late), altered=altered != "", updated=bool(updated)
        )
        self.gradients.finish()
        for parameter, note in zip(self._trained.values(), noted, strict=True):
            if parameter.grad is None and note == 0:
                parameter.grad = self._buckets[parameter].gradient_of(parameter)
        if apart:
            raise RuntimeError(
                f"buffers have other shapes on other ranks: {self.buffers.replaced()}; with equal_buffers=False "
                "each rank keeps its own"
            )
        if self.equal_buffers:
            self.buffers.equalize()
        if any_altered:
            raise RuntimeError(
                f"the module's parameters are not those of the time when DataParallel was made: "
                f"{altered or 'they have changed on another rank'}; make a new DataParallel"
            )
        if any_updated:
            where = ", ".join(name for name, p in self._trained.items() if p in updated) or "on another rank"
            raise RuntimeError(
                f"parameters were changed during the backward: {where}. An optimizer in a hook of a gradient has the "
                "gradient of its own rank, because the average comes at the end of the backward, and so the replicas "
                "have parted; call the optimizer's step after the backward"
            )
        names = [name for name, note in zip(self._trained, noted, strict=True) if note == _LATE]
        if names:
            raise RuntimeError(
                f"no gradient in the backward for: {', '.join(names)}; allow_unused=True takes it for zero, and "
                "parameters that never get one can have requires_grad=False"
            )
        if not self._gradients_compared:
            require_equal_gradients(self.grid, self.module)
            self._gradients_compared = True

    def _altered(self) -> str:
        """The names of parameters that are trained now and were not, or are gone; "" if there is none."""
        known, now = set(self._trained.values()), dict(self.module.named_parameters(remove_duplicate=False))
        new = [name for name, p in now.items() if p.requires_grad and p not in known]
        there = set(now.values())
        gone = [name for name, p in self._trained.items() if p not in there and name not in new]
        said = [f"new or no longer frozen: {', '.join(new)}"] if new else []
        return "; ".join(said + ([f"gone: {', '.join(gone)}"] if gone else []))

    def _exchange(self, late: set[str], *, altered: bool, updated: bool) -> tuple[list[int], bool, bool, bool]:
        """Tell the ranks what is missing and what has changed here.

        late: names of parameters without a gradient in this backward, where that is an error. altered: this rank's
        module has other parameters now. updated: its parameters changed in a backward. Returns for each trained
        parameter _LATE if that is so on a rank, _ABSENT if no replica has a gradient of it, else 0; whether a rank's
        module has other parameters now; whether they changed in a backward; and whether the shapes of buffers differ.
        Collective over both groups.
        """
        grid = self.grid
        notes = [_LATE if name in late else _ABSENT * (p.grad is None) for name, p in self._trained.items()]
        layout = self.buffers.layout() if self.equal_buffers else 0
        told = torch.tensor([*notes, altered, updated, layout, -layout], dtype=torch.int64, device="cpu")
        if grid.data.size > 1:
            grid.data.all_reduce(told, "max")
        told[-1] += told[-2]  # the largest layout less the smallest one
        told[-2] = 0
        if grid.tensor.size > 1:  # an error of one data group is one of all
            faults = told.clamp(min=0)
            grid.tensor.all_reduce(faults, "max")
            told = torch.maximum(told, torch.where(faults > 0, 1, _ABSENT))
        *noted, any_altered, any_updated, _, apart = told.tolist()
        return noted, any_altered > 0, any_updated > 0, apart > 0

    # Optimizer and checkpoints -----------------------------------------------------------------------------------

    def sharded(
        self, kind: type[torch.optim.Optimizer], params: Iterable[Any] | None = None, *, separate: bool = False,
        **options: Any,
    ) -> ShardedOptimizer:  # fmt: skip
        """An optimizer ``kind`` whose state and work are spread over the replicas, by whole parameters (ZeRO-1).

        params: parameters or groups; None: all that require a gradient. See `ShardedOptimizer`. Collective.
        """
        params = self._trained.values() if params is None else params
        return ShardedOptimizer(params, kind, self.grid.data, separate=separate, **options)

    def save(
        self, folder: str | Path, optimizer: torch.optim.Optimizer, step: int, extra: Mapping[str, Any] | None = None,
        *, keep: int | None = None,
    ) -> None:  # fmt: skip
        """Write a checkpoint after ``step`` steps: module, optimizer, and ``extra``, which is JSON. Collective.

        keep: how many of the newest ones stay; None: all. Raises UsageError, on all ranks, if it cannot be written.
        """
        save(Path(folder), self.module, optimizer, self.grid, step=step, extra=extra or {}, keep=keep)

    def load(
        self, folder: str | Path, optimizer: torch.optim.Optimizer | None = None
    ) -> tuple[int, dict[str, Any]] | None:
        """Continue from the newest checkpoint in ``folder``, or from ``folder`` if it is one. Collective.

        It may have been saved by another number of ranks or tensor size, with the optimizer sharded or not. Returns
        (step, extra), or None if there is none. Raises UsageError, on all ranks, if the files are damaged, or belong to
        another module or optimizer.
        """
        return load(Path(folder), self.module, optimizer, self.grid)

    # Life -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Take the hooks off the module, and free what was made from MPI. Collective. The gradients stay."""
        self._backwards.forget()
        self._backwards.remove()
        self.gradients.remove()
        self._close_grid()

    def _close_grid(self) -> None:
        if self._own_grid:
            self.grid.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        # After an exception the other ranks may not be here, and a collective free would hang.
        if exception[0] is None:
            self.close()
