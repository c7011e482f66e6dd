"""The faults of tests/mutations can still be planted: the code around them has not changed without them."""

import shutil
import subprocess

import pytest

from tests.mutations.__main__ import KINDS, patches, runs
from tests.support import mpirun


@pytest.mark.skipif(not shutil.which("git"), reason="no git")
@pytest.mark.parametrize("kind", KINDS)
def test_every_fault_applies(kind):
    assert len(patches(kind)) >= 12
    for patch in patches(kind):
        done = subprocess.run(
            ["git", "apply", "--check", str(patch)], cwd=mpirun.ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{patch.name}: {done.stderr}"


def test_the_tests_that_find_a_fault_of_the_packages_exist():
    for patch in patches("packages"):
        for _, _, paths in runs(patch):
            assert all((mpirun.ROOT / path).is_file() for path in paths), patch.name
