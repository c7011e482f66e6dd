"""One run at a time in a ``--save`` folder, on local disks and on NFS, also after a crash.

The file ``run.lock`` says who holds the folder. It is made by link(2) and replaced by rename(2), which are atomic on
NFS, too; nothing depends on the clocks of hosts or on locks of the kernel. The holder touches the file every few
seconds. A holder is dead if its process is gone, where that can be seen (same boot of the same host, same process
numbers), or if the file was not touched for a minute of the file system's own time.

A dead holder is followed by the one rank that links ``run.lock.after.NONCE``, with the nonce of the dead record: each
record has one successor at most. The successor then renames its own file onto ``run.lock``. Another rank that has seen
the dead record before, and links its successor's name after it was removed, finds ``run.lock`` changed and tries again.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Self

from commengine import Communicator, UsageError
from commengine.rank_zero import on_rank_zero

from . import disk, pointer

NAME = "run.lock"

#: a random name as `_me` makes it, short enough to be part of a file name
_NONCE = re.compile("[0-9a-f]{32}")

#: seconds between two touches, and those after which a holder that does not touch its file is dead
BEAT_SECONDS, DEAD_SECONDS = 5.0, 60.0

#: seconds that a start waits for the folder. It is longer than DEAD_SECONDS: a start never gives up because of a crash
WAIT_SECONDS = 75.0


@dataclass(frozen=True)
class Record:
    """The content of a lock file, and when it was last touched, in nanoseconds of the file system's time."""

    fields: Mapping[str, Any]
    touched: int

    @property
    def nonce(self) -> str:
        """The record's own random name. A damaged record has none, so its text stands for it."""
        return str(self.fields["nonce"])

    def __str__(self) -> str:
        fields = self.fields
        if "pid" not in fields:
            return "a run whose lock file is damaged"
        job = f", job {fields['job']}" if fields.get("job") else ""
        return f"the run of process {fields['pid']} on {fields.get('host')}{job}, started {fields.get('began')}"


def read(path: Path) -> Record | None:
    """The record in ``path``, or None if there is no such file."""
    try:
        with path.open("rb") as file:  # opening asks an NFS server again, looking at the name alone does not
            touched, text = os.fstat(file.fileno()).st_mtime_ns, file.read(1 << 16)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESTALE):  # stale: it was replaced meanwhile on an NFS server
            return None
        raise
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        fields = None
    return Record(fields if _is_whole(fields) else {"nonce": f"damaged{touched}"}, touched)


def _is_whole(fields: Any) -> bool:
    """Whether a record has a nonce that can be part of a file name, and a number that a process can have."""
    if not isinstance(fields, dict):
        return False
    nonce, pid = fields.get("nonce"), fields.get("pid")
    return isinstance(nonce, str) and _NONCE.fullmatch(nonce) is not None and type(pid) is int and 0 < pid < 2**31


def _me() -> dict[str, Any]:
    """This process as a record describes it."""
    job = os.environ.get("SLURM_JOB_ID")
    restarts = os.environ.get("SLURM_RESTART_COUNT")
    return {
        "nonce": secrets.token_hex(16), "host": socket.gethostname(), "pid": os.getpid(), "start": _start(os.getpid()),
        "namespace": _namespace(), "job": f"{job} restart {restarts}" if job and restarts else job,
        "began": datetime.now().astimezone().isoformat(" ", "seconds"),
    }  # fmt: skip


def _namespace() -> str | None:
    """What process numbers belong to: one boot of one kernel, and a namespace in it. None where nobody tells."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return None


def _start(pid: int) -> str | None:
    """When a living process started, in its kernel's ticks, or "hidden"; None if it is gone or has ended."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        # The threads of a process that was killed may outlive its first one, and may still write.
        return None if state in "ZX" and int(rest[16]) <= 1 else rest[18]
    except (FileNotFoundError, ProcessLookupError):
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return "hidden"  # another user's process, where /proc shows only one's own


