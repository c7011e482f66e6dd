"""Backwards: when a backward that reaches some parameters begins, when it has ended, and whether it raised an error."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

#: PyTorch's engine, which calls back at the end of a backward. DistributedDataParallel and FSDP end theirs so, too.
_ENGINE: Any = torch.autograd.Variable._execution_engine


class Backwards:
    """The backwards that reach ``parameters``. A backward inside another one (reentrant checkpoints) is a part of it.

    begun, ended: called at the first gradient of a backward, and when the whole backward has ended. failed: called for
    one that raised an error, before the next one begins. repeated: called with a parameter that may get a second
    gradient in one backward, because it is used inside and outside of a reentrant checkpoint.

    Hooks of the parameters that are registered later run after ``begun`` and ``repeated``.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], *, begun: Callable[[], None], ended: Callable[[], None],
        failed: Callable[[], None], repeated: Callable[[Tensor], None],
    ) -> None:  # fmt: skip
        self._begun, self._ended, self._failed, self._repeated = begun, ended, failed, repeated
        #: while it is true, backwards are not followed
        self.suspended = False
        self._clear()
        self._hooks = [p.register_post_accumulate_grad_hook(self._comes) for p in parameters]  # type: ignore[no-untyped-call]

    def start(self) -> None:
        """Begin as a backward does. `stop` ends it."""
        self.forget()
        self._running = True
        self._begun()

    def stop(self) -> None:
        """The backward that goes on is done."""
        self._clear()

    def forget(self) -> None:
        """End a backward that raised an error, if there is one that has not ended."""
        if self._running:
            self._clear()
            self._failed()

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()

    def _clear(self) -> None:
        self._running = False
        self._task: int | None = None  # autograd's number of the backward, or of the inner one
        self._nested = False
        self._ends: list[weakref.ref[_End]] = []

    def _comes(self, parameter: Tensor) -> None:
        """Autograd's hook: a parameter has its gradient."""
        if self.suspended:
            return
        failed = self._ends and all(end() is None for end in self._ends)
        task = torch._C._current_graph_task_id()
        if task == self._task and not failed:
            if self._nested:
                self._repeated(parameter)
            return
        if failed or not self._running:
            self.start()
        else:
            self._nested = True
            self._repeated(parameter)
        self._task = task
        end = _End(self)
        self._ends.append(weakref.ref(end))  # autograd drops the object with the backward, also after an error
        _ENGINE.queue_callback(end)

    def ends(self, end: _End) -> None:
        """Autograd's callback at the end of a backward, or of one inside another."""
        if not self._running:
            return
        inside: Any = torch._C._current_autograd_node()
        after = [] if inside is None else [node for node, _ in inside.next_functions if node is not None]
        if not after:
            self._ended()
            return

        # The outer backward goes on with the nodes after the one whose backward has the inner one inside. The hook runs
        # in the outer backward, so that the callback comes at its end. It keeps `end`, and is dropped with the graph.
        def in_outer(_: Any) -> None:
            hook.remove()
            _ENGINE.queue_callback(end)

        hook = after[0].register_prehook(in_outer)


class _End:
    """Autograd calls it at the end of a backward. It lives as long as the backward does."""

    def __init__(self, owner: Backwards) -> None:
        self._owner = owner

    def __call__(self) -> None:
        self._owner.ends(self)
