"""Compare two runs bit by bit: ``python -m trainers.compare RUN RUN`` names the first step and tensor that differ.

RUN is the folder of ``--save``. The runs must have trained with ``--deterministic`` or ``--log-digests``. The exit
status is 0 if all that both runs have is equal, 1 if something differs, and 2 after an error, or if the runs have
nothing in common. Steps that one run alone has are named, and not compared.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from commengine import UsageError
from commengine.errors import one_line
from trainers.checkpoints.checkpoint import saved_state
from trainers.options import OneLineParser, OptionError

from .comparison.steps import compare_steps
from .comparison.tensors import common_checkpoint, differences, last_checkpoints

#: tensors that are named, of those that differ
NAMED = 5


def compare(one: Path, other: Path) -> bool:
    """Print how two runs' folders differ. Returns whether they do.

    Raises UsageError where a file cannot be read, and where the runs have neither a step nor a checkpoint in common.
    """
    steps = compare_steps(one, other)
    pair = common_checkpoint(one, other, steps.different)
    if pair is None and not steps.compared:
        raise UsageError(f"{one} and {other}: {'; '.join(steps.lines())}; nor is a checkpoint of the same step")
    print(*steps.lines(), sep="\n")
    saved = pair or last_checkpoints(one, other)
    for line in [] if saved is None else _settings(*saved):
        print(line)
    if pair is None:
        print("no checkpoint is of the same step in both runs, so no tensors are compared")
        return steps.different is not None
    found = list(differences(*pair))
    where = f"checkpoint {pair[0].name}"
    if not found:
        print(f"{where}: all parameters, masters and moments have the same bits")
        return steps.different is not None
    print(f"{where}: {len(found)} tensors differ; the first {min(NAMED, len(found))}, in the order of the model:")
    for difference in found[:NAMED]:
        print(f"  {difference.name}: {difference.text()}")
    return True


def _settings(one: Path, other: Path) -> list[str]:
    """The settings in which two checkpoints' runs differ, but for names of folders."""
    first, second = (saved_state(path, verify=False).settings for path in (one, other))
    names = [name for name in first if name in second and first[name] != second[name]]
    told = [f"{name} {first[name]} and {second[name]}" for name in names if name not in ("save", "load")]
    return ["settings that differ: " + ", ".join(told)] if told else []


def parser() -> OneLineParser:
    """The command line."""
    made = OneLineParser("python -m trainers.compare", description=(__doc__ or "").partition("\n\n")[2])
    made.add_argument("run", nargs=2, type=Path, metavar="RUN", help="the --save folder of a run")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Compare two runs; return the exit status."""
    try:
        return int(compare(*parser().parse_args(argv).run))
    except (OptionError, UsageError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
