"""The faults of tests/mutations can still be planted: the code around them has not changed without them."""

import shutil
import subprocess

import pytest

from tests.support import mpirun

FOLDER = mpirun.ROOT / "tests" / "mutations"


@pytest.mark.skipif(not shutil.which("git"), reason="no git")
def test_every_fault_applies():
    patches = sorted(FOLDER.glob("*.patch"))
    assert len(patches) >= 10
    for patch in patches:
        done = subprocess.run(
            ["git", "apply", "--check", str(patch)], cwd=mpirun.ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{patch.name}: {done.stderr}"
