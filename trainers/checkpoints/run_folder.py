"""The folder of ``--save``: a new run neither mixes with an older run there nor replaces it without being asked."""

from __future__ import annotations

import json
from pathlib import Path

from commengine import UsageError
from trainers.settings.commands import TrainSettings
from trainers.settings.saving import of_other_program

from . import checkpoint, disk, folder_lock, pointer

#: files that a run leaves in its folder beside checkpoints
FILES = (
    "latest", "latest.tmp", "best", "best.tmp", "metrics.jsonl", "metrics.jsonl.tmp",
    "report.json", "report.json.tmp", "report.txt", "loss.png", "experts.png",
)  # fmt: skip
#: the report: the first one is written last and removed first, so that where it is, the others are of the same steps
REPORT = ("report.json", "report.txt", "loss.png", "experts.png")
#: the folder in which a converted run keeps config.json and the tokenizer of the model that it is from
OF_OTHERS = "hf_files"
#: the folder for batches of steps whose loss was not finite, or jumped
BATCHES = "batches"


def checkpoint_to_load(config: TrainSettings) -> Path | None:
    """The checkpoint that ``--load`` names. None without ``--load``, or if it is ``--save`` and holds none yet.

    Also None for a model of another program, such as ``hf:FOLDER``, with whose weights a new run starts.

    A command that went back to ``D/iter_N``, which ``--keep-last`` has removed since, gets its newest checkpoint
    (`history.begin` decides whether it is that very command).

    A batch job that may be started again gives both options the same folder, and so starts anew the first time and goes
    on later. Raises UsageError if any other folder holds no checkpoint.
    """
    if config.load is None or of_other_program(config.load):
        return None
    folder = Path(config.load)
    found = checkpoint.find(folder) or own_checkpoint(config)
    if found is None and not _same(config.load, config.save):
        more = ". To start a new run if there is no checkpoint yet, give --save the same folder"
        raise checkpoint.missing(folder, more)
    return found


def own_checkpoint(config: TrainSettings) -> Path | None:
    """The newest checkpoint in ``--save``, if a command like this one, which goes back there, has saved it. Else None.

    Like this one: with the same ``--load`` and ``--overwrite``.
    """
    if config.load is None or config.save is None or not config.overwrite:
        return None
    load = Path(config.load)
    named = pointer.iteration_of(load)
    if named is None or not _same(str(load.absolute().parent), config.save):
        return None
    try:
        newest = pointer.latest(Path(config.save))
        if newest is None or (pointer.iteration_of(newest) or 0) <= named:
            return None
        saved = checkpoint.saved_state(newest, verify=False).settings
    except UsageError:  # damaged, and perhaps the reason for going back
        return None
    return newest if saved.get("load") == config.load and saved.get("overwrite") is True else None


def require_free(config: TrainSettings) -> None:
    """Raise UsageError if ``--load`` names no checkpoint or ``--save`` holds another run. It changes no file.

    Also if ``--save`` and a model of another program that ``--load`` names are not apart.
    """
    found = checkpoint_to_load(config)
    if config.save is None:
        return
    folder = Path(config.save)
    for origin in (config.load, getattr(config, "pretrained_checkpoint", None)):  # only finetune has the second
        if of_other_program(origin):
            require_apart(folder, str(origin))
        elif origin is not None and origin != config.load and is_in_save(config, checkpoint.find(Path(origin))):
            raise UsageError(f"--save {folder}: holds the run that this one starts from; give another --save")
    if config.overwrite or _same(config.load, config.save):  # there, files newer than the pointer are left from a crash
        return
    if is_in_save(config, found):
        assert found is not None
        steps = pointer.iteration_of(found) or 0
        if newer := [path.name for path in pointer.history(folder) if (pointer.iteration_of(path) or 0) > steps]:
            raise UsageError(
                f"--load {config.load}: {folder} holds newer checkpoints ({', '.join(newer[:3])}), which the run would "
                "replace; give another --save, or --overwrite"
            )
        return
    if there := [path.name for path in left(folder)]:
        names = ", ".join(there[:3]) + (", ..." if len(there) > 3 else "")
        raise UsageError(
            f"--save {folder}: holds a run already ({names}); continue it with --load {folder}, give another --save, "
            "or replace it by a new run with --overwrite"
        )


def new_run(load: str) -> str:
    """The line that says what a run with ``--load`` starts from, where there is no checkpoint to go on from."""
    if of_other_program(load):
        return f"starting a new run with the weights of {load}"
    return f"starting a new run: no checkpoint in {load}"


def is_in_save(config: TrainSettings, found: Path | None) -> bool:
    """Whether ``found`` is a checkpoint of the run in ``--save``. One that was given another name is none."""
    if found is None or config.save is None or pointer.iteration_of(found) is None:
        return False
    return _same(str(found.absolute().parent), config.save)


def remove(folder: Path) -> None:
    """Remove the files of the run in ``folder``. A kill in it leaves no checkpoint that anybody reads."""
    pointer.clear(folder)
    for path in reversed(left(folder)):  # the pointer last
        disk.remove(path)


def left(folder: Path) -> list[Path]:
    """The files and folders of a run in ``folder``."""
    # A run that ended before its first row leaves an empty file, which is nothing to lose.
    files = [path for name in FILES if (path := folder / name).is_file() and path.stat().st_size]
    folders = [path for name in (BATCHES, OF_OTHERS) if (path := folder / name).is_dir()]
    return files + pointer.folders(folder) + folders


def is_of_run(path: Path) -> bool:
    """Whether a run lies in the parent folder, and ``path`` has a name that one of its files or folders has or gets."""
    ours = path.name in (*FILES, BATCHES, OF_OTHERS, folder_lock.NAME) or pointer.is_name(path.name)
    return ours and bool(left(path.parent))


def require_apart(folder: Path, load: str) -> None:
    """Raise UsageError if the run's ``folder`` is, holds, or lies in the model of another program.

    load: names the model, such as ``hf:FOLDER``. Megatron-LM's checkpoints have the names of ours, so that
    ``--overwrite`` would remove them.
    """
    run, other = folder.resolve(), Path(load.partition(":")[2]).resolve()
    how = "is" if run == other else "holds" if run in other.parents else "lies in" if other in run.parents else None
    if how is not None:
        raise UsageError(f"--save {folder}: {how} the model {load}; give a folder that is apart from it")


def reported(folder: Path) -> int | None:
    """The steps of the run whose complete report ``folder`` holds, or None. Raises OSError."""
    try:
        written = json.loads((folder / REPORT[0]).read_bytes())
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    steps = written.get("iteration") if isinstance(written, dict) else None
    return steps if type(steps) is int else None


def _same(one: str | None, other: str | None) -> bool:
    return one is not None and other is not None and Path(one).resolve() == Path(other).resolve()
