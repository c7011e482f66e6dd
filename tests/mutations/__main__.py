"""Plant each fault of this folder in a copy of the packages, and see that the tests find it.

Each fault is a patch. Those in device/ must be found by ``make test-cupy``: the tests of a version of CuPy and a number
of ranks run up to their first failure. Those in packages/ must be found by ``make test``. The first line of such a
patch names a number of ranks (0: the serial tests) and the tests that find it, and only these run here, with the
selection of ``make test``. The exit status is 1 if a fault was not found.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
PACKAGES = ("commengine", "tplayers", "trainers", "tests", "bench", "examples", "pyproject.toml")
KINDS = ("device", "packages")
SECONDS = 300
#: the tests of make test-cupy
ON_DEVICE = (
    "tests/commengine/device", "tests/trainers/pipeline/test_schedule_device.py",
    "tests/tplayers/context/test_exchanges_device.py",
)  # fmt: skip
# pytest's own line, or that of a rank that failed alone while the others wait for it
FAILURE = r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$|^\[rank \d+\] (\S+::.+?): this rank failed in "
#: the first line of a patch in packages/
FOUND_BY = re.compile(r"found on (\d) ranks by (\S.*)")


def patches(kind: str) -> list[Path]:
    """The faults of a kind, ``device`` or ``packages``, by name."""
    return sorted((FOLDER / kind).glob("*.patch"))


def runs(patch: Path) -> Iterator[tuple[str, dict[str, str], list[str]]]:
    """The runs of tests/run that may find a fault: words for people, environment variables, and paths of tests."""
    if patch.parent.name == "packages":
        named = FOUND_BY.fullmatch(patch.read_text().split("\n")[0])
        if named is None:
            raise ValueError(f"{patch.name} does not begin with a line such as: found on 2 ranks by tests/test_x.py")
        yield f"{named[1]} ranks", {"RANKS": named[1]}, named[2].split()
        return
    for cupy in sorted(ROOT.glob(".venv/cupy-*[0-9]"), reverse=True):
        yield cupy.name, {"PYTHONPATH": str(cupy), "RANKS": "2 1 0"}, list(ON_DEVICE)


def found_by(patch: Path, copy: Path) -> str | None:
    """The first test that fails, and the run it fails in; None if none does."""
    subprocess.run(["git", "apply", str(patch)], cwd=copy, check=True)
    try:
        for where, env, paths in runs(patch):
            words = [sys.executable, "tests/run", "-x", "--tb=line", *paths]
            try:
                done = subprocess.run(
                    words, cwd=copy, env=os.environ | {"PYTHONPATH": ""} | env, capture_output=True, text=True,
                    timeout=SECONDS, check=False,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                return f"a run that did not end, {where}"
            if "no test matches" in done.stdout:
                raise ValueError(f"{patch.name}: no test of {' '.join(paths)} runs on {where}")
            if done.returncode:
                failed = re.search(FAILURE, done.stdout + done.stderr, re.MULTILINE)
                name = failed[1] or failed[2] if failed else "a run that ended early"
                return f"{name}, {where}"
    finally:
        subprocess.run(["git", "apply", "--reverse", str(patch)], cwd=copy, check=True)
    return None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__, allow_abbrev=False)
    names = [*KINDS, *(patch.stem for kind in KINDS for patch in patches(kind))]
    parser.add_argument("faults", nargs="*", metavar="FAULT", choices=[*names, []], help=f"of {', '.join(names)}; all")
    return parser


def main() -> int:
    given = _parser().parse_args().faults or KINDS
    chosen = [patch for kind in KINDS for patch in patches(kind) if kind in given or patch.stem in given]
    if any(patch.parent.name == "device" for patch in chosen) and not list(ROOT.glob(".venv/cupy-*[0-9]")):
        print("tests.mutations: there is no CuPy in .venv: run make test-cupy first", file=sys.stderr)
        return 2
    left = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in PACKAGES:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, Path(folder, name), ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, folder)
        for patch in chosen:
            began = time.monotonic()
            found = found_by(patch, Path(folder))
            left += found is None
            print(f"{patch.stem}: {found or 'NOT FOUND'} ({time.monotonic() - began:.0f} s)", flush=True)
    print(f"{len(chosen) - left} of {len(chosen)} faults were found")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
