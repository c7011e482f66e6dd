"""What a GPU does: the speed of training steps, the cost of all-reduces, and whether training is right.

    python -m bench.gpu machine
    python -m bench.gpu flops --output gpu_flops.md
    python -m bench.gpu overhead --ranks 2 --output gpu_overhead.md
    mpiexec -n 2 python -m bench.gpu overlap --output gpu_overlap.md
    python -m bench.gpu profile --output gpu_profile.md
    python -m bench.gpu dropout --output gpu_dropout.md
    python -m bench.gpu blocks --output gpu_blocks.md
    python -m bench.gpu losses --runs runs

A row of a table is written as soon as it is measured. Without a GPU the exit status is 2, but ``--tiny`` tries a study
on the CPU, and ``losses`` only reads files. ``bench/gpu.sh`` runs all of them, and the tests that need a GPU.
``python -m bench.gpu STUDY --help`` describes a study and its options.
"""

from __future__ import annotations

import sys

from bench.command.start import HELP, answer_help, run_alone, run_on_ranks, user_errors
from bench.gpu_study.options import gpu_parser

if __name__ == "__main__" and sys.argv[1:2] and sys.argv[1] in HELP:  # before the other imports, which take seconds
    answer_help("bench.gpu", lambda: gpu_parser(__doc__))

from collections.abc import Sequence
from typing import Any

import torch

from bench.command.files import add_files
from bench.command.machine import environment
from bench.gpu_study import blocks, dropout, flops, losses, machine_report, overhead, overlap, profile
from bench.programs.driver import ContestError
from commengine import UsageError
from commengine.options.parser import OneLineParser

COMMAND = "bench.gpu"
STUDIES = {
    "machine": machine_report,
    "flops": flops,
    "overhead": overhead,
    "overlap": overlap,
    "profile": profile,
    "dropout": dropout,
    "blocks": blocks,
    "losses": losses,
}
ON_GPU = tuple(name for name in STUDIES if name != "losses")  # the others only read files
ON_RANKS = ("flops", "overlap", "profile", "dropout", "blocks")  # each process is a rank of a job


def parser() -> OneLineParser:
    """The command line: a subcommand for each study."""

    def fill(name: str, own: OneLineParser) -> None:
        study = STUDIES[name]
        own.description = study.__doc__
        if hasattr(study, "add_options"):
            study.add_options(own)
        if name in ON_GPU:
            own.add_argument("--tiny", action="store_true", help="the least sizes, to try it without a GPU")
        add_files(own)

    return gpu_parser(__doc__, fill)


def parse(argv: Sequence[str] | None = None) -> Any:
    """The study and its settings. Raises ValueError that names the option at fault, or UsageError without a GPU."""
    given = parser().parse_args(argv)
    study = STUDIES[given.study]
    if hasattr(study, "check"):
        study.check(given)
    if given.study in ON_GPU and not torch.cuda.is_available() and not given.tiny:
        raise UsageError(f"{given.study}: needs a CUDA device, and torch sees none")
    given.environment = environment(COMMAND)
    return given


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study that the command line names. Returns the exit status."""
    answer_help(COMMAND, parser)
    with user_errors(COMMAND):
        given = parse(argv)
    study: Any = STUDIES[given.study]
    if given.study in ON_RANKS:
        device = "cuda" if torch.cuda.is_available() and not given.tiny else "cpu"
        run_on_ranks(COMMAND, lambda world: study.run(world, given), parser, device=device)
    try:
        return study.run(given) or 0
    except ContestError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    run_alone(main)
