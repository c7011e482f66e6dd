"""What earlier runs of tests/run over the same files have passed: a run that was stopped goes on where it stopped."""

import hashlib
import subprocess
from pathlib import Path

import pytest

from tests.support.running import tally

ROOT = Path(__file__).resolve().parents[3]


def tree() -> str:
    """What names the files as they are now, if git knows them; otherwise nothing that comes again."""
    words = (["rev-parse", "HEAD"], ["diff", "HEAD"], ["ls-files", "-o", "--exclude-standard"])
    git = ["git", "-c", "safe.directory=*"]
    try:
        said = [subprocess.run([*git, *one], cwd=ROOT, capture_output=True, check=True).stdout for one in words]
    except (OSError, subprocess.CalledProcessError):
        return ""
    return hashlib.sha256(b"\0".join(said)).hexdigest()


def prepare(folder: Path) -> None:
    """Leave in the tallies of ``folder`` the tests that count now: those that did not fail, of these very files."""
    same, now = folder / "tree", tree()
    known = same.exists() and now and same.read_text() == now
    for path in folder.glob("tally-*"):
        found = [line for line in tally.lines(path) if line[0] in ("passed", "skipped")] if known else []
        path.write_text("".join(f"{word} {seconds:.3f} {name}\n" for word, seconds, name in found))
    same.write_text(now)


def names(folder: Path, ranks: str) -> list[str]:
    """The tests on so many ranks that stand in the tallies of ``folder``."""
    paths = [*folder.glob(f"tally-{ranks}"), *folder.glob(f"tally-{ranks}-*")]
    return [name for path in paths for _, _, name in tally.lines(path)]


class Passed:
    """The plugin: the tests that the file ``path`` names are left out."""

    def __init__(self, path: str) -> None:
        self._names = set(Path(path).read_text().split("\n"))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in self._names])
        items[:] = [item for item in items if item.nodeid not in self._names]
