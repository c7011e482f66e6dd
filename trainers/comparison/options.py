"""The options of trainers.compare. Importing this imports no torch."""

from __future__ import annotations

from pathlib import Path

from commengine.options.parser import OneLineParser


def compare_parser(description: str | None) -> OneLineParser:
    """The command line. description: the docstring of the command, whose first paragraph is left out."""
    made = OneLineParser("python -m trainers.compare", description=(description or "").partition("\n\n")[2])
    made.add_argument("run", nargs=2, type=Path, metavar="RUN", help="the --save folder of a run")
    return made
