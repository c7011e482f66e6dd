"""What rank 0's watcher prints: who waits where, ranks with equal stacks together, the odd rank first."""

from __future__ import annotations

import json
import linecache
import os
import re
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

#: methods of mpi4py and of the engine that wait for other ranks; those that do not wait begin with I
_SMALL = """
    send ssend bsend rsend recv mrecv probe mprobe sendrecv wait waitall waitany waitsome test testall barrier bcast
    gather scatter allgather alltoall reduce allreduce scan exscan neighbor_allgather neighbor_alltoall
    all_reduce all_gather all_to_all all_to_all_v all_gather_v reduce_scatter broadcast exchange_rows exchange_counts
    compare
"""
#: those of mpi4py that only begin with a capital: in small letters they are methods of files, sockets and strings
_CAPITAL = """
    sendrecv_replace gatherv scatterv allgatherv alltoallv alltoallw neighbor_allgatherv neighbor_alltoallv
    neighbor_alltoallw reduce_scatter_block split split_type dup create_cart create_intercomm create
    create_group merge spawn connect accept disconnect free finalize init init_thread fence lock lock_all unlock
    unlock_all flush flush_all post start complete open read_all write_all read_at_all write_at_all
"""
_MPI = frozenset([*_SMALL.split(), *(name.capitalize() for name in (_SMALL + _CAPITAL).split())])
_CALL = re.compile(r"\.(\w+)\(")
_PLURAL = {"is": "are", "has": "have", "moves": "move", "waits": "wait", "computes": "compute"}
#: the files of the engine
_ENGINE = str(Path(__file__).resolve().parent.parent) + os.sep
#: an older file is that of a job that was killed: the ranks of one job start within so many seconds
STARTED = 60.0
#: frames of a stack that are shown
FRAMES = 6


def tick(every: float) -> float:
    """The seconds between two looks of a watcher."""
    return min(max(every / 6, 0.1), 10.0)


def mpi_call(stack: Sequence[Sequence[Any]]) -> str:
    """The MPI call that the innermost frames are in, by their source; empty if there is none.

    Those of the engine do not count: a collective of its has up to six.
    """
    inside = next((n for n, frame in enumerate(stack) if not str(frame[0]).startswith(_ENGINE)), len(stack))
    for file, line, _, called in stack[: inside + 4]:
        for name in _CALL.findall(called or linecache.getline(file, line)):
            if name in _MPI:
                return str(name)
    return ""


def ranks_in_words(ranks: Iterable[int]) -> str:
    """``0-2, 5``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(f"{low}" if low == high else f"{low}-{high}" for low, high in runs)


def condition(record: dict[str, Any], every: float) -> str:
    """What a rank does, in words."""
    if record["ended"]:
        return str(record["ended"])
    if record["state"] in "Tt":
        return "is stopped (SIGSTOP, or a debugger)"
    if record["state"] == "D":
        return "is in I/O that cannot be interrupted"
    if record["still"] < every / 2:
        return "moves"
    if not record["stack"]:
        return "is at its end: the Python program is over, and the process waits, as MPI_Finalize does"
    call = mpi_call(record["stack"])
    if call:
        return f"waits in {call}"
    computes = record["state"] == "R" or record["busy"] > 0.2  # a core may be shared
    return "computes in one call" if computes else "waits, outside of MPI"


def grouped(records: Sequence[dict[str, Any]], every: float) -> list[list[dict[str, Any]]]:
    """Ranks that do the same in one place, the odd ones first: small groups, and of equal ones those outside of MPI."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        does = condition(record, every)
        place = "" if record["ended"] else record["stack"]
        groups.setdefault(json.dumps([does, place]), []).append(record)

    def order(group: list[dict[str, Any]]) -> tuple[Any, ...]:
        does = condition(group[0], every)
        return not group[0]["ended"], bool(mpi_call(group[0]["stack"])), len(group), does, group[0]["rank"]

    smallest = min(map(len, groups.values()))
    return sorted(groups.values(), key=lambda group: (len(group) > smallest, *order(group)))


