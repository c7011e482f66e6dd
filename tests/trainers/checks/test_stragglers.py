"""The rank that keeps the others waiting is found by its own time, although all steps take equally long."""

import time

import pytest
import torch

from commengine import trace
from trainers.checks.stragglers import Paces, compare, own_seconds

pytestmark = pytest.mark.mpi


def test_the_time_in_collectives_is_not_a_ranks_own(world):
    slow = world.size - 1
    with trace(world) as log:
        began = time.perf_counter()
        time.sleep(0.3 if world.rank == slow else 0.0)
        world.all_reduce(torch.ones(8))
        own = own_seconds(time.perf_counter() - began, log)
    assert log.events == []
    paces = compare(own, world)
    assert paces.slowest == slow and paces.slowest_ms >= 300 and paces.slow == (world.size > 1)


def test_a_line_and_a_row():
    paces = Paces(30.0, 41.2, 3)
    assert paces.slow and not Paces(30.0, 31.0, 3).slow
    assert paces.row() == {"own_ms": 30.0, "slowest_own_ms": 41.2, "slowest_rank": 3}
    expected = "rank 3 on n2 keeps the others waiting: 41.2 ms a step outside of collectives, the median rank 30.0 ms"
    assert paces.text("n2") == expected
