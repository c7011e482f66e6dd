"""The options of bench.study. Importing this imports no torch."""

from __future__ import annotations

from bench.command.files import add_files
from bench.command.parser import new_parser
from bench.step_study.options import add_model
from commengine.options.parser import OneLineParser
from commengine.options.ranges import ABOVE_ZERO, NOT_NEGATIVE, SECONDS

#: the parts that run alone, with options of their own
ALONE = ("fit", "report")


def study_parser(description: str | None) -> OneLineParser:
    """The options that are not those of the training command. description: the docstring of the command."""
    options = new_parser("bench.study", description, passes_on=True)
    add_model(options)
    add = options.add_argument
    add("--only", choices=ALONE, help="run this part alone; it has other options")
    add("folder", metavar="DIR", help="the folder of the study: a new one, or one that goes on")
    add("--minutes", type=float, valid=SECONDS, default=10.0,
        help="time of the whole study, all its calls together; a few sizes and steps are always measured")  # fmt: skip
    add("--device", choices=("cpu",), default="cpu", help="the collectives and the step are those of the host")
    add("--max-bytes", metavar="SIZE", help="largest size (default: 64M, or less if the memory is small)")
    add("--between-alpha-us", type=float, valid=NOT_NEGATIVE, default=2.0, metavar="US",
        help="for more ranks: latency between nodes, if the job has one node")  # fmt: skip
    add("--between-gb-per-s", type=float, valid=ABOVE_ZERO, default=12.5, metavar="GB",
        help="and the rate of a node's network card (default: %(default)s, a link of 100 Gbit/s)")  # fmt: skip
    add("--overwrite", action="store_true", help="begin the study in DIR anew")
    add_files(options, output="write the answers as markdown here, too", json="write the answers as JSON here, too")
    return options
