"""inference_copy: a model whose modules are called without the work that `torch.nn.Module` does for each call."""

from __future__ import annotations

import functools
from typing import Any, TypeVar

from torch import nn

Model = TypeVar("Model", bound=nn.Module)


def inference_copy(model: Model) -> Model:
    """A copy of ``model`` in evaluation mode and without sequence parallelism, for passes without gradients.

    It shares all tensors with ``model``, which does not change, and runs the same ``forward`` methods. It is valid
    until a tensor of ``model`` is replaced.

    A token of GPT-2 takes 1 ms less with it. Each product of a new token replaces what the core's caches hold, so every
    line of Python after it costs several times as much as in a loop. A module of the copy has its tensors and modules
    as plain attributes, and a call of it is a call of its ``forward``. A module with forward hooks is called as ever,
    but hooks that are registered for all modules do not run.

    Sequence parallelism changes none of the numbers, and a new token alone cannot be split over the ranks. Use the copy
    for its forward passes alone: it cannot be trained, moved or saved.
    """
    tensors = {
        name: None if tensor is None else tensor.detach()
        for name, tensor in (*model._parameters.items(), *model._buffers.items())
    }
    modules = {name: None if child is None else inference_copy(child) for name, child in model._modules.items()}
    kind: Any = type(model)
    if not (model._forward_hooks or model._forward_pre_hooks):
        kind = _directly_called(kind)
    copied: Model = object.__new__(kind)
    attributes = vars(copied)
    attributes.update(vars(model), **tensors, **modules)
    attributes.update(_parameters={}, _buffers=tensors, _modules=modules, _compiled_call_impl=None, training=False)
    if "sequence_parallel" in attributes:
        attributes["sequence_parallel"] = False
    return copied


@functools.cache
def _directly_called(kind: Any) -> Any:
    """A subclass of which a call is a call of ``forward``."""
    return type(kind.__name__, (kind,), {"__call__": kind.forward})