class FolderLock:
    """The lock of ``folder``, for one process. `attempt` takes it; a thread then touches it until `release`.

    beat, dead: BEAT_SECONDS and DEAD_SECONDS, unless a test is in a hurry.
    """

    def __init__(self, folder: Path, *, beat: float = BEAT_SECONDS, dead: float = DEAD_SECONDS) -> None:
        self.path = folder / NAME
        self._me = _me()
        self._own = folder / f"{NAME}.{self._me['nonce']}"
        self._beat, self._dead = beat, dead
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._problem: str | None = None
        self._held = False

    def attempt(self) -> Record | None:
        """Take the lock: None, or the living holder's record. Raises OSError where files cannot be made.

        If the disk is full and no holder lives, what killed saves left in the folder is removed first.
        """
        try:
            holder = self._take()
        except OSError as error:
            if error.errno not in disk.NO_ROOM:
                raise
            holder = self._living_holder()
            if holder is None:
                pointer.make_room(self.path.parent)
                holder = self._take()
        if holder is None:
            self._remove_leftovers()
            self._thread = threading.Thread(target=self._touch, name="lock of the save folder", daemon=True)
            self._thread.start()
        return holder

    def _take(self) -> Record | None:
        # It must not make room on a full disk: `_touched` calls it while this run may be writing a checkpoint.
        try:
            with self._own.open("w") as file:
                file.write(json.dumps(self._me) + "\n")
                file.flush()
                os.fsync(file.fileno())
            while not self._held:
                if (holder := self._follow()) is not None:
                    return holder
        finally:
            self._own.unlink(missing_ok=True)
        return None

    def _follow(self) -> Record | None:
        """Go from the holder to its successors; take the place behind the last one if that is dead.

        The living holder, or None: then the place is taken, or something changed and it must be tried again.
        """
        place, seen = self.path, []
        while not self._link(place):
            record = read(place)
            if record is None:
                return None
            if not self._is_dead(record, self._own):
                return record
            seen.append((place, record.nonce))
            place = self.path.with_name(f"{NAME}.after.{record.nonce}")
        if any((now := read(before)) is None or now.nonce != nonce for before, nonce in seen):
            place.unlink(missing_ok=True)  # another process came before, and has tidied up
            return None
        if seen:
            self._own.replace(self.path)
            for name in (*(before for before, _ in seen[1:]), place):
                name.unlink(missing_ok=True)
        self._held = True
        return None

    def _living_holder(self) -> Record | None:
        """The living holder, found without a new file, which a full disk may refuse."""
        os.utime(self.path.parent)
        place = self.path
        while (record := read(place)) is not None:
            if not self._is_dead(record, self.path.parent):
                return record
            place = self.path.with_name(f"{NAME}.after.{record.nonce}")
        return None

    def _link(self, place: Path) -> bool:
        try:
            place.hardlink_to(self._own)
        except FileExistsError:
            # The answer of an NFS server may be lost and the request repeated. The number of links tells the truth.
            return self._own.stat().st_nlink == 2
        except OSError:  # a file system without links; a reader may then see a file that is still empty
            try:
                file = place.open("x")
            except FileExistsError:
                return False
            try:
                with file:
                    file.write(json.dumps(self._me) + "\n")
            except OSError:
                place.unlink(missing_ok=True)  # a damaged record would lock the folder for a minute
                raise
        return True

    def _is_dead(self, record: Record, touched: Path) -> bool:
        """Whether the process of ``record`` is dead. ``touched`` was touched just now, and so tells the time."""
        fields = record.fields
        if fields.get("namespace") is not None and fields["namespace"] == self._me["namespace"]:
            start = _start(fields["pid"])
            if start != "hidden":
                return start != fields.get("start")
        return (touched.stat().st_mtime_ns - record.touched) / 1e9 >= self._dead

    def _remove_leftovers(self) -> None:
        """Remove files of processes that died while they tried to take the lock."""
        now = self.path.stat().st_mtime_ns
        for path in self.path.parent.glob(f"{NAME}.*"):
            with contextlib.suppress(OSError):
                if (now - path.stat().st_mtime_ns) / 1e9 > self._dead:
                    path.unlink()

    def _touch(self) -> None:
        while not self._ended.wait(self._beat):
            with contextlib.suppress(OSError):  # a problem of the disk or the server is told by those who write
                holder = self._touched()
                if holder is not None:
                    self._problem = (
                        f"--save {self.path.parent}: {holder}, has taken the folder over, because this run did not "
                        f"answer for {self._dead:g} s; this run ends"
                    )
                    return

    def _touched(self) -> Record | None:
        """Touch the file, or make it again if somebody removed it. The record of another holder, if there is one."""
        with contextlib.suppress(FileNotFoundError), self.path.open("rb") as file:
            now = read(self.path)
            if now is not None and now.nonce != self._me["nonce"]:
                return now
            os.utime(file.fileno())
            return None
        self._held = False
        return self._take()

    def problem(self) -> str | None:
        """Why this process has lost the lock; None while it holds it."""
        return self._problem

    def release(self) -> None:
        """Give the lock back, if this process holds it. Never raises: the error that ends a run is what is told.

        A file that cannot be removed is that of a dead process as soon as this one ends.
        """
        self._ended.set()
        if self._thread is not None:  # it might make the file again
            self._thread.join()
        with contextlib.suppress(OSError):
            if self._held and (now := read(self.path)) is not None and now.nonce == self._me["nonce"]:
                self.path.unlink()
        self._held = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


def hold(
    world: Communicator, folder: Path, *, wait: float = WAIT_SECONDS, option: str = "--save"
) -> FolderLock:  # fmt: skip
    """The lock of the existing ``folder``, which rank 0 holds; on the other ranks an object without effect. Collective.

    option: the one that names the folder, for messages.

    While another run holds the folder, it waits up to ``wait`` seconds and says so. Raises UsageError, on all ranks,
    if that run then still lives, or the folder cannot be written to.
    """
    lock = FolderLock(folder)
    deadline = time.monotonic() + wait
    told = False

    def attempt() -> bool:
        nonlocal told
        try:
            holder = lock.attempt()
        except OSError as error:
            raise UsageError(f"{option} {folder}: cannot be locked: {error}") from error
        if holder is None:
            return True
        if time.monotonic() > deadline:
            raise UsageError(f"{option} {folder}: {holder}, is at work there; end it, or give another {option}")
        if not told:
            told = True
            print(
                f"{option} {folder}: held by {holder}; waiting up to {wait:g} s for its end", file=sys.stderr,
                flush=True,
            )  # fmt: skip
        time.sleep(0.5)  # not longer: the other ranks wait in a collective
        return False

    while not on_rank_zero(world, attempt):
        pass
    return lock
