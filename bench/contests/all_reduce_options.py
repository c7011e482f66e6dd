"""The options of the two all-reduce programs that bench.gpu compares."""

from __future__ import annotations

from bench.command.parser import ProgramParser, new_program_parser
from trainers.options import COUNT, between

#: how the engine runs a call: alone, in a trace, with a timeout, or on a stream of its own
WAYS = ("plain", "traced", "watched", "stream")


def parser(program: str, description: str | None) -> ProgramParser:
    """A parser of the size of the all-reduce and of the number of calls."""
    options = new_program_parser(program, description)
    options.add_argument(
        "--bytes",
        type=int,
        valid=between(4, 2**40),
        default=1 << 20,
        help="size of the fp32 tensor (default: %(default)s)",
    )
    options.add_argument("--calls", type=int, valid=COUNT, default=100, help="calls in a step (default: %(default)s)")
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="(default: %(default)s)")
    return options
