"""Draw calls that an exception leaves at a drawn moment, and ask what they leave behind on every rank.

    python -m tests.commengine.calls.drawn --number 10000 --keep runs/drawn_calls.jsonl

A draw has a way of the call (private tensors, windows, two levels, MPI, numbers of rows, messages, blocks, streams), an
exception, the ranks that get it, the moment (a line of the engine's code, or a signal after some microseconds), and a
timeout of 1 s or none. Six calls follow each other, with other values in each. An exception is caught, and the call is
made again unless its result is there. The file of --keep has a line for each draw; the same command goes on where it
stopped. The exit status is 1 if a result was wrong, an error was another one, or a rank waited too long.

A rank may wait without an end where MPI carries the call and there is no timeout: such a draw is "waits in MPI", and
with a timeout it ends the job. All other ranks are told within SECONDS.
"""

import argparse
import collections
import json
import linecache
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from tests.support import mpirun

#: seconds until a rank must have been told, and those that a job may take for one draw
SECONDS = 10.0

#: draws of a job: a communicator that stops keeps communicators of MPI
EACH = 200

ENGINE = str(Path(__file__).resolve().parents[3] / "commengine") + os.sep

#: the ways through shared memory, and those that MPI carries
MEMORY = ("all_reduce", "broadcast", "reduce_scatter", "all_gather", "all_to_all_v", "window all_reduce",
          "window broadcast", "window reduce_scatter", "window all_gather", "window all_to_all_v",
          "window all_gather_v", "stream all_reduce", "stream window all_reduce", "worker all_reduce",
          "checked all_reduce")  # fmt: skip
MPI_S = ("mpi all_reduce", "mpi all_gather", "mpi all_to_all", "mpi bf16 all_reduce", "mpi gather", "mpi reduce",
         "sendrecv", "block sendrecv", "message sendrecv", "stream mpi all_reduce", "mpi all_to_all_v",
         "exchange", "message exchange", "stream exchange")  # fmt: skip
ERRORS = ("KeyboardInterrupt", "RuntimeError", "MemoryError", "OSError", "Exception of MPI", "Left")
CALLS, ELEMENTS = 6, (64, 5000, 300_000)


class Left(BaseException):
    """What no library expects."""


def draw(seed: int, number: int, size: int, gentle: bool = False) -> dict:
    """The draw of a number: the same each time, on every rank. gentle: seldom one that ends its job."""
    drawn = random.Random(f"{seed} {number} {size}")
    by_mpi = drawn.random() < (0.1 if gentle else 0.3)
    way = drawn.choice(MPI_S if by_mpi else MEMORY)
    # Where MPI carries the call, a rank that is left alone in it ends the job: seldom, because a job takes seconds.
    together = drawn.random() < (1 if by_mpi and gentle else 0.97 if by_mpi or size > 2 else 0.3)
    limited = drawn.random() < (0.05 if by_mpi else 0.3)
    limited = limited and not (gentle and (by_mpi or "stream" in way or "worker" in way))  # its end is the job's
    return {
        "number": number, "size": size, "way": way, "by_mpi": by_mpi or size > 2,
        "at": max(int(gentle), int(CALLS * drawn.betavariate(2, 2))),
        "who": list(range(size)) if together else [drawn.randrange(size)], "part": drawn.random(),
        "error": drawn.choice(ERRORS),
        "signal": not together and not by_mpi and not way.startswith("worker") and drawn.random() < 0.3,
        "timeout": 1.0 if limited else None,
        "n": drawn.choice(ELEMENTS), "late": drawn.random() * 0.02 if drawn.random() < 0.3 else 0.0,
    }  # fmt: skip


#: the functions in which a call begins and ends, and that for the end of a block
RUNS, BLOCKS = {"dispatch.py run", "known_calls.py perform"}, {"dispatch.py _run_block"}


