"""Ask whether operators that communicate have the derivatives of their serial definitions.

    python -m bench.conformance adjoints tplayers --ranks 1 2 3 4 --output adjoints.md
    python -m bench.conformance adjoints my_operators.py

MODULE is the name of a library (tplayers, torch.distributed.nn, functional_collectives, mpi4torch), or a file or module
of your own with a function ``operators(comm)``, which returns a list of `bench.conformance.operator.Operator`. comm is
a communicator of mpi4py. The command starts its own jobs, one for each number of ranks. An operator that waits for ever
is ended, and a new job goes on with the next check. So it runs on one node, outside of mpiexec.

A cell of the table is the answer on every number of ranks: yes; WRONG: a number is not the true one; refused: the
operator raised an error, which is better than a wrong number; hangs: no answer in --timeout seconds; crashes: its
process ended; - where there is nothing to ask. Numbers of ranks stand beside an answer that not all of them gave. The
smallest example of each answer that is not yes is below the table. The columns:

"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from bench.command.files import add_files, publish
from bench.command.machine import environment, heading
from bench.command.parser import new_parser
from bench.command.start import run_alone, user_errors
from bench.conformance.adjoints_page import page
from bench.conformance.checks import CHECKS
from bench.conformance.job import BUILT_IN
from bench.conformance.jobs import Answer, answers
from commengine import UsageError
from commengine.options.parser import OneLineParser
from commengine.options.ranges import SECONDS, between
from commengine.startup.tasks import number_of_tasks

COMMAND = "bench.conformance adjoints"
#: answers by which the command fails
BAD = ("WRONG", "hangs", "crashes")


def parser() -> OneLineParser:
    """The command line."""
    columns = "".join(f"  {name:14}{inspect.getdoc(check)}\n" for name, check in CHECKS.items())
    options = new_parser(COMMAND, str(__doc__) + columns)
    add = options.add_argument
    add("modules", nargs="+", metavar="MODULE", help=f"{', '.join(BUILT_IN)}, or a file or module of yours")
    add("--ranks", nargs="+", type=int, valid=between(1, 64), default=[2, 3], help="numbers of ranks (default: 2 3)")
    add("--operators", nargs="+", metavar="NAME", default=[], help="only these (default: all of the module)")
    add("--checks", nargs="+", choices=list(CHECKS), default=list(CHECKS), help="only these columns (default: all)")
    add(
        "--timeout",
        type=float,
        valid=SECONDS,
        default=20.0,
        help="seconds after which a check counts as one that hangs",
    )
    add_files(options, output="write the tables as markdown", json="write every answer")
    return options


def require_module(name: str) -> None:
    """Raise UsageError where there is no library, file or module of the name."""
    try:
        there = name in BUILT_IN or (Path(name).is_file() if name.endswith(".py") else importlib.util.find_spec(name))
    except (ImportError, ValueError):
        there = False
    if not there:
        valid = f"valid: {', '.join(BUILT_IN)}, a file that ends in .py, or a module of the Python path"
        raise UsageError(f"MODULE {name}: there is no such module; {valid}")


def told(answer: Answer) -> None:
    """Print an answer that is not yes, while others are asked."""
    if answer.answer not in ("yes", "-"):
        print(f"  {answer.operator}, {answer.check}: {answer.answer}", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Ask, and report. Returns the exit status: 1 if a number is wrong, or an operator hangs or crashes."""
    surroundings = environment(COMMAND, argv)
    found: list[Answer] = []
    problems: dict[str, str] = {}
    with user_errors(COMMAND):
        given = parser().parse_args(argv)
        if (number_of_tasks() or ("", 1))[1] > 1:
            raise UsageError("starts its own jobs: leave mpiexec out, and give --ranks")
        for module in given.modules:
            require_module(module)
        for module in given.modules:
            for ranks in given.ranks:
                print(f"{module} on {ranks} ranks", file=sys.stderr, flush=True)
                try:
                    found += answers(module, ranks, given.checks, given.operators, given.timeout, told)
                except UsageError as error:
                    if len(given.modules) == 1:
                        raise
                    problems[module] = str(error)
                    break
    lines = [
        *heading("Derivatives of operators that communicate", surroundings),
        *page(found, given.checks, problems),
        "",
    ]
    result = surroundings | {"answers": [asdict(one) for one in found], "problems": problems}
    publish("\n".join(lines), result, output=given.output, json_file=given.json)
    return int(any(one.answer in BAD for one in found))


def start() -> NoReturn:
    """Run the command."""
    run_alone(main)
