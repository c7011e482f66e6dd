"""The watcher of one rank: asks its process where it is, and tells the others by a file. It runs without torch."""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

# These files' neighbours: the package would import torch.
import report  # type: ignore[import-not-found]
from program import MOVED, SAMPLE, SEEN  # type: ignore[import-not-found]

PROGRAM = str(Path(__file__).with_name("program.py"))
#: seconds that a process has to answer a signal, and a question
ANSWER_SECONDS = 0.05, 3.0
#: of a look, each of which wakes a process that sleeps
SIGNALS = 2
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')


class Watcher:
    """Looks at one process every tick, which is a sixth of ``every`` seconds."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.of, self.folder = settings, Path(settings["folder"])
        self.process, self.every = settings["process"], settings["every"]
        self.tick = report.tick(self.every)
        self.name = self.folder / f"rank-{settings['rank']}.json"
        self.stack: list[list[Any]] = []
        self.moves, self.state, self.used = -1, "", 0.0
        self.since = time.monotonic()
        self.used_since, self.answered, self.blocked, self.told = 0.0, "", False, 0.0
        self.activity: tuple[int, float] | None = None
        self.shown: list[list[Any]] = []

    def look(self) -> None:
        """Ask the process by signals whether it moves, and where it is.

        Python runs the handler also in a call that sleeps, such as time.sleep, and then goes on to sleep: such a
        process moves only if its main thread did something between the looks, too.
        """
        self.state, self.used = _state(self.process)
        stack, (over, moves) = self.stack, self.seen()
        acted = self._acted(late=moves != self.moves)
        if over:
            stack = []
        elif self.state not in "TtD" and _handles(self.process):  # one that is stopped would answer later
            for number in (SAMPLE, MOVED):
                os.kill(self.process, number)
            time.sleep(ANSWER_SECONDS[0])
            stack, (_, moves) = self._dumped() or stack, self.seen()
        if stack != self.stack or (moves != self.moves and acted):
            self.stack, self.since, self.used_since = stack, time.monotonic(), self.used
        self.moves, self.activity = moves, _activity(self.process)

    def _acted(self, *, late: bool) -> bool:
        """Whether the main thread has done something since the last look. late: it has run a handler of that one."""
        now = _activity(self.process)
        if now is None or self.activity is None:
            return True
        (waits, used), (before, used_before) = now, self.activity
        return waits - before > (SIGNALS if late else 0) or used > used_before

    def seen(self) -> tuple[int, int]:
        """What the process has written: whether its program is over, and how often Python has run the handler."""
        over, moves = SEEN.unpack(os.pread(self.of["moves"], SEEN.size, 0))
        return over, moves

    def _dumped(self) -> list[list[Any]]:
        """The main thread's stack, from the inside out: the last thread of the newest dump."""
        text = _taken(self.of["stacks"]).decode(errors="replace")
        last = re.split(r"^(?:Current thread|Thread) .*$", text, flags=re.MULTILINE)[-1]
        found = [[file, int(line), name, ""] for file, line, name in _FRAME.findall(last)]
        while found and found[-1][0] in (PROGRAM, "<frozen runpy>"):
            found.pop()
        return found

    def values(self) -> list[list[Any]]:
        """The stack with the values of its innermost calls, if Python runs there; otherwise as last seen."""
        if self.state in "TtD" or not self.stack:
            return self.stack
        while select.select([self.of["answer"]], [], [], 0)[0]:
            os.read(self.of["answer"], 1 << 16)  # of an earlier question
        os.write(self.of["ask"], b"?")
        text, deadline = b"", time.monotonic() + ANSWER_SECONDS[1]
        while not text.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.of["answer"]], [], [], left)[0]:
                return self.stack
            text += os.read(self.of["answer"], 1 << 16)
        return json.loads(text) or self.stack

    def tell(self, ended: str = "", *, question: str = "") -> None:
        """Write what is known of this rank. question: what the report asks now, if it does."""
        if question and question != self.answered:
            self.answered, self.shown = question, self.values()
        self.told = time.monotonic()
        still = self.told - self.since
        record = {
            "rank": self.of["rank"], "host": socket.gethostname(), "process": self.process, "state": self.state,
            "still": still, "busy": (self.used - self.used_since) / still if still > 1 else 0.0, "ended": ended,
            "stack": self.shown if question else self.stack, "answers": question,
        }  # fmt: skip
        part = self.name.with_suffix(".part")
        part.write_text(json.dumps(record))
        part.replace(self.name)

    def run(self) -> None:
        """Look and tell until the process ends."""
        self.folder.mkdir(parents=True, exist_ok=True)
        reporter = report.Reporter(self.of, self.folder) if self.of["rank"] == 0 else None
        self.tell()
        try:
            pid = os.pidfd_open(self.process)
        except ProcessLookupError:  # it has ended before its watcher began
            pid = -1
        while pid >= 0 and not select.select([pid], [], [], self.tick)[0]:
            try:
                self.look()
            except (ProcessLookupError, FileNotFoundError):  # it has ended, and so has its folder of /proc
                break
            asks = self.folder / "question"
            question = asks.read_text() if asks.exists() else ""
            blocked = time.monotonic() - self.since > self.every / 3 or self.state in "TtD"
            late = time.monotonic() - self.told > self.every  # a rank that moves says so now and then
            if blocked or late or blocked != self.blocked or (question and question != self.answered):
                self.tell(question=question)
                self.blocked = blocked
            if _taken(self.of["asked"]):  # a user has sent the process the signal that asks for a report
                (self.folder / "asked").touch()
            if reporter is not None:
                reporter.look()
        self.tell("has ended" if self.seen()[0] else "is gone: killed, or left by os._exit")
        if reporter is not None:
            reporter.wait_for_others()
            shutil.rmtree(self.folder, ignore_errors=True)


def _taken(file: int) -> bytes:
    """What the process has written to a file of memory, which is empty then."""
    found = os.pread(file, 1 << 20, 0)
    os.ftruncate(file, 0)
    os.lseek(file, 0, os.SEEK_SET)
    return found


def _handles(process: int) -> bool:
    """Whether the process has handlers of the signals: without them, as after an exec, they would end it."""
    caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{process}/status").read_text(), re.MULTILINE)
    mask = int(caught[1], 16) if caught else 0
    return all(mask >> (number - 1) & 1 for number in (SAMPLE, MOVED))


def _activity(process: int) -> tuple[int, float] | None:
    """How often the main thread has begun to wait, and its seconds of a core; None where the kernel does not say."""
    of_main = Path(f"/proc/{process}/task/{process}")
    found = re.search(r"^voluntary_ctxt_switches:\s*(\d+)", (of_main / "status").read_text(), re.MULTILINE)
    return (int(found[1]), _seconds(_fields(of_main / "stat"))) if found else None


def _state(process: int) -> tuple[str, float]:
    """The kernel's letter for the process (R runs, S sleeps, D is in I/O, T is stopped), and its seconds of a core."""
    fields = _fields(Path(f"/proc/{process}/stat"))
    return fields[0], _seconds(fields)


def _fields(stat: Path) -> list[str]:
    """The fields of a file stat of /proc, from the state on."""
    return stat.read_text().rpartition(")")[2].split()


def _seconds(fields: list[str]) -> float:
    """The seconds of a core in such fields."""
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # they are for the program, with which the watcher ends
    Watcher(json.loads(sys.argv[1])).run()
