"""Make one self-contained HTML page of the results in a folder.

    python -m bench.study --only report DIR --output report.html

Files with one stem (all_reduce.md, .json, .png) make a section. Markdown becomes HTML, and pictures are embedded, each
once. The lists of objects in a JSON file without markdown beside it are tabled. A click on a heading sorts a table;
long tables and JSON files are folded. The answers of a study stand first. The page loads nothing from elsewhere. A
damaged file gets a note, and the exit status is then 1. The command measures nothing and has no --json.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from bench.command.parser import new_parser
from bench.command.start import user_errors
from bench.report_page.page import page
from commengine.files.writing import check_writable
from commengine.options.parser import OneLineParser

COMMAND = "bench.study --only report"


def parser() -> OneLineParser:
    """The command line."""
    options = new_parser(COMMAND, __doc__)
    options.add_argument("folder", type=Path, metavar="DIR", help="folder of results: markdown, JSON, pictures")
    options.add_argument("--output", type=Path, metavar="FILE", help="the page (default: DIR/report.html)")
    return options


def main(argv: Sequence[str]) -> int:
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