class Moment:
    """Counts the lines of the engine that this rank's call runs, and raises at a drawn one.

    over: whether a call has returned from where it runs: an exception that comes now comes after it.
    """

    def __init__(self) -> None:
        self.lines, self.at, self.error, self.over, self.ends = 0, 0, None, False, RUNS
        self.raising = self.in_worker = False
        self.where = ""  # the line of the last one

    def __call__(self, frame, event, argument):
        code = frame.f_code
        if not code.co_filename.startswith(ENGINE):
            return None
        if self.in_worker and code.co_filename.endswith("stream.py"):  # nothing of it raises, and no signal comes there
            return None
        if self.in_worker == (threading.current_thread() is threading.main_thread()):
            return None
        if event == "return" and f"{Path(code.co_filename).name} {code.co_name}" in self.ends:
            self.over = self.over or argument is not None or (self.ends is BLOCKS and not self.raising)
        self.raising = event == "exception" or (event == "return" and self.raising)
        if event == "line":
            self.lines += 1
            if self.error is not None and self.lines >= self.at and not self.ending(code, frame.f_lineno):
                error, self.error = self.error, None
                self.where = f"{Path(code.co_filename).name}:{frame.f_lineno}"
                raise error
        return self

    def ending(self, code, line: int) -> bool:
        """Whether a call is over with this line. No signal can come there: Python looks for one at calls and loops."""
        here = f"{Path(code.co_filename).name} {code.co_name}" in self.ends
        return here and linecache.getline(code.co_filename, line).strip() in ("return True", "return work")

    def arm(self, at: int, error: BaseException | None) -> None:
        self.lines, self.at, self.error, self.over = 0, at, error, False


def error_of(name: str) -> BaseException:
    if name == "Exception of MPI":
        from mpi4py import MPI

        return MPI.Exception(MPI.ERR_OTHER)
    return {"Left": Left, "OSError": OSError}.get(name, getattr(__import__("builtins"), name, Left))("drawn")


