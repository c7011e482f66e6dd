"""A slice of ``python -m tests.fuzz``: drawn collectives, messages and blocks against the exact results."""

import pytest

from tests.fuzz import epoch

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.every_size]


@pytest.mark.parametrize("number", range(5))
def test_drawn_calls_are_right(mpi_world, number):
    _, wrong = epoch(mpi_world, 1, number, aligned=False)
    assert wrong == []
