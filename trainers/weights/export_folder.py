"""The folder of an export: which one it may replace, and the folder beside it in which a new one is written."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from commengine import Communicator, UsageError
from commengine.rank_zero import on_rank_zero
from trainers.checkpoints import disk, folder_lock, run_folder

from .configurations import CONFIG
from .tensor_files import SAFETENSORS
from .tokenizer_files import COPIED

#: the names, in a `working_folder`, of the new export and of the one that it replaces
NEW, OLD = "new", "old"


def require_replaceable(option: str, folder: Path, *, overwrite: bool) -> None:
    """Raise UsageError unless an export may be written to ``folder``. On one rank; it changes no file.

    A folder with files is replaced with ``overwrite`` alone, and only if an export wrote all of them: a run's folder,
    a checkpoint and a user's other files are never removed. option: the one that names ``folder``.
    """
    place, another = folder.resolve(), f"give {option} a new folder"
    if place == Path.cwd():
        raise UsageError(f"{option} {folder}: is the working directory, which cannot be replaced; {another}")
    if run_folder.is_of_run(place):
        raise UsageError(f"{option} {folder}: has the name of a part of the run in {place.parent}; {another}")
    if not place.exists():
        return
    if not place.is_dir():
        raise UsageError(f"{option} {folder}: is there already, and is no folder; {another}")
    there = {path.name: path.is_file() and not path.is_symlink() for path in place.iterdir()}
    if not there:
        return
    if foreign := sorted(
        name for name, file in there.items() if not file or name not in (CONFIG, SAFETENSORS, *COPIED)
    ):
        names = ", ".join(foreign[:3])
        raise UsageError(f"{option} {folder}: is there already, with files that no export writes ({names}); {another}")
    if missing := [name for name in (CONFIG, SAFETENSORS) if name not in there]:
        raise UsageError(f"{option} {folder}: is there already, and is no export (without {missing[0]}); {another}")
    if not overwrite:
        raise UsageError(f"{option} {folder}: is there already; {another}, or --overwrite")


def remove_leftovers(folder: Path) -> None:
    """Remove what a killed job has left beside ``folder``, which no other job writes now. On one rank.

    An export that was about to be replaced gets its name back. Raises OSError.
    """
    _give_back(folder)
    disk.remove_if_possible(_beside(folder))


def _give_back(folder: Path) -> None:
    """Give an export its name back, which it lost to a new one that never came. Raises OSError."""
    old = _beside(folder) / OLD
    if old.exists() and not folder.exists():
        disk.replace(old, folder)


def _beside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.commengine-tmp")  # no user gives a folder this name


@contextlib.contextmanager
def working_folder(world: Communicator, folder: Path, told: Callable[[Callable[[], Any]], None]) -> Iterator[Path]:
    """A folder beside ``folder`` that one job at a time has, with an empty folder `NEW` in it, for a ``with`` block.

    `NEW` and `OLD` in it are removed at the end, also those that a killed job left, but `OLD` gets the name ``folder``
    if nothing has it. told: calls its argument, and raises UsageError in place of OSError. Collective over ``world``.
    Raises UsageError, on all ranks.
    """
    own = _beside(folder)
    on_rank_zero(world, lambda: told(lambda: own.mkdir(parents=True, exist_ok=True)))
    lock: folder_lock.FolderLock | None = None

    def leave() -> None:
        if lock is not None:
            disk.remove_if_possible(own / NEW)  # first, because it may be what fills the disk
            with contextlib.suppress(OSError):
                _give_back(folder)
                disk.remove(own / OLD)
            lock.release()
        with contextlib.suppress(OSError):  # another job has it now
            own.rmdir()

    def clear() -> None:
        _give_back(folder)
        disk.remove(own / OLD)
        disk.make_empty(own / NEW)

    try:
        lock = folder_lock.hold(world, own, option="--to hf")
        on_rank_zero(world, lambda: told(clear))
        yield own
    except BaseException:
        if world.rank == 0:  # the other ranks may not come any more
            leave()
        raise
    on_rank_zero(world, leave)
