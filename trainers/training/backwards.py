"""Backwards: when a backward that reaches some parameters begins and has ended, and what went wrong in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from commengine.torch_private import private

_TASK, _NODE = private("_current_graph_task_id"), private("_current_autograd_node")

#: PyTorch's engine, which calls back at the end of a backward. DistributedDataParallel and FSDP end theirs so, too.
_ENGINE: Any = torch.autograd.Variable._execution_engine


class Backwards:
    """The backwards that reach ``parameters``. One inside another (reentrant checkpoints) raises RuntimeError.

    begun, ended: called at the first gradient of a backward, and when the whole backward has ended. failed: called for
    one that raised an error, before the next one begins.

    Other hooks of the parameters run after ``begun``.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], *, begun: Callable[[], None], ended: Callable[[], None],
        failed: Callable[[], None],
    ) -> None:  # fmt: skip
        self._begun, self._ended, self._failed = begun, ended, failed
        #: while it is true, backwards are not followed
        self.suspended = False
        self._parameters = list(parameters)
        self._versions: list[int] | None = None  # of the parameters, at the first gradient of a backward
        self._updated: set[nn.Parameter] = set()
        self.stop()
        self._hooks = [_hooked_first(p, self._comes) for p in self._parameters]

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

    def updated(self) -> set[nn.Parameter]:
        """The parameters that a backward itself changed since the last call, as an optimizer in a hook does."""
        self._look()
        found, self._updated = self._updated, set()
        return found

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()

    def _comes(self, _: Tensor) -> None:
        """Autograd's hook: a parameter has its gradient."""
        task = _TASK()
        if task == self._task:
            return
        self._look()
        self._versions = [p._version for p in self._parameters]
        if not self.suspended:
            self.start()
        self._task = task
        _ENGINE.queue_callback(self._look if self.suspended else self._ends)

    def _look(self) -> None:
        """Find the parameters that have changed since the first gradient of a backward."""
        if self._versions is not None:
            self._updated.update(
                p for p, version in zip(self._parameters, self._versions, strict=True) if p._version != version
            )
            self._versions = None

    def _ends(self) -> None:
        """Autograd's callback at the end of a backward."""
        if _NODE() is not None:
            raise RuntimeError(
                "a backward of the module runs inside another one: give torch.utils.checkpoint use_reentrant=False"
            )
        self._ended()


def _hooked_first(parameter: nn.Parameter, hook: Callable[[Tensor], None]) -> Any:
    """Register ``hook`` to run when the gradient is there, before the hooks that the parameter has already."""
    handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    hooks: Any = parameter._post_accumulate_grad_hooks  # the engine calls them in the order of their entries
    others = [(number, one) for number, one in hooks.items() if number != handle.id]
    for number, one in others:
        del hooks[number]
        hooks[number] = one
    return handle
