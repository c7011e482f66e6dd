"""What ends the calls of all communicators of a process: a fork, in the child, and the end of MPI.

A program may finalise MPI while communicators are open, with work in their streams. MPI calls this module first, by an
attribute of COMM_SELF: the streams then finish as at the end of a program, and no thread of ours calls MPI afterwards.
"""

from __future__ import annotations

import os
import time
import weakref
from typing import Any

from commengine.job_end import is_child_of_rank
from commengine.mpi import load_mpi
from commengine.stream import finish_streams

_open: weakref.WeakSet[Any] = weakref.WeakSet()
_keyval: int | None = None


def follow(comm: Any) -> None:
    """End the calls of a `commengine.communicator.Communicator` in a forked child and when MPI ends."""
    global _keyval
    _open.add(comm)
    if _keyval is None:
        mpi = load_mpi()
        _keyval = mpi.Comm.Create_keyval(delete_fn=_mpi_ends)
        mpi.COMM_SELF.Set_attr(_keyval, True)


def _mpi_ends(*_: object) -> None:
    if is_child_of_rank():
        return
    finish_streams()
    for comm in list(_open):
        comm.end_with_mpi(f"rank {comm.rank} finalised MPI at {time.strftime('%H:%M:%S')}")


def _forked() -> None:
    for comm in list(_open):
        comm.end_in_child()


os.register_at_fork(after_in_child=_forked)
