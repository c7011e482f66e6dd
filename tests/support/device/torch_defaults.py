"""Tensors that the packages make for themselves name their device and dtype: a mode that fails if they do not."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_ROOT = Path(__file__).resolve().parent.parent.parent.parent
_PACKAGES = tuple(f"{_ROOT / name}/" for name in ("commengine", "tplayers", "trainers"))
#: parameters and buffers of layers follow torch's defaults, as those of torch's own layers do
_FOLLOWING = tuple(str(_ROOT / "tplayers" / name) for name in ("placement.py", "fields/norm.py"))
_FACTORIES = frozenset({
    torch.arange, torch.as_tensor, torch.asarray, torch.empty, torch.empty_strided, torch.eye, torch.full,
    torch.linspace, torch.ones, torch.rand, torch.randint, torch.randn, torch.randperm, torch.scalar_tensor,
    torch.tensor, torch.zeros,
})  # fmt: skip


class Explicit(TorchFunctionMode):
    """Fails every call of a factory, from a file of the packages, that leaves the device or the dtype to torch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FACTORIES:
            caller = sys._getframe(1)
            path = caller.f_code.co_filename
            if path.startswith(_PACKAGES) and path not in _FOLLOWING:
                left = [name for name in ("device", "dtype") if kwargs.get(name) is None]
                if left:
                    raise AssertionError(
                        f"{path}:{caller.f_lineno}: torch.{func.__name__} without {' and '.join(left)}"
                    )
        return func(*args, **kwargs)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set torch's default dtype within the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def default_device(name: str) -> Iterator[None]:
    """Set torch's default device within the block."""
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


#: (what a program may have set, by name); `Explicit` names the place where a default would be taken
DEFAULTS = {
    "explicit": Explicit,
    "device": lambda: default_device("meta"),
    "dtype": lambda: default_dtype(torch.float64),
}
