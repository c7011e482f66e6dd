"""What a GPU does: the speed of training steps, and the cost of all-reduces alone and beside compute.

    python -m bench.gpu flops --output gpu_flops.md
    python -m bench.gpu overhead --ranks 2 --output gpu_overhead.md
    mpiexec -n 2 python -m bench.gpu overlap --output gpu_overlap.md

A row of a table is written as soon as it is measured. Without a GPU the exit status is 2. ``bench/gpu.sh`` runs all of
them, and the tests that need a GPU. ``python -m bench.gpu STUDY --help`` describes a study and its options.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from bench.command.files import check_writable
from bench.command.parser import CommandParser, new_parser
from bench.command.start import answer_help, run_on_ranks, user_errors
from bench.command.values import check_least
from bench.contests.driver import ContestError
from bench.gpu_study import flops, overhead, overlap
from commengine import UsageError

COMMAND = "bench.gpu"
STUDIES = {"flops": flops, "overhead": overhead, "overlap": overlap}


def parser() -> CommandParser:
    """The command line: a subcommand for each study."""
    options = new_parser(COMMAND, __doc__)
    studies = options.add_subparsers(dest="study", required=True, metavar="STUDY")
    for name, study in STUDIES.items():
        line = str(study.__doc__).splitlines()[0]
        own = studies.add_parser(
            name, prog=f"{options.prog} {name}", help=line, description=study.__doc__,
            formatter_class=options.formatter_class,
        )  # fmt: skip
        study.add_options(own)
    return options


def parse(argv: Sequence[str] | None = None) -> Any:
    """The study and its settings. Raises ValueError that names the option at fault, or UsageError without a GPU."""
    given = parser().parse_args(argv)
    check_least(given, **{name: 1 for name in ("ranks", "rounds", "bucket_mb") if hasattr(given, name)})
    check_writable(output=given.output, json=given.json)
    if not torch.cuda.is_available() and not getattr(given, "tiny", False):
        raise UsageError(f"{given.study}: needs a CUDA device, and torch sees none")
    return given


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study that the command line names. Returns the exit status."""
    answer_help(COMMAND, parser)
    with user_errors(COMMAND):
        given = parse(argv)
    if given.study != "overhead":
        study = flops if given.study == "flops" else overlap
        device = "cuda" if torch.cuda.is_available() else "cpu"
        run_on_ranks(COMMAND, lambda world: study.run(world, given), parser, device=device)
    try:
        overhead.run(given)  # it starts its programs itself and is no rank of them
    except ContestError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
