"""What tests may take and packages may hold: tests/budget.json, for tests/run and make lint.

    python -m tests.support.running.budget                    # make lint: the lines of code of each package
    python -m tests.support.running.budget --write TALLY...   # a new file, from those of tests/run --tally FOLDER

The seconds are those of one machine in one state. `calibrate` measures the machine of now by programs that start,
import and compute as tests do, and all seconds are scaled by it.
"""

import argparse
import ast
import io
import json
import os
import subprocess
import sys
import time
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.support.running import tally

ROOT = Path(__file__).resolve().parents[3]
FILE = ROOT / "tests" / "budget.json"

#: a file of tests may take so many times its seconds, and so many more, before it is run again
FACTOR, MORE = 1.5, 2.0
#: the seconds that a file takes more alone: it starts the job and the servers that the files of a run share
ALONE = 12.0
#: the seconds of a file that has no budget yet, the share by which a whole run may exceed its own, and files above it
#: that are run again: with more the run is over its budget anyway
NEW, WHOLE, MOST = 3.0, 1.15, 8
#: starts a process, imports what tests import, and computes a little: in Python, in torch, and in files
_PROGRAM = """
import json, os, tempfile
import numpy, torch
torch.set_num_threads(1)
x = torch.randn(400, 400)
for _ in range(60):
    x = torch.tanh(x @ x)
total = 0
for number in range(1_500_000):
    total += number % 7
with tempfile.TemporaryDirectory() as folder:
    for number in range(300):
        path = os.path.join(folder, str(number))
        with open(path, "w") as file:
            json.dump(list(range(100)), file)
"""


def calibrate(rounds: int = 2) -> float:
    """The seconds that a round of programs takes, one for each of two cores; the shortest of ``rounds``."""
    found = []
    for _ in range(rounds):
        began = time.monotonic()
        running = [subprocess.Popen([sys.executable, "-c", _PROGRAM]) for _ in range(2)]
        for process in running:
            if process.wait():
                raise RuntimeError("the calibration's program failed")
        found.append(time.monotonic() - began)
    return min(found)


def read(path: Path = FILE) -> dict[str, Any]:
    """The file: "calibration" in seconds, "whole" by selection, "seconds" by file and number of ranks, and "lines"."""
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def allowed(budget: Mapping[str, Any], file: str, ranks: str, scale: float) -> float:
    """The seconds that the tests of ``file`` may take on ``ranks``, before the file is run again."""
    seconds = budget["seconds"].get(file, {}).get(ranks, NEW if file not in budget["seconds"] else 0.0)
    return scale * (FACTOR * seconds + MORE)


def excess(budget: Mapping[str, Any], taken: Mapping[tuple[str, str], float], scale: float) -> list[tuple[str, str]]:
    """The (file, ranks) above their budget, the worst first. taken: the seconds of each."""
    over = {key: seconds - allowed(budget, *key, scale) for key, seconds in taken.items()}
    return sorted((key for key, seconds in over.items() if seconds > 0), key=lambda key: -over[key])


def code_lines(text: str) -> int:
    """The lines of a Python program that hold code: no blank line, no comment and no docstring."""
    lines = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in (
            tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER
        ):  # fmt: skip
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            lines.difference_update(range(first.lineno, first.end_lineno + 1))
    return len(lines)


def lines_of(package: str, root: Path = ROOT) -> int:
    """The lines of code of all Python files of a package."""
    return sum(code_lines(path.read_text(encoding="utf-8")) for path in sorted((root / package).rglob("*.py")))


def words_of(folder: str, root: Path = ROOT) -> int:
    """The words of all pages below a folder, as wc counts them. README.md counts with docs."""
    pages = [*(root / folder).rglob("*.md"), *([root / "README.md"] if folder == "docs" else [])]
    return sum(len(page.read_text(encoding="utf-8").split()) for page in pages)


def too_long(budget: Mapping[str, Any], root: Path = ROOT) -> Iterator[str]:
    """A sentence for each package with more lines of code, and each folder with more words, than its budget."""
    for package, most in budget["lines"].items():
        if (found := lines_of(package, root)) > most:
            yield (
                f"{package}: {found:,} lines of code, {found - most:,} more than its budget in {FILE.name}; take some "
                "away, or raise the budget and say why in the note"
            )
    for folder, most in budget.get("words", {}).items():
        if (found := words_of(folder, root)) > most:
            yield f"{folder}: {found:,} words, {found - most:,} more than its budget in {FILE.name}; shorten a page"


def seconds_of(tallies: Iterable[Path]) -> dict[tuple[str, str], float]:
    """The seconds of each (file, ranks) in the tallies of a run (tests/support/running/tally.py), named ``tally-RANKS``
    or ``tally-RANKS-PROCESS``.
    """
    taken: defaultdict[tuple[str, str], float] = defaultdict(float)
    for path in tallies:
        for word, seconds, name in tally.lines(path):
            if word not in ("begun", "end"):
                taken[name.partition("::")[0], path.name.split("-")[1]] += seconds
    return dict(taken)


#: the most words of the pages of a folder
WORDS = {"docs": 64_000, "bench/results": 25_300}
#: those whose lines of code have a budget
PACKAGES = ("commengine", "tplayers", "trainers", "bench", "tests")


def written(
    taken: Mapping[tuple[str, str], float], whole: Mapping[str, float], calibration: float,
    packages: Iterable[str] = PACKAGES,
) -> str:  # fmt: skip
    """The text of a new file."""
    files: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for (file, ranks), seconds in sorted(taken.items()):
        if seconds >= 0.05:
            files[file][ranks] = round(seconds, 1) or 0.1
    lines = {package: lines_of(package) for package in packages}
    found = {"calibration": round(calibration, 2), "whole": dict(whole), "lines": lines, "words": WORDS}
    head = json.dumps(found, indent=1)[:-2]
    rows = ",\n".join(f"  {json.dumps(file)}: {json.dumps(one)}" for file, one in files.items())
    return f'{head},\n "seconds": {{\n{rows}\n }}\n}}\n'


def main() -> int:
    """The command: status 1 if a package has too many lines, or a folder too many words."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", nargs="+", type=Path, metavar="TALLY")
    parser.add_argument("--whole", nargs=2, type=float, metavar=("USUAL", "QUICK"), help="seconds of whole runs")
    given = parser.parse_args()
    if given.write:
        usual, quick = given.whole or (0.0, 0.0)
        FILE.write_text(written(seconds_of(given.write), {"usual": usual, "quick": quick}, calibrate(5)))
        return 0
    problems = list(too_long(read()))
    print(*problems, sep="\n", file=sys.stderr, end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
