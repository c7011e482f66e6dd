"""Flags in shared memory, by which the ranks of a node meet and compare their calls without a message.

Each sequence of collectives has flags of its own: one sequence is the caller's, and each stream has another. Each
collective through memory begins with a comparison: each rank tells the others what it is about to do.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable, Sequence

from commengine.agreement import disagreement
from commengine.errors import GroupMember, TransferError

from .segment import SharedSegment

#: how often a waiting rank looks at another rank's flag between two calls of MPI
LOOKS_PER_PROGRESS = 256

#: how often a rank looks before it waits in the sequence's own way, which takes longer for each look and may sleep
FIRST_LOOKS = 30

#: the flags of a rank fill two cache lines of their own. In the first: the round, and twice three words for a call
#: (place; size and operation; checksum of the rest). In the second: the progress in each stage of a pipeline
LINES_BYTES = 128
_ROUND, _ASKED, _WORDS, _STAGES = 0, 1, 3, 8

#: the stages of a chunk that goes through slots (`commengine.shared_memory.slots`)
FILLED, REDUCED = range(2)

#: the place of a tensor that lies in no window
PRIVATE = -1

#: the operations that have a way through memory, and those of them that reduce
IN_MEMORY = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
REDUCING_IN_MEMORY = IN_MEMORY[:2]

#: the operations by the number that stands in the flags. "gather_into": an all-gather whose output lies in a window
_OPERATIONS = (*IN_MEMORY, "gather_into")
_NUMBERS = {name: number for number, name in enumerate(_OPERATIONS)}


class Flags:
    """The flags of one node's ranks, for one sequence of collectives.

    segment: memory of LINES_BYTES a rank, which is zero. rank: this rank's number in the node. progress: lets MPI make
    progress. wait: waits until a function returns True. group, ranks: this rank in the whole group, and the ranks in
    the group of the node's ranks, for errors.
    """

    def __init__(
        self,
        segment: SharedSegment,
        rank: int,
        *,
        progress: Callable[[], object],
        wait: Callable[[Callable[[], bool]], None],
        group: GroupMember,
        ranks: Sequence[int],
    ) -> None:
        self.rank, self.size = rank, len(segment.memory)
        self._progress, self._wait = progress, wait
        self._group, self._ranks = group, ranks
        self._flags = [part.cast("q") for part in segment.memory]
        self._mine = self._flags[rank]
        self._others = [flags for flags in self._flags if flags is not self._mine]
        self._round = 0
        self._words = _ASKED  # where the words of the present call begin
        self._checksums: dict[object, int] = {}
        self._process = os.getpid()
        # Releasing a lock and taking it again is a fence, on processors that reorder writes, too: what comes before is
        # seen before what comes after. MPI_Win_sync is one, but needs a window.
        lock = threading.Lock()
        lock.acquire()
        self._release, self._acquire = lock.release, lock.acquire

    def refuse_child(self) -> None:
        """Raise `TransferError` in a forked child: its parent goes on to use the flags and slots."""
        if self._process != os.getpid():
            raise TransferError("a forked child cannot run collectives: the group's rank is its parent process")

    # Comparing calls --------------------------------------------------------------------------------------------

    def begin(self, operation: str, place: int, nbytes: int, how: tuple[object, ...]) -> None:
        """Wait until every rank begins a collective, and compare the calls.

        place: where the tensor lies: a number that is the same on all ranks, or PRIVATE. how: dtype, and reduction or
        root, in a few forms only, because their checksums are kept. Everything that this rank wrote before can be read
        by a rank whose call has returned.

        A rank cannot be two calls ahead of another rank, because it waits for every rank's last call. So two sets of
        words suffice, and no rank waits until the others have read its words.

        Raises CollectiveMismatch on all ranks if the calls differ, because a rank would otherwise write over a tensor
        that belongs to another collective.
        """
        self.refuse_child()
        checksum = self._checksums.get(how)
        if checksum is None:
            checksum = self._checksums[how] = zlib.crc32(repr(how).encode())
        mine, word = self._mine, _ASKED + _WORDS + _ASKED - self._words
        self._words = word
        about = nbytes << 8 | _NUMBERS[operation]
        mine[word], mine[word + 1], mine[word + 2] = place, about, checksum
        self.meet()
        for flags in self._others:
            if flags[word] != place or flags[word + 1] != about or flags[word + 2] != checksum:
                break
        else:
            return
        calls: dict[tuple[int, ...], list[int]] = {}
        for rank, flags in zip(self._ranks, self._flags, strict=True):
            calls.setdefault(tuple(flags[word : word + _WORDS]), []).append(rank)
        asked = [(ranks, _described(*words)) for words, ranks in calls.items()]
        fault = "the ranks gave different operations, tensors, dtypes, reductions or roots"
        raise disagreement(self._group, asked, fault)

    def meet(self) -> None:
        """Wait until every rank is here. Each rank then sees everything that the others wrote before."""
        self._round += 1
        self._release()
        self._acquire()
        self._mine[_ROUND] = self._round
        self._await(_ROUND, self._round)

    # Stages -----------------------------------------------------------------------------------------------------

    def post(self, stage: int, count: int) -> None:
        """Tell the other ranks that this rank has done ``count`` chunks of a pipeline's ``stage``, and publish them."""
        self._release()
        self._acquire()
        self._mine[_STAGES + stage] = count

    def wait_for(self, stage: int, count: int) -> None:
        """Wait until every other rank has posted at least ``count`` chunks of ``stage``."""
        self._await(_STAGES + stage, count)

    # Waiting ----------------------------------------------------------------------------------------------------

    def _await(self, word: int, value: int) -> None:
        """Wait until that word of every other rank's flags is at least ``value``."""
        for flags in self._others:
            if flags[word] >= value:
                continue
            for _ in range(FIRST_LOOKS):
                if flags[word] >= value:
                    break
            else:
                self._wait(self._progressing(flags, word, value))
        self._release()
        self._acquire()

    def _progressing(self, flags: memoryview, word: int, value: int) -> Callable[[], bool]:
        """Return whether the wait is over, as a function.

        It lets MPI make progress now and then, because another rank may wait for a message.
        """
        looks = 0

        def looked() -> bool:
            nonlocal looks
            looks += 1
            if looks % LOOKS_PER_PROGRESS == 0:
                self._progress()
            return bool(flags[word] >= value)

        return looked


def _described(place: int, about: int, _: int) -> str:
    nbytes, operation = divmod(about, 1 << 8)
    where = "of a private tensor"
    if place != PRIVATE:
        segment, offset = divmod(place, 1 << 48)
        where = f"at byte {offset} of shared tensor {segment}"
    return f"{_OPERATIONS[operation]} of {nbytes} bytes {where}"


def spin(done: Callable[[], bool]) -> None:
    """Wait until ``done`` returns True, for microseconds; other threads may take the core in between."""
    while not done():
        os.sched_yield()
