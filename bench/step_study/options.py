"""The options of bench.step and bench.replay. Importing this imports no torch."""

from __future__ import annotations

import argparse

from bench.command.files import add_files
from bench.command.parser import new_parser
from commengine.options.parser import OneLineParser
from commengine.options.ranges import COUNT, between
from trainers.settings.commands import BERTSettings, GPTSettings

#: the formats of `bench.traces.formats` in which a recording can be written: the first one where none is named
WRITTEN = ("commengine", "chakra")


def step_parser(description: str | None) -> OneLineParser:
    """The options that are not those of the training command. description: the docstring of the command."""
    options = new_parser("bench.step", description, passes_on=True)
    add_model(options)
    add = options.add_argument
    add(
        "--warmup",
        type=int,
        valid=between(0, 10**6),
        default=3,
        help="steps before the traced ones (default: %(default)s)",
    )
    add("--steps", type=int, valid=COUNT, default=5, help="traced steps (default: %(default)s)")
    add_files(
        options,
        json="write every number of every rank and step",
        timeline="draw the median step: .png, .svg or .pdf",
        chrome="write the median step for chrome://tracing and ui.perfetto.dev",
    )
    add("--save", metavar="DIR", help="record the collectives of the median step, for bench.replay")
    add_save_format(options, "--save")
    add("--overwrite", action="store_true", help="replace the recording that --save's folder holds")
    return options


def replay_parser(description: str | None) -> OneLineParser:
    """The command line. description: the docstring of the command."""
    options = new_parser("bench.replay", description)
    add = options.add_argument
    add("trace", metavar="TRACE",
        help="the folder of a recording (rank-0.jsonl, ...), of a Chakra trace (PREFIX.0.et, ..., or DIR/PREFIX) or of "
        "PyTorch's profiles (.json or .json.gz, one a rank)")  # fmt: skip
    add(
        "--groups",
        metavar="FILE",
        file="read",
        help="the groups of a Chakra trace: ASTRA-sim's --comm-group-configuration",
    )
    add("--warmup", type=int, valid=between(0, 10**6), default=3,
        help="replays before those that count (default: %(default)s)")  # fmt: skip
    add("--rounds", type=int, valid=COUNT, default=7,
        help="replays, whose median is a collective's time (default: %(default)s)")  # fmt: skip
    add("--scale", action="store_true", help="replay on fewer ranks than were recorded")
    add_files(options, json="write every collective of every rank")
    return options


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add ``--model``, which says of which training command the other options are."""
    parser.add_argument(
        "--model", choices=tuple(one.kind for one in (GPTSettings, BERTSettings)),
        help="the step is that of pretrain_gpt or pretrain_bert, and so are the other options (default: the one that "
        "--preset belongs to, or gpt)",
    )  # fmt: skip


def add_save_format(parser: argparse.ArgumentParser, option: str) -> None:
    """Add ``--save-format``, which says in which format ``option`` writes."""
    parser.add_argument(
        "--save-format",
        choices=WRITTEN,
        help=f"with {option}: the format of the files; chakra is for ASTRA-sim (default: {WRITTEN[0]})",
    )