class Calls:
    """One rank's calls of a draw: each makes a result that can be checked."""

    def __init__(self, comm, given: dict) -> None:
        import torch

        self.comm, self.size, self.rank = comm, comm.size, comm.rank
        words = given["way"].split()
        self.name, self.how, n = words[-1], words[:-1], given["n"]
        make = comm.empty if "window" in words else torch.empty
        dtype = torch.bfloat16 if "bf16" in words else torch.float32
        n -= n % (4 * self.size)
        self.one, self.whole = make((n,), dtype=dtype), make((n * self.size,), dtype=dtype)
        self.other = torch.empty(n * self.size, dtype=dtype)
        self.stream = None
        if {"stream", "worker"} & set(words):
            self.stream = comm.new_stream()
        elif "message" in words:
            self.stream = comm.new_stream(threaded=False)
        if self.name == "exchange":
            to, source = (self.rank + 1) % self.size, (self.rank - 1) % self.size
            self.made = comm.exchange([(self.one, to)], [(self.other[:n], source)], stream=self.stream)

    def value(self, call: int, rank: int) -> int:
        return rank + 1 + 10 * call

    def prepare(self, call: int) -> None:
        mine = self.value(call, self.rank)
        self.one.fill_(mine), self.whole.fill_(mine), self.other.fill_(-1)

    def run(self, call: int) -> None:
        comm, size, root, stream = self.comm, self.size, call % self.size, self.stream
        rows = [self.one.numel() // size] * size
        along = {} if stream is None else {"stream": stream}
        if self.name == "sendrecv":
            to, source = (self.rank + 1) % size, (self.rank - 1) % size
            if "block" in self.how:
                with comm.coalesce():
                    comm.send(self.one, to), comm.recv(self.other[: self.one.numel()], source)
                return
            work = comm.sendrecv(self.one, to, self.other[: self.one.numel()], source, **along)
        elif self.name == "exchange":
            work = self.made.start()
        elif self.name in ("all_reduce", "broadcast"):
            work = getattr(comm, self.name)(self.one, *([root] if self.name == "broadcast" else []), **along)
        elif self.name == "reduce":
            work = comm.reduce(self.one, root)
        elif self.name == "reduce_scatter":
            work = comm.reduce_scatter(self.other[: self.one.numel()], self.whole)
        elif self.name in ("all_gather", "gather"):
            output = self.whole if "window" in self.how and self.name == "all_gather" else self.other
            more = [root] if self.name == "gather" else []
            work = getattr(comm, self.name)(output if not more or root == self.rank else None, self.one, *more)
        elif self.name == "all_to_all":
            work = comm.all_to_all(self.other, self.whole)
        elif self.name == "all_to_all_v":
            work = comm.all_to_all_v(self.other[: self.one.numel()], self.one, rows, rows)
        else:
            work = comm.all_gather_v(self.other, self.one, [self.one.numel()] * size)
        work.wait()

    def right(self, call: int) -> bool:
        """Whether the result of a call is there, and right."""
        import torch

        size, n, values = self.size, self.one.numel(), [self.value(call, rank) for rank in range(self.size)]
        if self.name == "all_reduce" or (self.name == "reduce" and call % size == self.rank):
            want, got = torch.full((n,), sum(values)), self.one
        elif self.name == "reduce":
            return True
        elif self.name == "broadcast":
            want, got = torch.full((n,), values[call % size]), self.one
        elif self.name in ("sendrecv", "exchange"):
            want, got = torch.full((n,), values[self.rank - 1]), self.other[:n]
        elif self.name == "reduce_scatter":
            want, got = torch.full((n,), sum(values)), self.other[:n]
        elif self.name == "all_to_all_v":
            want, got = torch.tensor(values).repeat_interleave(n // size), self.other[:n]
        elif self.name == "gather" and call % size != self.rank:
            return True
        else:
            window = self.name == "all_gather" and "window" in self.how
            want, got = torch.tensor(values).repeat_interleave(n), self.whole if window else self.other
        return bool((got == want).all())


def perform(comm, given: dict, moment: Moment, notes: list[str]) -> None:
    """Make the calls of a draw on this rank. Each leaves a word in ``notes``."""
    from commengine import CollectiveError, CollectiveMismatch

    calls, mine = Calls(comm, given), comm.rank in given["who"]
    moment.ends, moment.in_worker = BLOCKS if "block" in calls.how else RUNS, "worker" in calls.how
    for call in range(CALLS):
        calls.prepare(call)
        if given["at"] == call and not mine:
            time.sleep(given["late"])
        armed = mine and call == given["at"]
        if call == 0 or armed:
            length = moment.lines
            moment.arm(1 + int(given["part"] * 1.1 * max(length, 20)), error_of(given["error"]) if armed else None)
            if armed and given["signal"]:
                moment.error = None
            sys.settrace(moment)
        attempts = 2
        while attempts:
            attempts -= 1
            begun = time.monotonic()
            try:
                if armed and given["signal"] and attempts:
                    signal.setitimer(signal.ITIMER_REAL, 1e-6 + given["part"] * (given["late"] or 0.001))
                if armed and moment.over and calls.stream is not None:
                    calls.stream.synchronize()  # it is in the stream
                elif not (armed and moment.over):
                    calls.run(call)
                word = "right" if calls.right(call) else "WRONG"
                attempts = 0
            except CollectiveMismatch as error:
                word = f"OTHER {error}"
            except CollectiveError as error:
                word = "not begun" if error.in_step and comm._calls.stopped is None else "refused"
                if moment.over and calls.stream is not None:  # the stream has failed, and has told it
                    attempts = 0
            except (Left, KeyboardInterrupt, RuntimeError, MemoryError, OSError) as error:
                word = f"{type(error).__name__} at {moment.where}"
            finally:
                sys.settrace(None)
                signal.setitimer(signal.ITIMER_REAL, 0)
            took = time.monotonic() - begun
            notes.append(word if took < SECONDS else f"LATE {word} after {took:.1f} s")
        if call == 0 and not armed:
            moment.lines = max(moment.lines, 1)


def job(seed: int, first: int, last: int, keep: Path, gentle: bool) -> None:
    """All draws of some numbers on this rank of a job; each rank writes a line for each."""
    from mpi4py import MPI

    from commengine import Communicator
    from tests.support.exact import ALWAYS, NEVER

    world = MPI.COMM_WORLD
    moment, out = Moment(), Path(f"{keep}.{world.rank}").open("a")  # noqa: SIM115 - until the end of the job

    def late(_, frame) -> None:
        codes = []
        while frame is not None:
            codes.append(frame.f_code)
            frame = frame.f_back
        if Moment.__call__.__code__ in codes:  # which would not see the end of the call
            signal.setitimer(signal.ITIMER_REAL, 2e-5)
        elif Calls.run.__code__ in codes:
            raise KeyboardInterrupt("of a signal")

    signal.signal(signal.SIGALRM, late)
    threading.settrace(moment)  # the workers of streams, where the draw is about them
    for number in range(first, last):
        given, notes = draw(seed, number, world.size, gentle), []
        moment.arm(0, None)
        print(json.dumps({"number": number, "rank": world.rank, "begins": True}), flush=True, file=out)
        words = given["way"].split()
        points = NEVER if "mpi" in words else ALWAYS
        with Communicator(world, device="cpu", timeout=given["timeout"], switch_points=points,
                          checked="checked" in words) as comm:  # fmt: skip
            perform(comm, given, moment, notes)
            moment.arm(0, None)
        # Where MPI carries the call, nobody is told, and there is no need to wait for it long.
        patience = SECONDS + 2 if given["timeout"] or not given["by_mpi"] else 2.5
        end, deadline = world.Ibarrier(), time.monotonic() + patience
        while not end.Test():
            time.sleep(1e-4)
            if time.monotonic() > deadline:
                notes.append("the other ranks do not come")
                break
        print(json.dumps({"number": number, "rank": world.rank, "notes": notes}), flush=True, file=out)
        if notes[-1:] == ["the other ranks do not come"]:
            world.Abort(3)


def judged(given: dict, status: int, lines: dict[int, list[str] | None]) -> str:
    """What a draw came to: "right", "told", "waits in MPI", "timeout", or a sentence that begins with FAIL."""
    every = [note for notes in lines.values() for note in notes or []]
    bad = [note for note in every if note.split()[0] in ("WRONG", "OTHER", "LATE")]
    if bad:
        return f"FAIL {bad[0]}"
    waits = status != 0 and (None in lines.values() or "the other ranks do not come" in every)
    if waits and given["timeout"] and status in (124, 3):
        return "timeout" if status == 124 else "FAIL no timeout came"
    if waits:
        # The first call through memory makes it, by messages.
        may_wait = given["by_mpi"] or given["at"] == 0 or given["way"].startswith("checked")
        return "waits in MPI" if may_wait and status == 3 else f"FAIL the job ended with {status}"
    return "told" if "refused" in every else "right"


def run(seed: int, numbers: range, size: int, keep: Path, *, gentle: bool = False) -> collections.Counter:
    """Run the draws of ``numbers`` that are not in ``keep`` yet, in jobs of EACH. Returns what all came to."""
    done = {}
    if keep.exists():
        for line in keep.read_text().splitlines():
            one = json.loads(line)
            done[one["number"]] = one
    keep.parent.mkdir(parents=True, exist_ok=True)
    todo = [number for number in numbers if number not in done]
    while todo:
        first = todo[0]
        last = next((number for number in range(first, first + EACH) if number not in todo), first + EACH)
        parts = [Path(f"{keep}.{rank}") for rank in range(size)]
        for part in parts:
            part.unlink(missing_ok=True)
        env = {"MPIR_CVAR_NUM_CLIQUES": "2"} if size > 2 else {}
        words = ["-m", __spec__.name, "--job", f"{first}:{last}", "--seed", str(seed), "--keep", str(keep)]
        words += ["--gentle"] if gentle else []
        try:
            ended = mpirun.run(size, *words, timeout=6 * SECONDS + (last - first) * 3, env=env)
        except subprocess.TimeoutExpired as error:
            ended = subprocess.CompletedProcess(error.cmd, 1, "", "the ranks hang")
        found: dict[int, dict[int, list[str] | None]] = {}  # a rank's notes are None until its draw is over
        for rank, part in enumerate(parts):
            for line in part.read_text().splitlines() if part.exists() else ():
                one = json.loads(line)
                found.setdefault(one["number"], dict.fromkeys(range(size)))[rank] = one.get("notes")
            part.unlink(missing_ok=True)
        if not found:
            raise RuntimeError(f"a job did not begin: {ended}")
        stuck = min((number for number, lines in found.items() if None in lines.values()), default=last)
        with keep.open("a") as file:
            for number, lines in sorted(found.items())[: stuck - first + 1]:
                status = ended.returncode if number == stuck else 0
                given = draw(seed, number, size, gentle)
                one = {**given, "outcome": judged(given, status, lines), "notes": lines}
                if one["outcome"].startswith("FAIL"):
                    one["error_output"] = ended.stderr[-2000:]
                done[number] = one
                file.write(json.dumps(one) + "\n")
        todo = [number for number in todo if number not in done]
    return collections.Counter(done[number]["outcome"] for number in numbers)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--number", type=int, default=10_000, help="draws on 2 ranks (default: 10000)")
    options.add_argument("--nodes", type=int, default=200, help="draws on 2 emulated nodes of 2 ranks (default: 200)")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--keep", type=Path, default=Path("runs/drawn_calls.jsonl"), help="the file of results")
    options.add_argument("--gentle", action="store_true", help="seldom draw what ends a job, which takes seconds")
    options.add_argument("--job", help=argparse.SUPPRESS)
    return options


def main() -> int:
    """Draw, and print how many draws came to what."""
    given = parser().parse_args()
    if given.job:
        job(given.seed, *map(int, given.job.split(":")), given.keep, given.gentle)
        return 0
    found = run(given.seed, range(given.number), 2, given.keep, gentle=given.gentle)
    found += run(given.seed, range(given.nodes), 4, given.keep.with_suffix(".nodes.jsonl"))
    for outcome, count in found.most_common():
        print(f"{count:6} {outcome}")
    return int(any(outcome.startswith("FAIL") for outcome in found))


if __name__ == "__main__":
    sys.exit(main())
