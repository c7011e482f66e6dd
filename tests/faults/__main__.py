"""Break runs and commands in many seeded ways: ``python -m tests.faults [PART ...] --minutes 30``.

Each part (tests/support/faults/parts.py) is a module of this folder. Cases that have passed, according to the file of
results, are not run again, so the command goes on where it stopped; ``--anew`` runs all. The parts take turns, the one
that has had the least time first. The exit status is 1 if a case has failed, and 0 otherwise.
"""

from __future__ import annotations

import argparse
import datetime as dt
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support import mpirun
from tests.support.faults import parts
from tests.support.faults.results import Results, check_document, table, write_table
from tests.support.faults.worker import Worker


def parser() -> argparse.ArgumentParser:
    """The parser of the command."""
    names = ", ".join(parts.names())
    made = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__, allow_abbrev=False,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    for words, about in {
        ("parts",): {"nargs": "*", "metavar": "PART", "help": f"default: all. The parts are {names}"},
        ("--minutes",): {"type": float, "default": float("inf"), "help": "the case in which it ends is the last one"},
        ("--cases",): {"type": int, "nargs": "+", "metavar": "N", "help": "only these of each part, passed or not"},
        ("--anew",): {"action": "store_true", "help": "run the cases again that have passed"},
        ("--results",): {"default": "runs/faults/results.jsonl", "help": "a row for each case (default %(default)s)"},
        ("--table",): {"help": "write the table there: between its marks in bench/results/faults.md, or to a new file"},
        ("--folder",): {"default": "runs/faults", "help": "of the cases; failed ones stay there (default %(default)s)"},
    }.items():
        if words[0] in ("--results", "--table", "--folder"):
            about |= {"type": Path, "metavar": words[0].strip("-").upper()}
        made.add_argument(*words, **about)
    return made


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    names, asked = parts.names(), parser()
    options = asked.parse_args(argv)
    if unknown := sorted(set(options.parts) - set(names)):
        asked.error(f"there is no part {', '.join(unknown)}; the parts are {', '.join(names)}")
    if not options.minutes > 0:
        asked.error(f"--minutes {options.minutes:g}: must be positive")
    if options.table:
        try:
            check_document(options.table)
        except (ValueError, OSError) as error:
            asked.error(str(error))
    options.parts = [name for name in names if name in options.parts or not options.parts]
    return options


def _versions() -> dict[str, str]:
    """The commit, with a plus sign if files differ from it, and the MPI."""
    asked = ["git", "describe", "--always", "--dirty=+", "--match", ""]
    commit = subprocess.run(asked, cwd=mpirun.ROOT, capture_output=True, text=True, check=False).stdout.strip()
    program = "from mpi4py import MPI; print(MPI.Get_library_version().split(chr(10))[0].split(',')[0])"
    done = subprocess.run([sys.executable, "-c", program], env=mpirun.environment(), capture_output=True, text=True,
                          check=True)  # fmt: skip
    return {"commit": commit or "unknown", "mpi": " ".join(done.stdout.replace("Version:", "").split())}


class Turn:
    """A part, its process, the cases that are left of it, and the seconds that they have taken."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder / name
        self.worker = Worker(name, self.folder)
        self.about = self.worker.about
        self.left: list[int] = []
        self.spent = 0.0

    def run(self) -> dict[str, Any]:
        """Run the next case and return its row."""
        number, began = self.left.pop(0), time.monotonic()
        if not self.worker.alive:
            self._renew()
        outcome = self.worker.run(number)
        if outcome is None:
            text = "the process of the part died, or could not be interrupted"
            outcome = {"passed": False, "text": text, "details": "", "seconds": time.monotonic() - began}
            self._renew()
        self.spent += outcome["seconds"]
        return {"part": self.name, "case": number, "passed": outcome["passed"], "outcome": outcome["text"],
                "seconds": round(outcome["seconds"], 2), "details": outcome["details"][-4000:]}  # fmt: skip

    def _renew(self) -> None:
        """Start the part's process again."""
        self.worker.close()
        self.worker = Worker(self.name, self.folder)


def main(argv: Sequence[str] | None = None) -> int:
    """Run cases until none is left or the time is over; return the exit status."""
    options = _options(argv)
    deadline = time.monotonic() + 60 * options.minutes
    options.results.parent.mkdir(parents=True, exist_ok=True)
    results, versions = Results(options.results), _versions()
    turns: list[Turn] = []
    try:
        for name in options.parts:
            turns.append(turn := Turn(name, options.folder.resolve()))
            results.add({"part": name} | turn.about)
            if turn.about["why_not"]:
                print(f"{name}: not run: {turn.about['why_not']}", flush=True)
                continue
            wanted = options.cases if options.cases else range(turn.about["cases"])
            passed = {row["case"] for row in results.of(name) if row["passed"]}
            turn.left = [
                n for n in wanted if n < turn.about["cases"] and (options.cases or options.anew or n not in passed)
            ]
        begun = False
        while (waiting := [turn for turn in turns if turn.left]) and not (begun and time.monotonic() >= deadline):
            begun = True  # each call runs a case, however short its time and however slow the machine
            row = min(waiting, key=lambda turn: turn.spent).run()
            results.add(row | versions | {"date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds")})
            word = "passed" if row["passed"] else "FAILED"
            print(f"{row['part']} {row['case']}: {word} in {row['seconds']:.1f} s: {row['outcome']}", flush=True)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    finally:
        for turn in turns:
            turn.worker.close()
        if options.table:
            write_table(options.table, table(results))
    print("\n" + table(results))
    if left := sum(len(turn.left) for turn in turns):
        print(f"the time is over, {left} cases are left: the same command goes on with them")
    failed = [row for turn in turns for row in results.of(turn.name) if not row["passed"]]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
