"""Fit alpha, beta and the sizes at which algorithms switch to the results of bench.collectives.

    python -m bench.study --only fit results.json --output model.json --plot fit.png

Every operation, number of ranks and transport has its own fit: piecewise alpha + n beta, with 95% confidence intervals
and the residual at every size (bench/collective_study/piecewise.py has the method). Where that misses a well measured
time by more than 15%, a sentence says so, and lines between measured sizes take its place.

Rows count that may be compared: those of a disturbed state, and those of fewer than six calls, are left out and named.

`commengine.cost.FittedModel` loads the model. It has one dtype, one reduction and one state of the machine: float32,
sum and the state with most calls, where the file has several and no option says otherwise. Of these series it has, for
each operation and number of ranks, the first transport in the file, in place where that was measured. Its p2p is the
operation send, and a sendrecv where no send was fitted. All series stand under "series" in the model file, with their
residuals and with the link that each algorithm's formula derives. null: the data give no bound at this end of the
interval. Sizes are defined as in nccl-tests.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.collective_study import piecewise
from bench.collective_study.fitted_series import FittedSeries, as_json, draw, tables
from bench.collective_study.results import STATISTICS, Series, read
from bench.command.machine import environment
from bench.command.parser import new_parser
from bench.command.start import user_errors
from commengine import UsageError
from commengine.files.writing import check_writable
from commengine.options.parser import OneLineParser

COMMAND = "bench.study --only fit"


def parser() -> OneLineParser:
    """The command line."""
    options = new_parser(COMMAND, __doc__)
    add = options.add_argument
    add("results", type=Path, metavar="RESULTS.json", file="read", help="a file that bench.collectives --json wrote")
    add("--output", type=Path, metavar="FILE", file="written", help="write the model as JSON")
    add("--plot", type=Path, metavar="FILE", file="written",
        help="draw the fits over the data, and the residuals: .png, .svg or .pdf")  # fmt: skip
    add("--markdown", type=Path, metavar="FILE", file="written", help="write the tables")
    add("--transport", action="append", metavar="NAME", help="fit this transport only; may be repeated")
    add("--dtype", metavar="NAME", help="the dtype of the model (default: float32, if there are several)")
    add("--redop", metavar="NAME", help="the reduction of the model (default: sum, if there are several)")
    add("--state", metavar="NAME", help='the state of the machine, such as "state 1" (default: that with most calls)')
    add("--statistic", choices=STATISTICS, default="p50",
        help="statistic of the times; min if other programs use the machine")  # fmt: skip
    return options


def chosen(series: Sequence[Series], transports: Sequence[str] | None) -> list[Series]:
    """The series of these transports, or of all. Raises UsageError for one that no series has, and if none is left."""
    there = sorted({str(one.key.transport) for one in series})
    if unknown := [name for name in transports or () if name not in there]:
        raise UsageError(f"--transport {unknown[0]}: not among the results, which have {', '.join(there) or 'nothing'}")
    left = [one for one in series if one.ranks > 1 and (not transports or one.key.transport in transports)]
    if not left:
        raise UsageError("nothing to fit: there are no results on 2 ranks or more")
    return left


def fit_all(series: Sequence[Series]) -> tuple[list[FittedSeries], list[str]]:
    """Fit all series. Returns the fits, and for each other series the reason why it has none."""
    fitted, left_out = [], []
    for one in series:
        try:
            fitted.append(FittedSeries(one, piecewise.fit(one.sizes, one.seconds, one.errors)))
        except ValueError as error:
            rows = "".join(f"; {row.size:,.0f} bytes: {row.why}" for row in one.left_out)
            left_out.append(f"{one.operation}, {one.ranks} ranks, {one.variant}: {error}{rows}")
    return fitted, left_out


def main(argv: Sequence[str]) -> int:
    """Fit and report. Returns the exit status."""
    with user_errors(COMMAND):
        arguments = parser().parse_args(argv)
        check_writable(output=arguments.output, plot=arguments.plot, markdown=arguments.markdown)
        series, source = read(arguments.results, arguments.statistic)
        fitted, left_out = fit_all(chosen(series, arguments.transport))
        if not fitted:
            raise UsageError(f"nothing to fit: {left_out[0]}")
        surroundings = environment("bench.study", ["--only", "fit", *argv])
        model = as_json(
            fitted, source, arguments.results, surroundings,
            {name: getattr(arguments, name) for name in ("dtype", "redop", "state")},
        )  # fmt: skip
        lines = [*tables(fitted), *("" for _ in model["notes"][:1]), *(f"- {note}." for note in model["notes"])]
        if arguments.markdown:
            about = f"- results: `{source.get('command', arguments.results)}`"
            arguments.markdown.write_text("\n".join(["# Fit", "", about, "", *lines, ""]), encoding="utf-8")
        if arguments.output:
            arguments.output.write_text(json.dumps(model, indent=1, allow_nan=False), encoding="utf-8")
        if arguments.plot:
            draw(fitted).savefig(arguments.plot, dpi=120)
    print("\n".join(lines))
    for reason in left_out:
        print(f"left out: {reason}", file=sys.stderr)
    return 0
