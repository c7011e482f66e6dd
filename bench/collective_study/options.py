"""The options of bench.collectives. Importing this imports no torch."""

from __future__ import annotations

from argparse import BooleanOptionalAction

from bench.command.files import add_files
from bench.command.parser import new_parser
from bench.transports.names import BUFFERS, DTYPES, OPERATIONS, REDOPS, SAME, TRANSPORTS
from commengine.options.parser import OneLineParser
from commengine.options.ranges import AT_LEAST_ONE, COUNT, OPEN_FRACTION, SECONDS, ValidRange

GROUPS = ("world", "tensor", "data")
#: the parts that run alone, with options of their own
ALONE = ("overhead", "switch-points", "experts", "set-up")
#: the transports that every machine has
DEFAULT_TRANSPORTS = ("engine", "mpi4py", "shared", "stream")
#: a smaller factor would make so many sizes that the first is not measured
STEP_FACTOR = ValidRange(lambda factor: 1.01 <= factor <= 10**6, "must be a number above 1, from 1.01 to 1000000")


def collectives_parser(description: str | None) -> OneLineParser:
    """The command line. description: the docstring of the command."""
    options = new_parser("bench.collectives", description)
    add = options.add_argument
    add("--only", choices=ALONE, help="run this part alone; it has other options")
    add("--operations", nargs="+", choices=OPERATIONS, default=list(OPERATIONS), help="(default: all)")
    add("--transports", nargs="+", choices=TRANSPORTS, default=list(DEFAULT_TRANSPORTS),
        help=f"(default: {' '.join(DEFAULT_TRANSPORTS)})")  # fmt: skip
    add("--dtypes", nargs="+", choices=DTYPES, default=["float32"], help="(default: float32)")
    add("--redop", nargs="+", choices=REDOPS, default=["sum"], help="(default: sum)")
    add("--skew", nargs="+", default=["uniform"], metavar="NAME",
        help="of all_to_all_v and all_gather_v: uniform, zipf, hot, or a JSON file, [rank][expert] tokens")  # fmt: skip
    add("--min-bytes", default="1", metavar="SIZE", help="smallest size, rounded up to whole elements of every rank")
    add(
        "--max-bytes",
        metavar="SIZE",
        help="largest size, such as 64M, also off the factor (default: all buffers take an eighth of the memory)",
    )
    add("--step-factor", type=float, valid=STEP_FACTOR, default=2.0, help="factor from one size to the next")
    add("--in-place", action=BooleanOptionalAction, default=True, help="also run in place, where an operation can")
    add("--out-of-place", action=BooleanOptionalAction, default=True,
        help="also run out of place; operations that have no other form always are")  # fmt: skip
    add("--buffers", nargs="+", choices=BUFFERS, default=[SAME],
        help="same: untouched between calls; fresh: each rank writes its input before each call; new: it allocates "
        "both buffers, too (default: same)")  # fmt: skip
    add("--tensor-model-parallel-size", type=int, valid=AT_LEAST_ONE, default=1,
        help="ranks of a tensor group; the data groups follow from it")  # fmt: skip
    add("--group", choices=GROUPS, default="world",
        help="world, tensor or data: all groups of this kind run at the same time")  # fmt: skip
    add("--confidence", type=float, valid=OPEN_FRACTION, default=0.05,
        help="measure until the 95%% interval of the median is +-this share")  # fmt: skip
    add("--time-limit", type=float, valid=SECONDS, default=0.5,
        help="seconds for one transport at one size and place, converged or not")  # fmt: skip
    add("--warmup", type=int, valid=COUNT, default=5, help="calls before those that count")
    add("--overlap", action="store_true",
        help="for the transport stream: the share that is hidden behind as much compute")  # fmt: skip
    add("--over", metavar="NAME",
        help="also the time of each transport over that of this one, in the same state of the machine")  # fmt: skip
    add_files(
        options,
        json="write every number, as bench.study --only fit reads it",
        csv="write a line for each row of the tables",
        plot="draw time and bus bandwidth over the size: .png, .svg or .pdf",
    )
    return options
