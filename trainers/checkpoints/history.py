"""Where a run begins in its folder, and that nothing beyond it stays: a folder holds one history.

The rule has one place, and holds under the folder's lock. `begin` decides once from which checkpoint a run goes on. Of
a run that goes on after N steps in ``--save``, `settle` makes N the newest checkpoint and then removes all that is
newer: checkpoints, the pointer to the best one, report and pictures, rows, batches, TensorBoard's events. A start that
was killed in between has moved the pointer, or has changed nothing. So every start may settle, and the next one ends
what a killed one began.
"""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from commengine import UsageError
from trainers.settings.commands import TrainSettings

from . import checkpoint, disk, event_files, pointer, run_folder

#: the file for batches of a step (`trainers.checks.in_run`)
_BATCH = re.compile(r"step_(\d+)-replica_\d+\.safetensors")


@dataclass(frozen=True)
class Beginning:
    """What a run begins with, the same on all ranks.

    found: the checkpoint, or None for a new run. goes_on: it is one of the run in ``--save``. repeats: the iteration to
    which this very command went back before it saved ``found``, or None.
    """

    found: str | None
    goes_on: bool
    repeats: int | None = None


def begin(settings: TrainSettings) -> Beginning:
    """Decide from which checkpoint a run goes on. It changes no file. On rank 0, which holds the folder's lock.

    settings: complete, as a checkpoint stores them. Raises UsageError as `run_folder.checkpoint_to_load`.

    A command that goes back and is repeated, as a requeued job repeats it, goes on from the newest checkpoint if that
    is its own, because going back again would lose steps that come out the same.
    """
    found = run_folder.checkpoint_to_load(settings)
    if found is None or not run_folder.is_in_save(settings, found):
        return Beginning(None if found is None else str(found), False)
    if (own := run_folder.own_checkpoint(settings)) is None:
        return Beginning(str(found), True)
    named = pointer.iteration_of(Path(str(settings.load)))
    if _wrote(settings, own):
        return Beginning(str(own), True, named)
    if found == own:  # in place of the one that --load names
        raise checkpoint.missing(Path(str(settings.load)))
    return Beginning(str(found), True)


def _wrote(settings: TrainSettings, own: Path) -> bool:
    """Whether the checkpoint was written with exactly these settings. Raises UsageError if it cannot be read.

    Nobody knows then whether the checkpoints before it are this command's own, and going back would remove them.
    """
    try:
        saved = checkpoint.saved_state(own, verify=settings.verify_checkpoints).settings
    except UsageError as error:
        raise UsageError(f"{error}; to go back to {settings.load} all the same, remove {own} first") from error
    defaults = {item.name: item.default for item in fields(settings) if item.default is not MISSING}
    ours = json.loads(json.dumps(asdict(settings)))
    return all(ours.get(name) == value for name, value in json.loads(json.dumps(defaults | dict(saved))).items())


def settle(settings: TrainSettings, beginning: Beginning, iteration: int) -> str | None:
    """Remove from ``--save`` what the run replaces, and what killed runs left: a line about it, or None.

    iteration: of the checkpoint. Before the first step, on rank 0, which holds the folder's lock. Raises OSError.
    """
    if settings.save is None:
        return None
    folder = Path(settings.save)
    if not beginning.goes_on:
        if settings.overwrite or pointer.is_cleared(folder):
            run_folder.remove(folder)
        pointer.make_room(folder)
        _cut_records(folder, 0)
        return None
    newer = pointer.cut(folder, iteration)
    _cut_records(folder, iteration)
    if beginning.repeats is not None:
        return (
            f"the checkpoint of iteration {iteration} is of this same command, so it does not go back to "
            f"{beginning.repeats} again; to do so, remove {folder}/{pointer.name_of(iteration)} first"
        )
    if not newer:
        return None
    names = ", ".join(newer[:3]) + (", ..." if len(newer) > 3 else "")
    return f"{folder} is back at iteration {iteration}: removed {names} and what else was newer"


def _cut_records(folder: Path, iteration: int) -> None:
    """Remove what a run writes of later steps beside its checkpoints, and files that a kill left half written."""
    if (reported := run_folder.reported(folder)) is None or reported > iteration:
        for name in run_folder.REPORT:
            disk.remove(folder / name)
    for name in run_folder.FILES:
        if name.endswith(".tmp"):
            disk.remove(folder / name)
    for path in (folder / run_folder.BATCHES).glob("step_*"):
        if (named := _BATCH.fullmatch(path.name)) and int(named[1]) > iteration:
            disk.remove(path)
    _cut_rows(folder / "metrics.jsonl", iteration)
    event_files.cut(folder / "tensorboard", iteration)


def _cut_rows(path: Path, iteration: int) -> None:
    """Remove the rows of later iterations. Lines that are no rows stay for the reader, which names them."""
    with contextlib.suppress(FileNotFoundError):
        lines = path.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if not _is_later(line, iteration)]
        if not kept:
            disk.remove(path)
        elif len(kept) < len(lines):
            disk.rewrite(path, b"".join(kept))


def _is_later(line: bytes, iteration: int) -> bool:
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(row, dict) and type(row.get("iteration")) is int and row["iteration"] > iteration
