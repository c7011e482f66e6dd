"""Fit alpha, beta and the sizes at which algorithms switch to the results of bench.collectives.

    python -m bench.fit results.json --output model.json --plot fit.png

Every operation, number of ranks and transport has its own fit: piecewise alpha + n beta, with 95% confidence intervals
and the residual at every size (bench/collective_study/piecewise.py has the method). Where that misses a well measured
time by more than 15%, a sentence says so, and lines between measured sizes take its place.

`commengine.cost.FittedModel` loads the model. For each operation and number of ranks the model has the first transport
in the file that the options select, in place where that was measured. All series stand under "series" in the model
file, with their residuals and with the link that each algorithm's formula derives. null: the data give no bound at this
end of the interval. Sizes are defined as in nccl-tests.
"""

from __future__ import annotations

import json
import sys
from argparse import BooleanOptionalAction
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.collective_study import piecewise
from bench.collective_study.fitted_series import FittedSeries, as_json, draw, tables
from bench.collective_study.results import STATISTICS, Series, read
from bench.command.files import check_writable
from bench.command.machine import environment
from bench.command.parser import CommandParser, new_parser
from bench.command.start import user_errors
from commengine import UsageError
from trainers.options import between

COMMAND = "bench.fit"


def parser() -> CommandParser:
    """The command line."""
    options = new_parser(COMMAND, __doc__)
    add = options.add_argument
    add("results", type=Path, metavar="RESULTS.json", help="a file that bench.collectives --json wrote")
    add("--output", type=Path, metavar="FILE", help="write the model as JSON")
    add("--plot", type=Path, metavar="FILE", help="draw the fits over the data, and the residuals: .png, .svg or .pdf")
    add("--markdown", type=Path, metavar="FILE", help="write the tables")
    add("--operation", action="append", metavar="NAME", help="fit this operation only; may be repeated")
    add("--transport", action="append", metavar="NAME", help="fit this transport only; may be repeated")
    add("--group", action="append", metavar="NAME", help="fit this group only; may be repeated")
    add("--dtype", action="append", metavar="NAME", help="fit this dtype only; may be repeated")
    add("--in-place", action=BooleanOptionalAction, help="fit only series in place, or only series out of place")
    add(
        "--statistic",
        choices=STATISTICS,
        default="p50",
        help="statistic of the times; min if other programs use the machine",
    )
    add(
        "--segments",
        type=int,
        valid=between(1, 100),
        default=piecewise.MOST_SEGMENTS,
        metavar="N",
        help="the largest number of segments of alpha + n beta (default: %(default)s)",
    )
    return options


def chosen(series: Sequence[Series], arguments: Any) -> list[Series]:
    """The series that the options select. Raises UsageError for a name that no series has, and where none is left."""
    left = list(series)
    for name in ("operation", "transport", "group", "dtype"):
        wanted = getattr(arguments, name)
        there = sorted({str(one.key[name]) for one in series})
        if wanted and (unknown := [value for value in wanted if value not in there]):
            raise UsageError(
                f"--{name} {unknown[0]}: not among the results, which have {', '.join(there) or 'nothing'}"
            )
        left = [one for one in left if not wanted or str(one.key[name]) in wanted]
    if arguments.in_place is not None:
        left = [one for one in left if one.in_place == arguments.in_place]
    left = [one for one in left if one.ranks > 1]
    if not left:
        raise UsageError("nothing to fit: the options select no results on 2 ranks or more")
    return left


def fit_all(series: Sequence[Series], most: int) -> tuple[list[FittedSeries], list[str]]:
    """Fit all series. Returns the fits, and for each other series the reason why it has none."""
    fitted, left_out = [], []
    for one in series:
        try:
            fitted.append(FittedSeries(one, piecewise.fit(one.sizes, one.seconds, one.errors, most)))
        except ValueError as error:
            left_out.append(f"{one.operation}, {one.ranks} ranks, {one.variant}: {error}")
    return fitted, left_out


def main(argv: Sequence[str] | None = None) -> int:
    """Fit and report. Returns the exit status."""
    with user_errors(COMMAND):
        arguments = parser().parse_args(argv)
        check_writable(output=arguments.output, plot=arguments.plot, markdown=arguments.markdown)
        series, source = read(arguments.results, arguments.statistic)
        fitted, left_out = fit_all(chosen(series, arguments), arguments.segments)
        if not fitted:
            raise UsageError(f"nothing to fit: {left_out[0]}")
        lines = list(tables(fitted))
        if arguments.markdown:
            arguments.markdown.write_text(
                "\n".join(["# Fit", "", f"- results: `{source.get('command', arguments.results)}`", "", *lines, ""])
            )
        if arguments.output:
            text = json.dumps(
                as_json(fitted, source, arguments.results, environment(COMMAND, argv)), indent=1, allow_nan=False
            )
            arguments.output.write_text(text)
        if arguments.plot:
            draw(fitted).savefig(arguments.plot, dpi=120)
    print("\n".join(lines))
    for reason in left_out:
        print(f"left out: {reason}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
