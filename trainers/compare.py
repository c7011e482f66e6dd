"""Compare two runs bit by bit: ``python -m trainers.compare RUN RUN`` names the first step and tensor that differ.

RUN is the folder of ``--save``. Runs that have trained with ``--deterministic`` or ``--log-digests`` are compared step
by step, and all runs by their checkpoints. The exit status is 0 if all that both runs have is equal, 1 if something
differs, also the models, and 2 after an error, or if the runs have nothing in common. Steps that one run alone has are
named, and not compared.
"""

from __future__ import annotations

import sys

from .comparison.options import compare_parser

if __name__ == "__main__":  # before the other imports, which take seconds
    from .settings.command import print_help

    print_help(lambda: compare_parser(__doc__))

from collections.abc import Sequence
from pathlib import Path

from commengine import UsageError
from commengine.errors import one_line
from commengine.options.parser import OneLineParser
from commengine.options.ranges import OptionError
from trainers.checkpoints import checkpoint

from .comparison.steps import compare_steps, unlike_models, unlike_settings
from .comparison.tensors import common_checkpoint, differences, last_checkpoints

#: tensors that are named, of those that differ
NAMED = 5


def compare(one: Path, other: Path) -> bool:
    """Print how two runs' folders differ. Returns whether they do.

    Raises UsageError where a file cannot be read, and where the runs have neither a step nor a checkpoint in common.
    """
    last = last_checkpoints(one, other)
    if last is not None and (models := unlike_models(*last)):
        print(f"the models differ: {models}; nothing else is compared")
        _print_settings(one, other)
        return True
    steps, lacking = None, ""
    try:
        steps = compare_steps(one, other)
    except UsageError as error:  # a run's digests cannot be read
        lacking = str(error)
    pair = common_checkpoint(one, other, None if steps is None else steps.different)
    if pair is None and (steps is None or not steps.compared):
        why = lacking if steps is None else f"{one} and {other}: {'; '.join(steps.lines())}"
        raise UsageError(f"{why}; nor is a checkpoint of the same step in both runs: nothing is compared")
    different = steps is not None and steps.different is not None
    print(*([f"no steps are compared: {lacking}"] if steps is None else steps.lines()), sep="\n")
    _print_settings(one, other)
    if pair is None:
        print("no checkpoint is of the same step in both runs, so no tensors are compared")
        return different
    found = list(differences(*pair))
    where = f"checkpoint {pair[0].name}"
    if not found:
        print(f"{where}: all parameters, masters and moments have the same bits")
        return different
    some = f"; the first {NAMED}" if len(found) > NAMED else ""
    print(
        f"{where}: {len(found)} tensor{'s differ' if len(found) > 1 else ' differs'}{some}, in the order of the model:"
    )
    for difference in found[:NAMED]:
        print(f"  {difference}")
    for path in () if different else pair:  # one reason for tensors that the steps do not show
        try:
            checkpoint.compare(path)
        except UsageError as error:
            print(f"{path} changed after it was saved: {error.__cause__ or error}")
    return True


def _print_settings(one: Path, other: Path) -> None:
    """Name the settings in which two runs differ."""
    if told := unlike_settings(one, other):
        print("settings that differ: " + ", ".join(told))


def parser() -> OneLineParser:
    """The command line."""
    return compare_parser(__doc__)


def main(argv: Sequence[str] | None = None) -> int:
    """Compare two runs; return the exit status."""
    try:
        return int(compare(*parser().parse_args(argv).run))
    except (OptionError, UsageError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
