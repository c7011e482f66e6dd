"""MPI's own files in /dev/shm: unlinked once all ranks have opened them, so that a killed job leaves none behind.

MPICH and Open MPI unlink these files in MPI_Finalize only. A job that is killed leaves them, and a requeued job, whose
files get the same names, fails in MPI_Init or hangs there. A file that is unlinked while it is mapped stays usable, and
the system frees it with the last process. MPICH's file for a window of a program, and a file of
`commengine.shared_memory.files`, have a name only while ranks open them; a kill at that moment leaves it.

MPI writes to these files without a look at the room that is left, and the system kills a rank where there is none.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from commengine.job_end import say

from .tasks import first_on_node

#: where Linux keeps shared memory
FOLDER = Path("/dev/shm")

#: the files of MPICH (its own and those of windows), of Intel's MPI, which unlinks them in MPI_Init, of Open MPI 5, of
#: Open MPI 4, which warns at the end if its file is gone, and of this package
NAMES = ("mpich_shm_", "mpich_shar_tmp", "Intel_MPI_", "sm_segment.", "vader_segment.", "commengine-")
UNMISSED = ("mpich_shm_", "sm_segment.")

#: a file that no process maps is stale when it is older than this many seconds: MPI_Init makes it before it maps it
STALE_SECONDS = 30.0

#: the PID namespace that the kernel makes first; it has the processes of all others, too
FIRST_NAMESPACE = Path("pid:[4026531836]")

#: megabytes of 2^20 bytes: what each rank of MPICH 5.0.2 takes there, of which its UCX takes the most; and what must be
#: free when a rank starts. UCX looks twice: with less at the first look it shares memory of System V instead, and with
#: less at the second look the rank dies (SIGSEGV)
MPICH_EACH, UCX_FREE = 5.15, 16.0

#: without UCX's part: a file of MPICH with so much for each rank, where a rank dies by SIGBUS
MPICH_LEAST = 1.1

#: Intel's MPI 2021.18.1, whose launcher sets MPI_LOCALNRANKS, too, takes so much, and so much more for each rank
INTEL_NEEDS = (2.0, 2.5)

#: a socket that has a name once a task of the node has printed that there is too little; it ends with the process
_said: list[socket.socket] = []


def unlink_own(folder: Path = FOLDER) -> list[Path]:
    """Unlink the files of MPI that this process maps, and return them.

    Every rank of the node must have opened them: call it after MPI_Init and a barrier. Not collective.
    """
    mapped = sorted(set(_mapped("self", folder)))
    return [path for path, inode in mapped if path.name.startswith(UNMISSED) and _unlinked(path, inode)]


def remove_stale(folder: Path = FOLDER, environ: Mapping[str, str] = os.environ) -> list[Path]:
    """Remove the files of MPI of this user that no process maps, before MPI_Init; return them.

    Only the first task of a node does it. In a container it removes nothing: the container may share the folder with
    others, whose processes it does not see.
    """
    if not first_on_node(environ) or not sees_all_processes():
        return []
    found = {inode: path for path, inode in _of_this_user(folder)}
    if not found:
        return []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            for _, inode in _mapped(process.name, folder):
                found.pop(inode, None)
    return [path for inode, path in found.items() if _unlinked(path, inode)]


def sees_all_processes() -> bool:
    """Whether the processes of this machine are all in /proc: this one is in no PID namespace of its own."""
    try:
        return Path("/proc/self/ns/pid").readlink() == FIRST_NAMESPACE
    except OSError:
        return False


def say_if_too_small(folder: Path = FOLDER, environ: Mapping[str, str] = os.environ) -> None:
    """Print a line, on one task of a node, if MPI will find too little memory there. Call it on all before MPI_Init.

    It is no error: another version of MPI may need less.
    """
    ranks = environ.get("MPI_LOCALNRANKS", "")
    if not ranks.isdecimal():
        return
    intel = "I_MPI_HYDRA_UUID" in environ
    needed = INTEL_NEEDS[0] + INTEL_NEEDS[1] * int(ranks) if intel else UCX_FREE + MPICH_EACH * (int(ranks) - 1)
    with contextlib.suppress(OSError):  # no such folder, or another task of the node has said it
        space = os.statvfs(folder)
        whole = space.f_blocks * space.f_frsize / (1 << 20)
        if whole >= needed or (not intel and MPICH_LEAST * int(ranks) <= whole < UCX_FREE):
            return
        # The first task would not do: another one may be killed before that one comes here.
        _said.append(socket.socket(socket.AF_UNIX))
        _said[-1].bind(f"\0commengine-shm-{os.getppid()}")
        say(
            f"{folder} has {whole:.1f} MB, and {'Intel MPI' if intel else 'MPICH'} needs {needed:.1f} MB there "
            f"for {ranks} ranks of a node: a rank may die as it starts. A container gets more with --shm-size=1g"
            + ("" if intel else "; with UCX_TLS=^posix in the environment MPICH needs less")
        )


def _unlinked(path: Path, inode: int) -> bool:
    """Unlink a file, unless another one has its name by now. Returns whether it was there."""
    with contextlib.suppress(OSError):  # another rank of the node was first
        if path.stat().st_ino == inode:
            path.unlink()
            return True
    return False


def _of_this_user(folder: Path) -> Iterator[tuple[Path, int]]:
    """Yield MPI's files that are old enough to be stale, and their inodes."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(NAMES):
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    if status.st_uid == os.getuid() and time.time() - status.st_mtime > STALE_SECONDS:
                        yield Path(entry.path), status.st_ino


def _mapped(process: str, folder: Path) -> Iterator[tuple[Path, int]]:
    """Yield MPI's files in ``folder`` that ``process`` maps under their names, and their inodes."""
    with contextlib.suppress(OSError), Path("/proc", process, "maps").open(errors="replace") as maps:
        for line in maps:
            if f" {folder}/" not in line:
                continue
            fields = line.rstrip("\n").split(None, 5)  # address, permissions, offset, device, inode, path
            path = Path(fields[5])
            if path.parent == folder and path.name.startswith(NAMES) and not path.name.endswith(" (deleted)"):
                yield path, int(fields[4])
