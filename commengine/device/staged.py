"""Device tensors by MPI, through pinned host memory, in order with the caller's CUDA stream.

A call begins after everything that the stream holds, copies its tensors to the host, runs there, and copies back. It
returns when its result is complete. Torch keeps pinned memory that is free, so a call of a known size maps none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from commengine.torch_private import private

from .nccl import Runtime


class HostedBackend:
    """Device tensors by MPI, through pinned host memory. host: runs the operations on host tensors."""

    def __init__(self, runtime: Runtime, device: torch.device, host: Any) -> None:
        self.device, self.runtime, self._host = device, runtime, host
        self._stream = runtime.cuda.Stream(device)

    def refusal(self, dtype: torch.dtype, op: str) -> None:
        """Return None: the host reduces every dtype."""

    def over(self, host: Any) -> HostedBackend:
        """Return the same backend over the routes of another sequence."""
        return HostedBackend(self.runtime, self.device, host)

    def ready(self) -> Any:
        """Return a CUDA event that is done when everything that the caller's current stream holds now is done.

        Raises SettledError if that stream is captured into a CUDA graph.
        """
        self.runtime.refuse_capture()
        return self.runtime.cuda.current_stream(self.device).record_event()

    def run(self, operation: Any, args: tuple[Any, ...], ready: Any) -> None:
        """Run an operation after the event ``ready``; the result is complete on return.

        A host stream takes ``ready`` when the collective is enqueued, and its worker calls this later.
        """
        cuda, copy = self.runtime.cuda, self.runtime.copy
        # The device of a new thread is number 0, and leaving the stream sets that one: each rank would make a context
        # there, and fail where a GPU is exclusive to one process.
        with cuda.device(self.device), cuda.stream(self._stream):
            self._stream.wait_event(ready)
            there: dict[int, Tensor] = {}
            moved = [one for one in operation.touched(args) if not one.tensor.is_cpu]
            for tensor, read, _ in moved:
                there[id(tensor)] = self.runtime.pinned(tensor)
                if read:
                    copy(there[id(tensor)], tensor)
            self._stream.synchronize()
            self._host.run(operation, private("tree_map")(lambda one: there.get(id(one), one), args))
            for tensor, _, written in moved:
                if written:
                    copy(tensor, there[id(tensor)])
            self._stream.synchronize()

    def close(self) -> None:
        """Do nothing: the owner of the routes closes them."""

    abort = close
