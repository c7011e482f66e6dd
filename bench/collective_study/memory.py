"""How much memory the ranks of a node may take for their buffers."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from bench.command.values import size_of
from bench.timing.starting import neighbours
from commengine import Communicator
from commengine.mpi import load_mpi, reduced

#: by default all buffers together take at most 1 / MEMORY_SHARE of the memory
MEMORY_SHARE = 8


def free_memory(world: Communicator) -> dict[str, int]:
    """Bytes that each rank may take on the node that has least: {"available": in all, "shared": of them in windows}.

    Collective.
    """
    node = neighbours(world.mpi)[world.rank]
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        available = int(lines["MemAvailable"].split()[0]) << 10
    try:  # a container's share of the machine
        limit, used = (Path("/sys/fs/cgroup", name).read_text() for name in ("memory.max", "memory.current"))
        available = min(available, max(0, int(limit) - int(used)))
    except (OSError, ValueError):  # there is no cgroup, or no limit ("max")
        pass
    shared = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else available
    each = [reduced(world.mpi, size // len(node), load_mpi().MIN) for size in (available, min(available, shared))]
    return dict(zip(("available", "shared"), each, strict=True))


def largest_size(given: str | None, transports: Sequence[str], memory: dict[str, int]) -> int:
    """The bytes of --max-bytes; without it, the power of two with which all buffers take a share of the memory.

    Raises ValueError if the buffers do not fit.
    """
    buffers = 2 * len(transports) + ("under-all-reduce" in transports)
    most = memory["available"] // buffers
    if "shared" in transports:
        most = min(most, memory["shared"] // 2)
    if given is None:
        return 1 << max(0, (most // MEMORY_SHARE).bit_length() - 1)
    largest = size_of("--max-bytes", given)
    if largest > most:
        raise ValueError(
            f"--max-bytes {given}: {buffers} buffers of that size; at most {most} bytes each fit into "
            f"the memory that a rank has ({memory['available']} bytes, {memory['shared']} of them shared)"
        )
    return largest