def text(records: Sequence[dict[str, Any]], size: int, every: float, why: str) -> str:
    """The report."""
    hosts = {record["host"] for record in records}
    on = f" on {len(hosts)} hosts" if len(hosts) > 1 else ""
    lines = [f"rollcall: {why}: {size} ranks{on}"]
    for group in grouped(records, every):
        first, numbers = group[0], [record["rank"] for record in group]
        low, high = (one(record["still"] for record in group) for one in (min, max))
        name = f"rank {numbers[0]} ({first['host']}, process {first['process']})" if len(group) == 1 else (
            f"ranks {ranks_in_words(numbers)} ({len(group)})")  # fmt: skip
        long = "" if first["ended"] else f", for {low:.0f} s" if high - low < 2 else f", for {low:.0f} to {high:.0f} s"
        does = condition(first, every)
        if does == "moves":
            long = ""
        if len(group) > 1:
            verb, _, rest = does.partition(" ")
            does = f"{_PLURAL[verb]} {rest}".strip()
        lines.append(f"  {name} {does}{long}")
        shown = first["stack"][:FRAMES] if not first["ended"] else []
        for file, line, function, called in shown:
            source = called or linecache.getline(file, line).strip()
            lines.append(f"      {_short(file)}:{line} in {function}: {source}")
        if (more := len(first["stack"]) - len(shown)) > 0 and shown:
            lines.append(f"      and {more} outer frames")
    unseen = set(range(size)) - {record["rank"] for record in records}
    if unseen:
        s = "s" * (len(unseen) > 1)
        lines.append(f"  rank{s} {ranks_in_words(unseen)} not seen: no Python under rollcall, or another folder there")
    return "\n".join(lines)


def _short(file: str) -> str:
    here = os.path.relpath(file) if file.startswith("/") else file
    return here if len(here) < len(file) else file


class Reporter:
    """Reads what the watchers tell, asks them for values, and prints."""

    def __init__(self, settings: dict[str, Any], folder: Path) -> None:
        self.size, self.every, self.folder = settings["size"], settings["every"], folder
        self.began = time.time()
        limit = settings["limit"]
        if limit is None and os.environ.get("SLURM_JOB_END_TIME", "").isdecimal():
            limit = int(os.environ["SLURM_JOB_END_TIME"]) - self.began
        self.before_limit = self.began + limit - min(self.every, limit / 10) if limit else float("inf")
        self.records: dict[str, tuple[int, dict[str, Any]]] = {}
        self.asked_at, self.why, self.again, self.pause = 0.0, "", 0.0, self.every
        self.question = ""

    def read(self) -> list[dict[str, Any]]:
        """The records of this job's ranks."""
        for entry in os.scandir(self.folder):
            if entry.name.startswith("rank-") and entry.name.endswith(".json"):
                try:
                    changed = entry.stat().st_mtime_ns
                    if changed < (self.began - STARTED) * 1e9:
                        continue
                    if self.records.get(entry.name, (0,))[0] != changed:
                        self.records[entry.name] = changed, json.loads(Path(entry.path).read_text())
                except (OSError, ValueError):  # it is replaced just now
                    continue
        return [record for _, record in self.records.values() if record["rank"] < self.size]

    def look(self) -> None:
        """Decide whether to report; ask for values, and print when they have come."""
        records, now = self.read(), time.time()
        if self.asked_at:
            late = now > self.asked_at + 2.5 * tick(self.every) + 4
            if late or all(one["answers"] == self.question or one["ended"] for one in records):
                print(text(records, self.size, self.every, self.why), file=sys.stderr, flush=True)
                (self.folder / "question").unlink(missing_ok=True)
                self.asked_at = 0.0
            return
        if (self.folder / "asked").exists():
            (self.folder / "asked").unlink(missing_ok=True)
            self.ask("as asked", now)
        elif now > self.before_limit:
            self.before_limit = float("inf")
            self.ask("the job's time limit is near", now)
        elif now >= self.again and self.hangs(records):
            self.again, self.pause = now + self.pause, 2 * self.pause
            self.ask(f"half of the ranks, or more, have not moved for {self.every:g} s", now)

    def hangs(self, records: Sequence[dict[str, Any]]) -> bool:
        """Whether half of the ranks that run have been in one place for ``every`` seconds."""
        running = [one for one in records if not one["ended"]]
        still = [one for one in running if one["still"] >= self.every]
        return bool(running) and 2 * len(still) >= len(running)

    def ask(self, why: str, now: float) -> None:
        """Ask all watchers for the values of calls."""
        self.asked_at, self.why, self.question = now, why, str(now)
        (self.folder / "question").write_text(self.question)

    def wait_for_others(self) -> None:
        """After the end of rank 0's program: report until the others have ended, too, or are silent."""
        silent, pause = time.time(), 0.1
        while time.time() < silent + 2 * self.every + 2:
            pause = min(2 * pause, tick(self.every))  # short at first, because the launcher waits for this watcher
            time.sleep(pause)
            before = {name: changed for name, (changed, _) in self.records.items()}
            self.look()
            if all(record["ended"] for record in self.read()):
                return
            if before != {name: changed for name, (changed, _) in self.records.items()}:
                silent = time.time()
