"""Plant each fault of this folder in a copy of the packages, and see that ``make test-cupy`` finds it.

Each fault is a patch. It is found if a test fails with it; the tests of a version of CuPy and a number of ranks run up
to their first failure. The exit status is 1 if a fault was not found.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
PACKAGES = ("commengine", "tplayers", "trainers", "tests", "bench", "examples", "pyproject.toml")
SECONDS = 300


def found_by(patch: Path, copy: Path) -> str | None:
    """The first test that fails, and the run it fails in; None if none does."""
    subprocess.run(["git", "apply", str(patch)], cwd=copy, check=True)
    try:
        for cupy in sorted(ROOT.glob(".venv/cupy-*[0-9]"), reverse=True):
            env = os.environ | {"PYTHONPATH": str(cupy), "RANKS": "2 1 0"}
            words = [sys.executable, "tests/run", "-x", "--tb=line", "tests/commengine/device"]
            try:
                done = subprocess.run(
                    words, cwd=copy, env=env, capture_output=True, text=True, timeout=SECONDS, check=False
                )
            except subprocess.TimeoutExpired:
                return f"a run that did not end, {cupy.name}"
            if done.returncode:
                failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
                return f"{failed[1] if failed else 'a run that ended early'}, {cupy.name}"
    finally:
        subprocess.run(["git", "apply", "--reverse", str(patch)], cwd=copy, check=True)
    return None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__, allow_abbrev=False)
    names = sorted(patch.stem for patch in FOLDER.glob("*.patch"))
    parser.add_argument("faults", nargs="*", metavar="FAULT", choices=[*names, []], help=f"of {', '.join(names)}; all")
    return parser


def main() -> int:
    given = _parser().parse_args()
    if not list(ROOT.glob(".venv/cupy-*[0-9]")):
        print("tests.mutations: there is no CuPy in .venv: run make test-cupy first", file=sys.stderr)
        return 2
    patches = [FOLDER / f"{name}.patch" for name in given.faults] or sorted(FOLDER.glob("*.patch"))
    left = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in PACKAGES:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, Path(folder, name), ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, folder)
        for patch in patches:
            began = time.monotonic()
            found = found_by(patch, Path(folder))
            left += found is None
            print(f"{patch.stem}: {found or 'NOT FOUND'} ({time.monotonic() - began:.0f} s)", flush=True)
    print(f"{len(patches) - left} of {len(patches)} faults were found")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
