"""Rank 0's values and errors on every rank, and ranks that wait for it without a core."""

import time

import pytest

from commengine import UsageError
from commengine.rank_zero import (
    broadcast_json,
    gather_json,
    on_every_rank,
    on_rank_zero,
)

pytestmark = [pytest.mark.mpi, pytest.mark.every_size]

VALUE = {"text": "é\u2028\ud7ff", "numbers": [0, -1.5, 2**60], "none": None, "empty": {}}


@pytest.mark.parametrize("value", [VALUE, None, "x" * 100_000], ids=["mapping", "none", "long"])
def test_every_rank_gets_the_value_of_rank_0(world, value):
    assert broadcast_json(world, value if world.rank == 0 else object()) == value


def test_a_rank_that_waits_for_rank_0_keeps_no_core(world):
    """Rank 0 comes 0.2 s after the last of the others; a rank that spun would use all of the time that it waits."""
    began, used = time.monotonic(), time.thread_time()
    if world.rank == 0:
        for rank in range(1, world.size):
            world.mpi.recv(source=rank)
        time.sleep(0.2)
    else:
        world.mpi.send(None, 0)
    assert broadcast_json(world, world.rank) == 0
    used, waited = time.thread_time() - used, time.monotonic() - began
    if world.rank:
        assert used < waited / 2, (used, waited)


def test_a_rank_that_is_done_keeps_no_core(world):
    """Its own work is nothing, and that of rank 0 takes 0.2 s."""

    def work():
        if world.rank == 0:
            time.sleep(0.2)

    world.barrier()
    began, used = time.monotonic(), time.thread_time()
    on_every_rank(world, work)
    used, waited = time.thread_time() - used, time.monotonic() - began
    if world.rank:
        assert used < waited / 2, (used, waited)


def test_rank_0_gets_the_values_of_all_ranks(world):
    mine = {"rank": world.rank, "text": "é" * world.rank}
    expected = [{"rank": rank, "text": "é" * rank} for rank in range(world.size)]
    assert gather_json(world, mine) == (expected if world.rank == 0 else [])


def test_a_text_of_any_rank(world):
    for root in range(world.size):
        assert broadcast_json(world, f"of {world.rank}, é", root) == f"of {root}, é"
        assert broadcast_json(world, "" if world.rank == root else "other", root) == ""


@pytest.mark.parametrize("error", [UsageError("first\nsecond"), ValueError("first\nsecond"), OSError("first second")])
def test_an_error_of_rank_0_is_one_of_all_ranks(world, error):
    def work():
        assert world.rank == 0
        raise error

    with pytest.raises(UsageError, match=r"^first second$"):
        on_rank_zero(world, work)
    assert on_rank_zero(world, lambda: [world.rank, VALUE]) == [0, VALUE]


@pytest.mark.parametrize(("code", "status"), [(0, 0), (None, 0), (3, 3)])
def test_an_exit_of_rank_0_is_one_of_all_ranks(world, code, status):
    def work():
        raise SystemExit(code)

    with pytest.raises(SystemExit) as stopped:
        on_rank_zero(world, work)
    assert stopped.value.code == status


def test_all_ranks_raise_the_error_of_the_first_that_failed(world):
    def work(first):
        if world.rank >= first:
            raise ValueError(f"on rank {world.rank}")
        return world.rank

    for first in range(world.size):
        with pytest.raises(UsageError, match=f"^on rank {first}$"):
            on_every_rank(world, lambda first=first: work(first))
    assert on_every_rank(world, lambda: work(world.size)) == world.rank
