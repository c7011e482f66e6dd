"""How much memory a node has left for the ranks to share.

Memory without a name counts against the machine and against the control groups of this process. Beyond the limit of a
group the kernel kills a process; it does not refuse. So the ranks look before they reserve.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

#: the part of the machine's memory, or of a control group's, that is left for everything else
LEFT = 1 / 16

#: at least so many bytes of /dev/shm, and at least half of it, are left for MPI, that of other jobs included: Intel's
#: takes up to 17 MB when large messages pass, MPICH's all at its start
MARGIN_BYTES = 20 << 20

#: the files of a control group in version 2 and in version 1: limit, use, and the files' pages in memory, which the
#: kernel gives up before it kills
_FILES = {
    2: ("memory.max", "memory.current", ("active_file", "inactive_file")),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
}


def memory_left(root: Path = Path("/")) -> int:
    """Return the bytes of memory that may be taken: of the machine, and of each control group of this process."""
    left = whole = sys.maxsize
    with contextlib.suppress(OSError, KeyError, ValueError):
        of = _table(root / "proc/meminfo")
        whole = 1024 * of["MemTotal:"]
        left = 1024 * of["MemAvailable:"] - int(whole * LEFT)
    for folder, (most, used, pages) in _control_groups(root):
        with contextlib.suppress(OSError, KeyError, ValueError):  # no limit here, or not to be seen in a container
            limit = int((folder / most).read_text())
            if limit >= whole:
                continue
            of = _table(folder / "memory.stat")
            given_up = sum(of[name] for name in pages)
            left = min(left, limit - int(limit * LEFT) - int((folder / used).read_text()) + given_up)
    return left


def disk_left() -> int:
    """Return the bytes of /dev/shm that may be taken; it often has 64 MB in a container."""
    space = os.statvfs("/dev/shm")
    return space.f_bavail * space.f_frsize - max(MARGIN_BYTES, space.f_blocks * space.f_frsize // 2)


def _table(path: Path) -> dict[str, int]:
    """Read lines of a name and a number."""
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows}


def _control_groups(root: Path) -> Iterator[tuple[Path, tuple[str, str, tuple[str, str]]]]:
    """Yield the folder of each control group that limits this process's memory, the outer ones too."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            version, top = 2, root / "sys/fs/cgroup"
        elif "memory" in controllers.split(","):
            version, top = 1, root / "sys/fs/cgroup/memory"
        else:
            continue
        folder = top / path.lstrip("/")
        while folder != top and top in folder.parents:
            yield folder, _FILES[version]
            folder = folder.parent
        yield top, _FILES[version]
