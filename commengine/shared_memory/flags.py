"""Flags in shared memory, by which the ranks of a node meet and compare their calls without a message.

Each sequence of collectives has flags of its own: one sequence is the caller's, and each stream has another. Each
collective through memory begins with a comparison: each rank tells the others what it is about to do.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable, Sequence

from commengine.agreement import disagreement, ranks_named
from commengine.errors import CollectiveMismatch, GroupMember, StoppedError

from .segment import SharedSegment

#: how often a waiting rank looks at another rank's flag between two calls of MPI
LOOKS_PER_PROGRESS = 256

#: how often a rank looks before it waits in the sequence's own way, which takes longer for each look and may sleep
FIRST_LOOKS = 30

#: the flags of a rank fill two cache lines of their own. In the first: the round, and twice three words for a call
#: (place; size and operation; checksum of the rest), and the number of a rank that has stopped (`Flags.stop`). In the
#: second: the progress in each stage of a pipeline, and the last round in which this rank found that the numbers of
#: rows do not fit
LINES_BYTES = 128
_ROUND, _ASKED, _WORDS, _STOPPED, _STAGES, _UNFIT = 0, 1, 3, 7, 8, 15

#: bytes of the words in which a rank says why it has stopped. They follow the numbers of rows
REASON_BYTES = 256

#: the word at which two sets of numbers of rows begin (`Flags.begin_uneven`)
_NUMBERS_AT = LINES_BYTES // 8

#: the stages of a chunk that goes through slots (`commengine.shared_memory.slots`)
FILLED, REDUCED = range(2)

#: the place of a tensor that lies in no window, and of one that its rank has copied into a slot. Below: minus the
#: address of one that the other ranks read in the memory of its process
PRIVATE, IN_SLOT = -1, -2

#: the operations that have a way through memory, and those of them that reduce
IN_MEMORY = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
REDUCING_IN_MEMORY = IN_MEMORY[:2]

#: the operations in which each rank gives another number of rows, and that windows carry
UNEVEN = ("all_to_all_v", "all_gather_v")

#: the operations by the number that stands in the flags. "gather_into": an all-gather whose output lies in a window
_OPERATIONS = (*IN_MEMORY, "gather_into", *UNEVEN)
_NUMBERS = {name: number for number, name in enumerate(_OPERATIONS)}


class Flags:
    """The flags of one node's ranks, for one sequence of collectives.

    segment: memory of `bytes_of` a rank, which is zero. rank: this rank's number in the node. progress: lets MPI make
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
        self._is_group = self.size == group.size  # the node has all ranks of the group
        words = len(segment.memory[rank]) - REASON_BYTES
        self._flags = [part[:words].cast("q") for part in segment.memory]
        self._reasons = [part[words:] for part in segment.memory]
        self._stops = [flags[_STOPPED : _STOPPED + 1] for flags in self._flags]
        self._stopped = self._stops[rank]
        self._mine = self._flags[rank]
        self._others = [flags for flags in self._flags if flags is not self._mine]
        self._round = 0
        self._words = _ASKED  # where the words of the present call begin
        self._most_numbers = (len(self._mine) - _NUMBERS_AT) // 2  # words in each of the two sets
        self._checksums: dict[object, int] = {}
        # Releasing a lock and taking it again is a fence, on processors that reorder writes, too: what comes before is
        # seen before what comes after. MPI_Win_sync is one, but needs a window.
        lock = threading.Lock()
        lock.acquire()
        self._release, self._acquire = lock.release, lock.acquire

    @staticmethod
    def bytes_of(ranks: int) -> int:
        """The memory of a rank in a group of ``ranks``, on all nodes together."""
        return LINES_BYTES + 2 * 8 * (ranks + 1) + REASON_BYTES

    # Stopping ---------------------------------------------------------------------------------------------------

    def stop(self, reason: str, *, between: bool = False) -> None:
        """Tell every rank of the node that this rank takes part in no more calls, and why. It waits for nobody.

        between: no call of this rank was left in the middle, so that the others may finish those that it has finished.

        A rank that waits for another one then raises StoppedError. So a rank whose call was left in the middle, where
        the ranks are no longer in step, gives nobody a wrong result.
        """
        words = reason.encode()[:REASON_BYTES].ljust(REASON_BYTES, b"\0")
        self._reasons[self.rank][:] = words
        with threading.Lock():  # a fence; the lock of the other ones may have been left in the middle, too
            pass
        for stops in self._stops:
            stops[0] = -self.rank - 1 if between else self.rank + 1

    @property
    def stopped(self) -> str | None:
        """Why a rank of the node has left a call; None if none has."""
        return self._reason if self._stopped[0] > 0 else None

    @property
    def _reason(self) -> str:
        """What the rank said that has stopped."""
        return bytes(self._reasons[abs(self._stopped[0]) - 1]).rstrip(b"\0").decode(errors="replace")

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
        about, checksum = self.words_of(operation, nbytes, how)
        mine, word = self._mine, _ASKED + _WORDS + _ASKED - self._words
        self._words = word
        mine[word], mine[word + 1], mine[word + 2] = place, about, checksum
        self.meet()
        for flags in self._others:
            if flags[word] != place or flags[word + 1] != about or flags[word + 2] != checksum:
                raise self._mismatch(word)

    def words_of(self, operation: str, nbytes: int, how: object) -> tuple[int, int]:
        """The words for the size and operation of a call, and for the rest. how: as in `begin`."""
        checksum = self._checksums.get(how)
        if checksum is None:
            checksum = self._checksums[how] = zlib.crc32(repr(how).encode())
        return nbytes << 8 | _NUMBERS[operation], checksum

    def begin_uneven(self, words: tuple[int, int], place: int, rows: Sequence[int]) -> int:
        """`begin` of a collective in which each rank gives other numbers of rows, from another place.

        words: of `words_of`, with the bytes of a row. rows: what this rank gives, as many numbers on all ranks, and at
        most one for each rank of the group. It tells the others where each of these parts begins, and where the last
        one ends. Returns the first word in `told` of these numbers; they hold until this rank ends the call by
        `meet_unless`. Raises CollectiveMismatch as `begin` does.
        """
        about, checksum = words
        mine, word = self._mine, _ASKED + _WORDS + _ASKED - self._words
        self._words = word
        at = first = _NUMBERS_AT + (self._most_numbers if word == _ASKED else 0)
        mine[at] = end = 0
        for count in rows:
            end += count
            at += 1
            mine[at] = end
        mine[word], mine[word + 1], mine[word + 2] = place, about, checksum
        self.meet()
        for flags in self._others:
            if flags[word + 1] != about or flags[word + 2] != checksum:
                raise self._mismatch(word)
        return first

    @property
    def told(self) -> Sequence[memoryview]:
        """The words of each rank of the node."""
        return self._flags

    @property
    def place(self) -> int:
        """The word of each rank that has the place of its tensor in the call that `begin_uneven` began."""
        return self._words

    def meet_unless(self, unfit: str | None) -> None:
        """Wait until every rank is here, as `meet`. Raise CollectiveMismatch on all ranks if one gives a reason.

        unfit: why the numbers of rows that the other ranks gave do not fit those of this rank; None if they do.
        """
        if unfit is not None:
            self._mine[_UNFIT] = self._round + 1
        self.meet()
        for flags in self._flags:
            if flags[_UNFIT] == self._round:
                raise self._unfit(unfit)

    def _unfit(self, mine: str | None) -> CollectiveMismatch:
        found = [rank for rank, flags in zip(self._ranks, self._flags, strict=True) if flags[_UNFIT] == self._round]
        error = self.mismatch(mine or f"{ranks_named(found)} found numbers of rows that do not fit")
        error.on_all_ranks = self._is_group
        return error

    def mismatch(self, said: str) -> CollectiveMismatch:
        """The error of this rank that says ``said``."""
        member = self._group
        return CollectiveMismatch(f"rank {member.rank} of group {member.name!r} (size {member.size}): {said}")

    def _mismatch(self, word: int) -> CollectiveMismatch:
        """The error of ranks whose calls differ. word: where their words begin."""
        calls: dict[tuple[int, ...], list[int]] = {}
        for rank, flags in zip(self._ranks, self._flags, strict=True):
            calls.setdefault(tuple(flags[word : word + _WORDS]), []).append(rank)
        asked = [(ranks, _described(*words)) for words, ranks in calls.items()]
        fault = "the ranks gave different operations, tensors, dtypes, reductions or roots"
        error = disagreement(self._group, asked, fault)
        # The ranks of other nodes know nothing of it, and wait in the call.
        error.in_step = error.on_all_ranks = self._is_group
        return error

    def meet(self) -> None:
        """Wait until every rank is here. Each rank then sees everything that the others wrote before.

        Raises StoppedError also if a rank came here and has stopped since: what it then writes to its memory, this rank
        may have read before it came.
        """
        self._round += 1
        self._release()
        self._acquire()
        self._mine[_ROUND] = self._round
        self._await(_ROUND, self._round)
        if self._stopped[0] > 0:
            raise StoppedError(self._reason)

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
        """Return whether the wait is over, as a function. It raises StoppedError if a rank of the node has stopped.

        It lets MPI make progress now and then, because another rank may wait for a message.
        """
        looks, stopped = 0, self._stopped

        def looked() -> bool:
            nonlocal looks
            looks += 1
            if looks % LOOKS_PER_PROGRESS == 0:
                self._progress()
            if flags[word] >= value:
                return True
            if stopped[0]:
                with threading.Lock():  # a fence
                    pass
                if flags[word] < value:  # the rank that stopped has not come here before
                    raise StoppedError(self._reason)
            return False

        return looked


def _described(place: int, about: int, _: int) -> str:
    nbytes, operation = divmod(about, 1 << 8)
    where = "of a private tensor"
    if place >= 0:
        segment, offset = divmod(place, 1 << 48)
        where = f"at byte {offset} of shared tensor {segment}"
    return f"{_OPERATIONS[operation]} of {nbytes} bytes {where}"


def spin(done: Callable[[], bool]) -> None:
    """Wait until ``done`` returns True, for microseconds; other threads may take the core in between."""
    while not done():
        os.sched_yield()
