"""A disk of a few kilobytes, to fill it: a tmpfs. Needs root, and a container that may mount."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[None]:
    """Mount an empty disk at ``folder`` for the block. Raises OSError where this user may not."""
    folder.mkdir(parents=True, exist_ok=True)
    _mount("-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder))
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True, capture_output=True)


def resize(folder: Path, kilobytes: int) -> None:
    """Give a mounted `small_disk` another size; what is on it stays."""
    _mount("-o", f"remount,size={kilobytes}k", str(folder))


def make_read_only(folder: Path) -> None:
    """Let a mounted `small_disk` refuse every change, as a file system does after an error of its device."""
    _mount("-o", "remount,ro", str(folder))


def why_not() -> str:
    """Why no disk can be mounted here; empty if it can."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        try:
            with small_disk(Path(folder), 64):
                return ""
        except OSError as error:
            return str(error)


def _mount(*words: str) -> None:
    done = subprocess.run(["mount", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"mount: {done.stderr.strip()}")
