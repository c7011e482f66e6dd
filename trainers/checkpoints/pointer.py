"""``latest``: the name of a folder's newest checkpoint; ``best``: that of the best one, in a run that keeps it.

Also: which checkpoints a folder holds, and which of them it keeps.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from commengine import UsageError
from commengine.files import checksums

from . import disk

LATEST = "latest"
BEST = "best"

#: in place of a name in ``latest``: the folder's run is being removed, and none of its checkpoints counts any more
NONE = "none"

#: the last file that is written into a checkpoint's folder, before it gets its name
STATE = "state.json"

#: a checkpoint, one that is not complete, and one in whose place a new one comes
_KINDS = _CHECKPOINT, _PARTIAL, _ASIDE = [re.compile(r"iter_\d{7,}" + suffix) for suffix in ("", r"\.tmp", r"\.old")]


def name_of(iteration: int) -> str:
    """The name of the checkpoint after ``iteration`` steps."""
    return f"iter_{iteration:07d}"


def iteration_of(path: Path) -> int | None:
    """The steps in a complete checkpoint's name; None if it has another name."""
    named = _CHECKPOINT.fullmatch(path.name) or _ASIDE.fullmatch(path.name)
    return _iteration(path) if named else None


def is_name(name: str) -> bool:
    """Whether a checkpoint, complete or not, may have this name."""
    return any(kind.fullmatch(name) for kind in _KINDS)


def complete(folder: Path) -> list[Path]:
    """The checkpoints in ``folder``, by iteration. A folder has this name only when all that is in it is on disk.

    One whose replacement was killed between two renames has another name, which `name_of` does not give.
    """
    found = [path for path in _listed(folder) if (path / STATE).is_file()]
    whole = [path for path in found if _CHECKPOINT.fullmatch(path.name)]
    aside = [path for path in found if _ASIDE.fullmatch(path.name) and path.with_suffix("") not in whole]
    return sorted([*whole, *aside], key=_iteration)


def folders(folder: Path) -> list[Path]:
    """All folders of checkpoints in ``folder``: complete ones, and those that killed runs left."""
    return [path for path in _listed(folder) if is_name(path.name)]


def names(folder: Path, most: int = 3) -> str:
    """The names of the newest complete checkpoints of ``folder``, for a message; empty if there is none."""
    return ", ".join(path.stem for path in complete(folder)[-most:])


def latest(folder: Path) -> Path | None:
    """The newest checkpoint of ``folder``, or None. Raises UsageError if the pointer is damaged or names none.

    Without a pointer it is the one of the highest iteration: a job was killed before it had written its first pointer.
    """
    if is_cleared(folder):
        return None
    return _named(folder, LATEST) or max(complete(folder), key=_iteration, default=None)


def is_cleared(folder: Path) -> bool:
    """Whether the removal of the run in ``folder`` has begun (`clear`)."""
    try:
        return (folder / LATEST).is_file() and (folder / LATEST).read_bytes() == _pointing_to(NONE)
    except OSError:  # `latest` says so
        return False


def clear(folder: Path) -> None:
    """Remove all checkpoints. From the first change on the folder has none. Raises OSError.

    A pointer that says so stays, until the caller has removed what else is of the run.
    """
    found = folders(folder)
    if found:
        point_to(folder, NONE)
    disk.remove(folder / BEST)
    for path in found:
        discard(path)


def best(folder: Path) -> Path | None:
    """The best checkpoint of ``folder``; None if its run keeps none. Raises UsageError as `latest` does.

    One that is newer than the newest is none: the run has gone back behind it.
    """
    found, newest = _named(folder, BEST), latest(folder)
    return found if found and newest and _iteration(found) <= _iteration(newest) else None


def history(folder: Path) -> list[Path]:
    """The `complete` checkpoints of ``folder`` up to the one that its pointer names, if it names one."""
    newest = -1 if is_cleared(folder) else _points_to(folder, LATEST)
    return [path for path in complete(folder) if newest is None or _iteration(path) <= newest]


