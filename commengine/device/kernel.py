"""Kernels of our own on a CUDA device: CuPy compiles their source and starts them on torch's current stream."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

import torch

#: a block's threads, and the most blocks of a kernel
_THREADS, _MOST_BLOCKS = 256, 1 << 20


@functools.cache
def compiled(source: str, name: str) -> Callable[[int, tuple[int, ...], int], None] | None:
    """Return a function that starts the kernel ``name``; None without CuPy, or, with a warning, if it cannot compile.

    It takes the number of blocks that would do, the kernel's arguments but for the last (each 8 bytes: integers and
    addresses) and the last one, an int32. It starts fewer blocks if they are many, so a kernel loops over its blocks.
    """
    try:
        import cupy

        kernel = cupy.RawKernel(source, name)
        kernel.compile()
    except ModuleNotFoundError:
        return None
    except Exception as error:  # a CuPy that does not start, or an NVRTC that is missing
        warnings.warn(f"CuPy cannot compile {name}, and slower operators do its work: {error}", stacklevel=2)
        return None

    def start(blocks: int, arguments: tuple[int, ...], last: int) -> None:
        stream = torch.cuda.current_stream()
        with cupy.cuda.ExternalStream(stream.cuda_stream, stream.device_index):
            kernel((min(blocks, _MOST_BLOCKS),), (_THREADS,), (*arguments, cupy.int32(last)))

    return start
