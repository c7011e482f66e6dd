"""Several programs in one MPI.COMM_WORLD (MPMD): the ranks of each program, and intercommunicators between them.

A program in another language takes part with three calls of MPI: `split_world` names them.
"""

from __future__ import annotations

import itertools
import threading
from array import array
from typing import TYPE_CHECKING, Any

from commengine.errors import LaunchError
from commengine.job_end import say
from commengine.mpi import OwnsCommunicators

from .segments import unlink_own
from .start import SLOW_SECONDS, start_mpi
from .tasks import check_world_size

if TYPE_CHECKING:
    from mpi4py import MPI

#: the tag with which the first ranks of the first pair of parts meet in MPI_Intercomm_create. Each further pair has the
#: next tag: MPICH 5.0 crashes if a rank makes two intercommunicators with one tag while their other parts meet, too
INTERCOMM_TAG = 20000

#: the greatest color: MPI_Comm_split takes a C int
GREATEST_COLOR = 2**31 - 1

#: the color of a rank that has none; MPI's own colors are not negative
NO_COLOR = -1


class WorldPart(OwnsCommunicators):
    """The ranks of one color: the ranks of one program of an MPMD job. `split_world` makes it.

    color: this part's. comm: an intracommunicator of its ranks, in the order of their ranks in the world. others: an
    intercommunicator to each other part, by that part's color; in each one the local group is this part.

    They are communicators of mpi4py, so the messages of the programs are those of any MPI program. `close` frees them.
    """

    def __init__(self, color: int, comm: MPI.Intracomm, others: dict[int, MPI.Intercomm]) -> None:
        self.color, self.comm, self.others = color, comm, others

    @property
    def other(self) -> MPI.Intercomm:
        """The intercommunicator to the only other part. Raises `LaunchError` unless there are two parts."""
        if len(self.others) == 1:
            return next(iter(self.others.values()))
        if self.others:
            colors = sorted(self.others)
            raise LaunchError(f"there are {len(colors)} other parts, of colors {colors}: choose from `others`")
        raise LaunchError(
            f"all {self.comm.size} ranks have the color {self.color}, so there is no other part. mpiexec -n 2 ./solver "
            ": -n 2 python ... gives each program its own MPI_APPNUM; where the launcher does not, pass color="
        )

    def close(self) -> None:
        """Free the communicators; may be called again. Collective over all parts: an intercommunicator has two."""
        for color in sorted(self.others):
            self.others.pop(color).Free()
        if self.comm:
            self.comm.Free()

    def __repr__(self) -> str:
        return f"WorldPart(color={self.color}, others={sorted(self.others)})"


def split_world(color: int | None = None, *, comm: MPI.Intracomm | None = None) -> WorldPart:
    """Divide a communicator into the parts of equal color, and connect the parts by intercommunicators.

    color: 0 or more; None: the number of this rank's program in the launcher's command (MPI_APPNUM), which is 0 for
        ``./solver`` and 1 for ``python`` in ``mpiexec -n 2 ./solver : -n 2 python ...``.
    comm: what is divided; None: MPI.COMM_WORLD, and MPI is started if it does not run.

    Collective over ``comm``. A program in C or Fortran takes part with these calls, in this order:

    1. ``MPI_Allgather`` of one MPI_INT, its color (an attribute: ``MPI_Comm_get_attr(comm, MPI_APPNUM, ...)``), over
       ``comm``;
    2. ``MPI_Comm_split`` of ``comm`` by the color, with key 0;
    3. for each pair of colors, in ascending order of (lower, higher), ``MPI_Intercomm_create`` of the two parts with
       local leader 0, peer communicator ``comm``, the lowest rank of the other color as remote leader, and tag 20000
       plus the number of the pair in this order, from 0.

    Says on standard error what it waits for, if a rank has not called it after a minute. Raises `LaunchError` on every
    rank if any rank has no valid color, and if the launcher started more tasks than MPI has ranks.
    """
    mpi = start_mpi()
    whole: Any = mpi.COMM_WORLD if comm is None else comm
    if not isinstance(whole, mpi.Intracomm) or whole == mpi.COMM_NULL:
        raise LaunchError(f"split_world needs an MPI intracommunicator, not {comm!r}")
    given = mpi.COMM_WORLD.Get_attr(mpi.APPNUM) if color is None else color
    valid = isinstance(given, int) and not isinstance(given, bool) and 0 <= given <= GREATEST_COLOR
    colors = _colors_of_all(whole, given if valid else NO_COLOR)
    if comm is None:
        if len(set(colors)) == 1:  # with the wrong launcher each task is a world of its own
            check_world_size(whole.size, library=mpi.Get_library_version())
        unlink_own()  # every rank has been in the collective: it has opened MPI's files
    if wrong := [rank for rank, one in enumerate(colors) if one < 0]:
        mine = "MPI_APPNUM, which the launcher has not set" if given is None else f"color={given!r}"
        raise LaunchError(
            f"split_world needs a color from 0 to {GREATEST_COLOR} on every rank, and rank{'s' * (len(wrong) > 1)} "
            f"{', '.join(map(str, wrong))} of {whole.size} gave none (rank {whole.rank}: {mine})"
        )
    own = colors[whole.rank]
    part = whole.Split(own, 0)
    others = {}
    present = sorted(set(colors))
    for number, (lower, higher) in enumerate(itertools.combinations(present, 2)):
        if own in (lower, higher):
            theirs = higher if own == lower else lower
            others[theirs] = part.Create_intercomm(0, whole, colors.index(theirs), INTERCOMM_TAG + number)
    return WorldPart(own, part, others)


def _colors_of_all(comm: Any, color: int) -> list[int]:
    """The color of each rank of ``comm``. A blocking call, because the other programs' MPI_Allgather is one."""
    mine, all_of_them = array("i", [color]), array("i", [0] * comm.size)
    text = (
        f"launch.split_world has waited for {SLOW_SECONDS:g} s: every rank of the {comm.size} must take part. In "
        "another program the first call is MPI_Allgather of its color, an MPI_INT"
    )
    slow = threading.Timer(SLOW_SECONDS, say, [f"[rank {comm.rank}] {text}"])
    slow.daemon = True
    slow.start()
    try:
        comm.Allgather(mine, all_of_them)
    finally:
        slow.cancel()
    return all_of_them.tolist()
