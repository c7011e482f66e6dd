"""Backwards: when a backward that reaches some parameters begins, when it has ended, and whether it raised an error."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

#: PyTorch's engine, which calls back at the end of a backward. DistributedDataParallel and FSDP end theirs so, too.
_ENGINE: Any = torch.autograd.Variable._execution_engine


class Backwards:
    """The backwards that reach ``parameters``. One inside another (reentrant checkpoints) raises RuntimeError.

    begun, ended: called at the first gradient of a backward, and when the whole backward has ended. failed: called for
    one that raised an error, before the next one begins.

    Hooks of the parameters that are registered later run after ``begun``.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], *, begun: Callable[[], None], ended: Callable[[], None],
        failed: Callable[[], None],
    ) -> None:  # fmt: skip
        self._begun, self._ended, self._failed = begun, ended, failed
        #: while it is true, backwards are not followed
        self.suspended = False
        self.stop()
        self._hooks = [p.register_post_accumulate_grad_hook(self._comes) for p in parameters]  # type: ignore[no-untyped-call]

    def start(self) -> None:
        """Begin as a backward does. `stop` ends it."""
        self.forget()
        self._running = True
        self._begun()

    def stop(self) -> None:
        """The backward that goes on is done."""
        self._running = False
        self._task: int | None = None  # autograd's number of the backward

    def forget(self) -> None:
        """End a backward that raised an error, if there is one that has not ended."""
        if self._running:
            self.stop()
            self._failed()

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()

    def _comes(self, _: Tensor) -> None:
        """Autograd's hook: a parameter has its gradient."""
        task = torch._C._current_graph_task_id()
        if not self.suspended and task != self._task:
            self.start()
            self._task = task
            _ENGINE.queue_callback(self._ends)

    def _ends(self) -> None:
        """Autograd's callback at the end of a backward."""
        if torch._C._current_autograd_node() is not None:
            raise RuntimeError(
                "a backward of the module runs inside another one: give torch.utils.checkpoint use_reentrant=False"
            )
        self._ended()
