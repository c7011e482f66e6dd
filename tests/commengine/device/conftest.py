"""No test may call NCCL in a way that it forbids but would not notice."""

import sys

import pytest


@pytest.fixture(autouse=True)
def nothing_broken():
    yield
    library = sys.modules.get("tests.support.device.nccl.library")  # None: no test has needed it
    assert library is None or not library.broken()
