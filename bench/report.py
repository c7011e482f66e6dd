"""Make one self-contained HTML page of the results in a folder.

    python -m bench.report DIR --output report.html

Files with one stem (all_reduce.md, .json, .png) make a section. Markdown becomes HTML, and pictures are embedded, each
once. Results of bench.collectives, models of bench.fit and steps of bench.step are drawn and tabled. For any other JSON
file without markdown beside it, its lists of objects are tabled, with their units. A click on a heading sorts a table;
long tables and JSON files are folded. The answers of a study (bench.study) stand first. The page loads nothing from
elsewhere. A damaged file gets a note, and the exit status is then 1. The command measures nothing and has no --json.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from bench.command.files import check_writable
from bench.command.parser import CommandParser, new_parser
from bench.command.start import run_alone, user_errors
from bench.report_page.page import page

COMMAND = "bench.report"


def parser() -> CommandParser:
    """The command line."""
    options = new_parser(COMMAND, __doc__)
    options.add_argument("folder", type=Path, metavar="DIR", help="folder of results: markdown, JSON, pictures")
    options.add_argument("--output", type=Path, metavar="FILE", help="the page (default: DIR/report.html)")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page. Returns the exit status."""
    with user_errors(COMMAND):
        arguments = parser().parse_args(argv)
        output = arguments.output or arguments.folder / "report.html"
        check_writable(output=output if arguments.output else None)
        problems: list[str] = []
        output.write_text(page(arguments.folder, problems), encoding="utf-8")
    print(output)
    for problem in problems:
        print(f"not shown: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    run_alone(main)
