"""The options of bench.contest without the name of a contest. Importing this imports no torch."""

from __future__ import annotations

from bench.command.parser import new_parser
from bench.contest import CONTESTS
from commengine.options.parser import OneLineParser

WIDTH = max(map(len, CONTESTS))


def contests_parser(description: str | None) -> OneLineParser:
    """The command line of all contests, which only has ``--help``. description: the docstring of the command."""
    described = "".join(f"  {one:{WIDTH}}  {line}\n" for one, line in CONTESTS.items())
    options = new_parser("bench.contest", str(description) + described)
    options.add_argument("name", metavar="NAME", choices=list(CONTESTS), help="a contest")
    return options
