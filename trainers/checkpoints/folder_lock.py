"""One run at a time in a ``--save`` folder, on local disks and on NFS, also after a crash.

The file ``run.lock`` says who holds the folder. It is made by open(2) with O_EXCL and replaced by rename(2), which are
atomic on NFS, too; nothing depends on the clocks of hosts or on locks of the kernel. The holder touches the file every
few seconds. A holder is dead if its process is gone, where that can be seen (same boot of the same host, same process
numbers), or if the file was not touched for a minute of the file system's own time.

A dead holder is followed by the one rank that makes ``run.lock.after.NONCE``, with the nonce of the dead record: each
record has one successor at most. The successor then renames this file to ``run.lock``. Another rank that has seen the
dead record before, and makes its successor's file after the renaming, finds ``run.lock`` changed and tries again.

The holder keeps the folder open. Another folder under its name, or none, means that somebody has renamed the holder's.
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
from typing import Any

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
        with contextlib.suppress(PermissionError):
            os.kill(pid, 0)
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except ProcessLookupError:
        return None
    except OSError:
        return "hidden"  # another user's process, where /proc shows only one's own
    # The threads of a process that was killed may outlive its first one, and may still write.
    return None if state in "ZX" and int(rest[16]) <= 1 else rest[18]


class FolderLock(contextlib.AbstractContextManager["FolderLock"]):
    """The lock of ``folder``, for one process. `attempt` takes it; a thread then touches it until `release`.

    beat, dead: BEAT_SECONDS and DEAD_SECONDS, unless a test is in a hurry.
    """

    def __init__(self, folder: Path, *, beat: float = BEAT_SECONDS, dead: float = DEAD_SECONDS) -> None:
        self.path = folder / NAME
        self._me = _me()
        self._beat, self._dead = beat, dead
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._problem: str | None = None
        self._folder: int | None = None  # a descriptor: while it is open no other folder gets its inode

    def attempt(self) -> Record | None:
        """Take the lock: None, or the living holder's record. Raises OSError where files cannot be made.

        If the disk is full and no holder lives, what killed saves left in the folder is removed first.
        """
        made_room = taken = False
        while not taken:
            holder, dead, place = self._chain()
            if holder is not None:
                return holder
            try:
                taken = self._follow(dead, place)
            except OSError as error:
                if made_room or error.errno not in disk.NO_ROOM:
                    raise
                pointer.make_room(self.path.parent)
                made_room = True
        self._folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._touch, name="lock of the save folder", daemon=True)
        self._thread.start()
        return None

    def _chain(self) -> tuple[Record | None, list[tuple[Path, str]], Path]:
        """The living holder, if there is one, the dead ones before (file, nonce), and the place behind these."""
        place, dead = self.path, list[tuple[Path, str]]()
        while (record := read(place)) is not None and self._is_dead(record):
            dead.append((place, record.nonce))
            place = self.path.with_name(f"{NAME}.after.{record.nonce}")
        return record, dead, place

    def _follow(self, dead: list[tuple[Path, str]], place: Path) -> bool:
        """Take ``place``, behind the ``dead``, and from there the lock. False: something changed meanwhile."""
        if not self._make(place):
            return False
        if any((now := read(before)) is None or now.nonce != nonce for before, nonce in dead):
            place.unlink(missing_ok=True)  # another process came before, and has tidied up
            return False
        if dead:
            place.replace(self.path)
            for before, _ in dead[1:]:
                before.unlink(missing_ok=True)
        return True

    def _make(self, place: Path) -> bool:
        """Make the file ``place`` with this process's record, unless it is there. A reader may see it empty."""
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

    def _is_dead(self, record: Record) -> bool:
        """Whether the process of ``record`` is dead."""
        fields = record.fields
        if fields.get("namespace") is not None and fields["namespace"] == self._me["namespace"]:
            start = _start(fields["pid"])
            if start != "hidden":
                return start != fields.get("start")
        os.utime(folder := self.path.parent)  # its time now is the file system's
        return (folder.stat().st_mtime_ns - record.touched) / 1e9 >= self._dead

    def _touch(self) -> None:
        while self._problem is None and not self._ended.wait(self._beat):
            with contextlib.suppress(OSError):  # a problem of the disk or the server is told by those who write
                self._touched()

    def _touched(self) -> None:
        """Touch the file, or make it again if somebody removed it. Another holder's file is a problem."""
        if self.problem() is not None:
            return
        now = read(self.path)
        if now is None:
            self._make(self.path)
        elif now.nonce == self._me["nonce"]:
            os.utime(self.path)
        else:
            self._problem = (
                f"--save {self.path.parent}: {now}, has taken the folder over, because this run did not answer for "
                f"{self._dead:g} s; this run ends"
            )

    def problem(self) -> str | None:
        """Why this process has lost the lock or the folder; None while it holds them. It takes 6 us."""
        if self._problem is None and self._is_elsewhere():
            folder = self.path.parent
            self._problem = (
                f"--save {folder}: the folder of this run was renamed or removed while the run was at work, and "
                f"{'another one has its name' if folder.exists() else 'none has its name'}; this run ends. Give the "
                f"folder its name back, or give its new name to --save and --load: the run goes on from its newest "
                "checkpoint there"
            )
        return self._problem

    def _is_elsewhere(self) -> bool:
        """Whether the folder's name is no longer that of the folder that was locked."""
        if self._folder is None:
            return False
        try:
            return not os.path.samestat(os.fstat(self._folder), self.path.parent.stat())
        except OSError as error:  # other errors are told by those who write
            return error.errno in (errno.ENOENT, errno.ENOTDIR)

    def release(self) -> None:
        """Give the lock back, if this process holds it. Never raises: the error that ends a run is what is told.

        A file that cannot be removed is that of a dead process as soon as this one ends.
        """
        if os.getpid() != self._me["pid"]:  # a forked child, whose parent holds the lock
            return
        self._ended.set()
        if self._thread is not None:  # it might make the file again
            self._thread.join()
        elsewhere, folder, self._folder = self._is_elsewhere(), self._folder, None
        if folder is not None:
            os.close(folder)
        if elsewhere:  # the record there is that of a dead process soon
            return
        with contextlib.suppress(OSError):
            if (now := read(self.path)) is not None and now.nonce == self._me["nonce"]:
                self.path.unlink()

    def __exit__(self, *exception: object) -> None:
        self.release()


def hold(world: Communicator, folder: Path, *, wait: float = WAIT_SECONDS, option: str = "--save") -> FolderLock:
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
            said = f"{option} {folder}: held by {holder}; waiting up to {wait:g} s for its end"
            print(said, file=sys.stderr, flush=True)
        time.sleep(0.5)  # not longer: the other ranks wait in a collective
        return False

    while not on_rank_zero(world, attempt):
        pass
    return lock
