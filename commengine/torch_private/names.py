"""Every private name of torch that the project uses, and what takes its place in a torch that has it no more.

A private name may go, or change, with any release of torch. So each is looked up here, once, when it is first needed.
Where there is none, its substitute serves, or, if nothing can, the call raises `MissingInTorch`, which names torch's
version: nothing fails in silence. Tests take each name away.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor


class MissingInTorch(NotImplementedError):
    """This torch lacks a private name without which a function cannot do what it promises."""


@dataclass(frozen=True)
class PrivateName:
    """A name. path: from ``torch`` on. use: of it here. instead: does the same by public names; None: nothing does."""

    path: str
    use: str
    instead: Callable[..., Any] | None = None

    def found(self) -> Any:
        """What torch has under the name, or what takes its place."""
        owner, _, name = self.path.rpartition(".")
        try:
            place: Any = importlib.import_module(owner)
        except ImportError:
            first, *rest = owner.split(".")
            place = importlib.import_module(first)
            for part in rest:
                place = getattr(place, part, None)
        return getattr(place, name, self.instead or self.missing)

    def missing(self, *_: Any, **__: Any) -> NoReturn:
        raise MissingInTorch(
            f"torch {torch.__version__} has no {self.path}, which {self.use} needs: take a version that docs/scope.md "
            "names"
        )


def _leaves(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [leaf for one in tree.values() for leaf in _leaves(one)]
    if isinstance(tree, tuple | list):
        return [leaf for one in tree for leaf in _leaves(one)]
    return [tree]


def _map(function: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, dict):
        return type(tree)((name, _map(function, one)) for name, one in tree.items())
    if isinstance(tree, tuple | list):
        mapped = [_map(function, one) for one in tree]
        return type(tree)(*mapped) if hasattr(tree, "_fields") else type(tree)(mapped)
    return function(tree)


def _raw_stream(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def _norm(tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    return [torch.linalg.vector_norm(one, dtype=dtype) for one in tensors]


def _multiply(tensors: Sequence[Tensor], factor: float) -> None:
    for one in tensors:
        one.mul_(factor)


def _increment(tensors: Iterable[Tensor]) -> None:
    for one in tensors:
        torch.autograd.graph.increment_version(one)


#: all of them, by the last part of their paths
NAMES = {
    one.path.rpartition(".")[2]: one
    for one in (
        PrivateName("torch._C._increment_version", "autograd's count of writes", _increment),
        PrivateName("torch._C._cuda_getCurrentRawStream", "a collective on a GPU", _raw_stream),
        PrivateName("torch._C._are_functorch_transforms_active", "an operator under torch.func"),
        PrivateName("torch._C._DisableFuncTorch", "a sharded module under torch.func"),
        PrivateName("torch._C._current_graph_task_id", "DataParallel, which tells one backward from the next,"),
        PrivateName("torch._C._current_autograd_node", "DataParallel, which refuses a backward inside another one,"),
        PrivateName("torch._foreach_copy_", "a copy of many tensors", _copy),
        PrivateName("torch._foreach_norm", "the norm of many tensors", _norm),
        PrivateName("torch._foreach_mul_", "a product of many tensors", _multiply),
        PrivateName("torch._fused_sdp_choice", "attention in blocks on a GPU"),
        PrivateName("torch.utils._pytree.tree_map", "arguments of calls", _map),
        PrivateName("torch.utils._pytree.tree_leaves", "arguments of calls", _leaves),
    )
}


@functools.cache
def private(name: str) -> Any:
    """The function of one of NAMES."""
    return NAMES[name].found()
