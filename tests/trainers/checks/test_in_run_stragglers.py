"""The rank that keeps the others waiting is found by its own time, although all steps take equally long."""

import time

import pytest
import torch

from commengine import trace
from trainers.checks.in_run import own_seconds, paces

pytestmark = pytest.mark.mpi


def test_the_time_in_collectives_is_not_a_ranks_own(world):
    slow = world.size - 1
    with trace(world) as log:
        began = time.perf_counter()
        time.sleep(0.3 if world.rank == slow else 0.0)
        world.all_reduce(torch.ones(8))
        own = own_seconds(time.perf_counter() - began, log)
    assert log.events == []
    row = paces(own, world)
    assert row["slowest_rank"] == slow and row["slowest_own_ms"] >= 300
    assert list(row) == ["own_ms", "slowest_own_ms", "slowest_rank"]
