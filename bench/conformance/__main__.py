"""Ask communication whether it keeps what a program relies on: the bits of sums, and derivatives.

    python -m bench.conformance bits --output bits.md
    python -m bench.conformance adjoints tplayers

The parts, of which NAME --help describes each:

"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from bench.command.parser import new_parser
from bench.command.start import HELP, answer_help, user_errors
from bench.conformance import PARTS
from commengine.options.parser import OneLineParser

COMMAND = "bench.conformance"


def parser(name: str = "") -> OneLineParser:
    """The command line of a part; without a name that of all, which only has ``--help``."""
    if name:
        made: OneLineParser = part_of(name).parser()
        return made
    described = "".join(f"  {one:10}{line}\n" for one, line in PARTS.items())
    both = new_parser(COMMAND, str(__doc__) + described)
    both.add_argument("name", metavar="NAME", choices=list(PARTS), help="a part")
    return both


def part_of(name: str) -> Any:
    """The module of a part."""
    return import_module(f"{__package__}.{name}")


def main() -> None:
    """Run the part that the command line names."""
    if len(sys.argv) > 1 and sys.argv[1] in HELP:
        answer_help(COMMAND, parser)
    if len(sys.argv) < 2 or sys.argv[1] not in PARTS:
        with user_errors(COMMAND):
            parser().parse_args(sys.argv[1:2])
    part_of(sys.argv.pop(1)).start()


if __name__ == "__main__":
    main()