def _points_to(folder: Path, file: str) -> int | None:
    """The iteration of the checkpoint that a pointer names; None without this pointer, or if it is damaged."""
    try:
        found = _named(folder, file)
    except UsageError:
        return None
    return None if found is None else _iteration(found)


def _named(folder: Path, file: str) -> Path | None:
    """The checkpoint that a pointer names; None without this pointer."""
    pointer = folder / file
    try:
        if pointer.exists() and not pointer.is_file():  # a pipe would wait for a writer
            raise UsageError(f"--load {folder}: {pointer}: not a file")
        raw = pointer.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UsageError(f"--load {folder}: {pointer}: {error.strerror}") from error
    line = raw.partition(b"\n")[0]
    name = line.decode(errors="replace")  # an older version wrote the name alone
    if not _CHECKPOINT.fullmatch(name) or raw not in (line + b"\n", _pointing_to(name)):
        raise UsageError(
            f"--load {folder}: {pointer} is damaged: not the name of a checkpoint and its checksum. Give a checkpoint "
            f"to --load ({_some(folder)}), or remove the file to take the newest one"
        )
    found = folder / name
    aside = folder / f"{name}.old"  # its name while a new checkpoint takes its place
    if not found.exists() and (aside / STATE).is_file():
        return aside
    if not (found / STATE).is_file():
        raise UsageError(
            f"--load {folder}: {pointer} names {name}, which is not a complete checkpoint; valid: {_some(folder)}"
        )
    return found


def point_to(folder: Path, name: str, file: str = LATEST) -> None:
    """Make ``name`` the newest checkpoint of ``folder``, or with ``file=BEST`` the best one. Raises OSError."""
    disk.rewrite(folder / file, _pointing_to(name))


def _pointing_to(name: str) -> bytes:
    line = f"{name}\n".encode()
    return line + f"{checksums.digest(line)}\n".encode()


def make_room(folder: Path) -> None:
    """Remove what killed runs left in ``folder``: checkpoints that are not complete, and replaced ones.

    A checkpoint whose replacement was killed gets its name back.
    """
    for path in _listed(folder):
        if _ASIDE.fullmatch(path.name) and not path.with_suffix("").exists():
            disk.replace(path, path.with_suffix(""))
        elif _ASIDE.fullmatch(path.name) or _PARTIAL.fullmatch(path.name):
            disk.remove_if_possible(path)


def keep(folder: Path, last: int, every: int | None) -> None:
    """Remove all checkpoints up to the newest one but the ``last`` newest and the multiples of ``every`` steps.

    The best one stays, too. A checkpoint that cannot be removed stays.
    """
    newest, spared = latest(folder), best(folder)
    older = [] if newest is None else [path for path in complete(folder) if _iteration(path) <= _iteration(newest)]
    for path in older[: -max(last, 1)]:
        if path != spared and (every is None or _iteration(path) % every):
            with contextlib.suppress(OSError):
                discard(path)


def cut(folder: Path, iteration: int) -> list[str]:
    """Make the complete checkpoint of ``iteration`` the newest one, and then remove all that are newer: their names.

    A kill at any moment leaves the pointer, and what is newer than it is part of no history. Raises OSError.
    """
    if _points_to(folder, LATEST) != iteration:
        point_to(folder, name_of(iteration))
    if (best := _points_to(folder, BEST)) is None or best > iteration:
        disk.remove(folder / BEST)
    newer = [path for path in folders(folder) if _iteration(path) > iteration]
    for path in newer:
        discard(path)
    make_room(folder)
    return [path.name for path in newer if path.suffix != ".tmp"]


def discard(path: Path) -> None:
    """Remove a checkpoint. It loses its name first, so a kill leaves nothing that looks complete. Raises OSError."""
    partial = path.with_name(f"{path.stem}.tmp")
    if path != partial:
        disk.remove(partial)
        disk.replace(path, partial)
    disk.remove(partial)


def _iteration(path: Path) -> int:
    return int(path.stem.removeprefix("iter_"))


def _listed(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _some(folder: Path) -> str:
    return names(folder) or f"there is none in {folder}"
