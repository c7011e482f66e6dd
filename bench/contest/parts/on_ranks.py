"""Helps contests whose sides are calls on the ranks of a job."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commengine import Communicator, UsageError
from commengine.mpi import sleep_until_all
from commengine.rank_zero import on_rank_zero

if TYPE_CHECKING:
    from mpi4py import MPI

#: seconds between looks of a rank that waits
POLL_SECONDS = 0.02


@contextmanager
def new_folder(world: Communicator) -> Iterator[Path]:
    """A new temporary folder, which is removed at the end. Collective; UsageError if there can be none."""

    def made() -> str:
        try:
            return tempfile.mkdtemp(prefix="contest-")
        except OSError as error:
            raise UsageError(f"a folder for temporary files: {error.strerror}") from error

    folder = Path(on_rank_zero(world, made))
    try:
        yield folder
    finally:
        if world.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def on_some(world: Communicator, ranks: int, work: Callable[[MPI.Intracomm], dict[str, Any]]) -> dict[str, Any]:
    """``work`` on the first ``ranks`` ranks, while the others sleep: there may be more ranks than cores.

    All ranks get rank 0's result. Collective over ``world``.
    """
    found, mine = None, world.rank < ranks
    group: Any = world.mpi.Split(int(mine), world.rank)
    if mine:
        found = work(group)
    sleep_until_all(world.mpi, POLL_SECONDS)
    group.Free()
    return dict(world.mpi.bcast(found))
