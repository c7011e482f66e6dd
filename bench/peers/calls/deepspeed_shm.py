"""DeepSpeed's all-reduce in shared memory, which its inference uses, in one process beside each rank.

    python -m bench.peers.calls.deepspeed_shm shm CAPACITY     # with $BENCH_PEER_SOCKET, see obeying.py

torch compiles the operator when it is first asked for. It sums in place; out of place it has no other form than a copy.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.peers.calls.obeying import serve
from bench.transports.in_process import LocalTransport
from bench.transports.operations import CollectiveCall

#: torch's lock of the build, in the folder of extensions: a file, which a build that is killed leaves behind
LOCK = Path("deepspeed_shm_comm", "lock")


def operators() -> Any:
    """The compiled operators. Rank 0 compiles them, and first deletes the lock, for which it would wait for ever.

    Collective.
    """
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder  # type: ignore[import-not-found]

    if dist.get_rank() == 0:
        (Path(os.environ["TORCH_EXTENSIONS_DIR"]) / LOCK).unlink(missing_ok=True)
        ShareMemCommBuilder().load(verbose=False)
    dist.barrier()
    return ShareMemCommBuilder().load(verbose=False)


class SharedMemory(LocalTransport):
    """The operator, called as DeepSpeed's communication backend calls it."""

    name = "deepspeed"
    operations = ("all_reduce",)

    def __init__(self, capacity: int) -> None:
        with contextlib.redirect_stdout(sys.stderr):
            dist.init_process_group("gloo")
            operators().initialize(dist.get_world_size(), dist.get_rank())
        # The ranks of gloo's barrier leave it too far apart, so the operator is the barrier here.
        meet = partial(torch.ops.deepspeed.inference_all_reduce_, torch.zeros(1))
        super().__init__(dist.get_rank(), meet, *(torch.zeros(capacity, dtype=torch.uint8) for _ in range(2)))

    def refuses(self, call: CollectiveCall, in_place: bool) -> str | None:
        if call.dtype not in (torch.float32, torch.bfloat16, torch.float16) or call.redop != "sum":
            return "DeepSpeed's operator sums float32, bfloat16 and float16 only"
        return super().refuses(call, in_place)

    def _start(self, call: CollectiveCall, in_place: bool) -> Callable[[], Any]:
        return partial(torch.ops.deepspeed.inference_all_reduce_, self._buffers.views(call, self._rank, in_place)[1])


def main() -> None:
    """Serve the operator."""
    capacity = int(sys.argv[2])
    serve(lambda: SharedMemory(capacity), (RuntimeError, ValueError, ImportError, AttributeError))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
