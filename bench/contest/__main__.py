"""Prove this project's own figures: sides that do the same work take turns, and one table compares them.

    python -m bench.contest step --rounds 7 --output step_contest.md
    mpiexec -n 2 python -m bench.contest mechanisms

In every round each side has one turn, in a new random order. A time is the median over the rounds with its quartiles,
and a ratio compares two times of one round. The exit status is 1 if the sides do not agree, if one failed, or if one
used the cores of another. The contests, of which NAME --help describes each:

"""

from __future__ import annotations

import sys

from bench.command.start import HELP, answer_help, run_alone, run_on_ranks, user_errors
from bench.contest.options import contests_parser

if __name__ == "__main__" and sys.argv[1:2] and sys.argv[1] in HELP:  # before the other imports, which take seconds
    answer_help("bench.contest", lambda: contests_parser(__doc__))

from argparse import Namespace
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from bench.command.files import add_files, publish
from bench.command.machine import environment, heading
from bench.command.parser import new_parser
from bench.contest import CONTESTS
from bench.contest.parts.base import Case, Contest
from bench.programs.driver import ContestError
from commengine.options.parser import OneLineParser
from commengine.options.ranges import COUNT
from commengine.rank_zero import on_rank_zero

COMMAND = "bench.contest"


def parser(name: str = "") -> OneLineParser:
    """The command line of a contest; without a name that of all, which only has ``--help``."""
    if not name:
        return contests_parser(__doc__)
    module = import_module(f"{__package__}.{name}")
    contest: Contest = module.CONTEST
    options = new_parser(f"{COMMAND} {name}", module.__doc__)
    if contest.rounds:
        options.add_argument("--rounds", type=int, valid=COUNT, default=contest.rounds, help="rounds")
    contest.add_options(options.add_argument)
    add_files(options)
    return options


def read(name: str, argv: Sequence[str]) -> Namespace:
    """The options of a contest. Raises ValueError that names the option at fault."""
    contest = contest_of(name)
    given = parser(name).parse_args(argv)
    contest.check(given)
    return given


def contest_of(name: str) -> Contest:
    """The contest of a name."""
    contest: Contest = import_module(f"{__package__}.{name}").CONTEST
    return contest


def run(name: str, argv: Sequence[str], world: Any = None) -> int:
    """Measure and report. Returns the exit status. Collective over ``world``, if there is one."""
    contest = contest_of(name)
    surroundings = environment(COMMAND, [name, *argv])  # before measuring: the load is that of other programs
    if world is None:
        with user_errors(f"{COMMAND} {name}"):
            given = read(name, argv)
            cases = contest.measure(given, None)
            return report(contest, given, cases, surroundings)
    given = Namespace(**on_rank_zero(world, lambda: vars(read(name, argv))))
    cases = contest.measure(given, world)
    return int(on_rank_zero(world, lambda: report(contest, given, cases, surroundings | {"ranks": world.size})))


def report(contest: Contest, given: Namespace, cases: Sequence[Case], surroundings: dict[str, Any]) -> int:
    """Print the page, and write the files. Returns the exit status."""
    lines = heading(contest.title, surroundings)
    if "ranks" in surroundings:
        lines.append(f"- {surroundings['ranks']} ranks")
    if contest.rounds:
        lines.append(f"- {given.rounds} rounds in random order: median [quartiles]; ratios are of the same round")
    text = "\n".join([*lines, *contest.page(given, cases), ""])
    result = surroundings | {"rounds": getattr(given, "rounds", 0), "cases": [case.to_json() for case in cases]}
    publish(text, result, output=given.output, json_file=given.json)
    contest.files(given, cases)
    for error in (error for case in cases for error in case.errors):
        print(f"error: {error}", file=sys.stderr)
    return contest.status(cases)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the contest that the command line names. Returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] not in CONTESTS:
        with user_errors(COMMAND):
            parser().parse_args(words[:1])
    name, rest = words[0], words[1:]
    if contest_of(name).on_ranks:
        run_on_ranks(f"{COMMAND} {name}", lambda world: run(name, rest, world), lambda: parser(name))
    try:
        return run(name, rest)
    except ContestError as failure:
        print(f"error: {failure}", file=sys.stderr)  # with the end of the program's output
        return 1


if __name__ == "__main__":
    run_alone(main)
