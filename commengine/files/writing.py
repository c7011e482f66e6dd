"""The files that a command writes: whether they can be written, before anything else is done."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

#: the ends of the names of pictures
PLOTS = (".png", ".svg", ".pdf")


def check_writable(
    plot: str | Path | None = None, *, read: Sequence[str | Path | None] = (), **files: str | Path | None
) -> None:
    """Check, before a measurement, that its files can be written, and are different files.

    plot: a picture. files: others, by option. read: the files that the command reads, which it must not replace.

    Raises ValueError that names the option and the file.
    """
    for name, file in {**files, "plot": plot}.items():
        if file is None:
            continue
        path, folder = Path(file), Path(file).parent
        if not folder.is_dir():
            raise ValueError(f"{_flag(name)} {file}: there is no folder {folder}")
        try:
            path.stat()
        except FileNotFoundError:
            pass
        except OSError as error:
            raise ValueError(f"{_flag(name)} {file}: {error.strerror}") from error
        if path.is_dir():
            raise ValueError(f"{_flag(name)} {file}: is a folder, not a file")
        if path.exists() and not (path.is_file() or path.is_char_device()):  # a pipe would wait for a reader
            raise ValueError(f"{_flag(name)} {file}: is no regular file")
        if not os.access(path if path.exists() else folder, os.W_OK):
            raise ValueError(f"{_flag(name)} {file}: cannot be written")
    if plot is not None:
        check_picture("plot", plot)
    require_different({**files, "plot": plot}, read)


def require_different(files: Mapping[str, str | Path | None], read: Sequence[str | Path | None] = ()) -> None:
    """Raise ValueError if two options name one file, of which one text would be lost, or a file that is read.

    files: by option. A device, such as /dev/stdout, may be named twice.
    """
    inputs = {os.path.realpath(file) for file in read if file is not None}
    named: dict[str, str] = {}
    for name, file in files.items():
        if file is None or stat.S_ISCHR(_mode(file)):
            continue
        place = os.path.realpath(file)
        if place in inputs:
            raise ValueError(f"{_flag(name)} {file}: is a file that this command reads; give another one")
        if place in named:
            raise ValueError(
                f"{_flag(name)} {file}: is the file of {_flag(named[place])}, too; give each one of its own"
            )
        named[place] = name


def _mode(file: str | Path) -> int:
    try:
        return Path(file).stat().st_mode
    except (OSError, ValueError):  # there is none yet, or it is no name of a file, which others say
        return 0


def require_folder(option: str, folder: Path) -> None:
    """Raise ValueError, beginning with the option, unless files can be written into ``folder``."""
    if not folder.exists():
        raise ValueError(f"{option}: {folder}: there is no such folder; make it first")
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"{option}: {folder}: not a folder that can be written to")


def check_picture(name: str, file: str | Path) -> None:
    """Raise ValueError unless the name of a picture ends in one of PLOTS. name: the option's attribute."""
    if Path(file).suffix not in PLOTS:
        raise ValueError(f"{_flag(name)} {file}: the name ends in {', '.join(PLOTS[:-1])} or {PLOTS[-1]}")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
