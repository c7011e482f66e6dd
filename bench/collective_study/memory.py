"""How much memory the ranks of a node may take for their buffers."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from bench.timing.starting import neighbours
from commengine import Communicator
from commengine.mpi import load_mpi, reduced


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
