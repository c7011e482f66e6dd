"""The options of bench.doctor. Importing this imports no torch."""

from __future__ import annotations

from bench.command.files import add_files
from bench.command.parser import new_parser
from commengine.options.parser import OneLineParser
from commengine.options.ranges import between

LONGEST = 600.0


def doctor_parser(description: str | None) -> OneLineParser:
    """The command line. description: the docstring of the command."""
    options = new_parser("bench.doctor", description)
    options.add_argument("--seconds", type=float, valid=between(0, LONGEST), default=10.0,
                         help="about the time of the self-test; 0 leaves it out")  # fmt: skip
    add_files(options, output="write the page as markdown", json="write all that was found, of every rank")
    return options
