"""The folder of ``--save``: a new run neither mixes with an older run there nor replaces it without being asked."""

from __future__ import annotations

from pathlib import Path

from commengine import UsageError
from trainers.config import TrainConfig, of_other_program

from . import checkpoint, folder_lock, pointer

#: Files that a run leaves in its folder beside checkpoints. TensorBoard's files are kept, because TensorBoard shows the
#: new run's rows in place of theirs.
FILES = (
    "latest", "latest.tmp", "best", "best.tmp",
    "metrics.jsonl", "metrics.jsonl.tmp", "report.json", "report.json.tmp", "report.txt",
    "loss.png",
)  # fmt: skip
#: the folder in which a converted run keeps config.json and the tokenizer of the model that it is from
OF_OTHERS = "hf_files"
#: the folder for batches of steps whose loss was not finite, or jumped
BATCHES = "batches"


def checkpoint_to_load(config: TrainConfig) -> Path | None:
    """The checkpoint that ``--load`` names. None without ``--load``, or if it is ``--save`` and holds none yet.

    Also None for a model of another program, such as ``hf:FOLDER``, with whose weights a new run starts.

    A batch job that may be started again gives both options the same folder, and so starts anew the first time and goes
    on later. Raises UsageError if any other folder holds no checkpoint.
    """
    if config.load is None or of_other_program(config.load):
        return None
    folder = Path(config.load)
    found = checkpoint.find(folder)
    if found is None and not _same(config.load, config.save):
        more = ". To start a new run if there is no checkpoint yet, give --save the same folder"
        raise checkpoint.missing(folder, more)
    return found


def require_free(config: TrainConfig) -> None:
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
        elif origin is not None and origin != config.load and _goes_on(config, checkpoint.find(Path(origin))):
            raise UsageError(f"--save {folder}: holds the run that this one starts from; give another --save")
    if config.overwrite or _same(config.load, config.save):  # there, files newer than the pointer are left from a crash
        return
    if _goes_on(config, found):
        assert found is not None
        if newer := [path.name for path in pointer.complete(folder) if path.name > found.name]:
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


def goes_on(config: TrainConfig) -> bool:
    """Whether the run continues one in ``--save``. Raises UsageError as `checkpoint_to_load` does."""
    return config.load is not None and _goes_on(config, checkpoint_to_load(config))


def clear(config: TrainConfig) -> None:
    """With ``--overwrite``, remove the files that an older run left in ``--save``, unless this run goes on from it."""
    if config.save is None or not config.overwrite or _goes_on(config, checkpoint_to_load(config)):
        return
    remove(Path(config.save))


def remove(folder: Path) -> None:
    """Remove the files of the run in ``folder``."""
    for path in left(folder):  # the pointer first, so that it never names a missing folder
        if path.is_dir() and not path.is_symlink():
            pointer.discard(path)
        else:
            path.unlink()


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


def _goes_on(config: TrainConfig, found: Path | None) -> bool:
    """Whether ``found`` is a checkpoint of the run in ``--save``."""
    return found is not None and config.save is not None and _same(str(found.absolute().parent), config.save)


def _same(one: str | None, other: str | None) -> bool:
    return one is not None and other is not None and Path(one).resolve() == Path(other).resolve()
