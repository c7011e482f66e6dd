"""Turns: one in a round for each, in an order of the seed; ratios are of one round."""

import numpy as np
import pytest

from bench.timing.turns import Spread, ratio, slowest, take_turns


def test_ratios_are_of_one_round():
    random = np.random.default_rng(0)
    ours, theirs = random.uniform(1, 2, (2, 9))
    found = ratio(ours.tolist(), theirs.tolist())
    quotients = np.sort(ours / theirs)
    assert (found.median, found.low, found.high) == (quotients[4], quotients[2], quotients[6])
    assert found.median != pytest.approx(np.median(ours) / np.median(theirs), rel=1e-3)  # these would be other numbers
    assert Spread.of([3.0, 1.0, 2.0]).text(1) == "2.0 [1.5 to 2.5]" == Spread(2e-3, 1.5e-3, 2.5e-3).text(1, 1e3)
    with pytest.raises(ValueError, match="longer"):
        ratio([1.0], [1.0, 2.0])


def test_every_call_has_one_turn_in_a_round_in_an_order_of_the_seed():
    turns, ends = [], []

    def turn(name):
        return lambda: turns.append(name) or float(len(turns))

    def taken():
        turns.clear()
        return take_turns({name: turn(name) for name in "abc"}, 20, seed=3, warmup=2, after=lambda: ends.append(1))

    found = taken()
    each = [tuple(turns[k : k + 3]) for k in range(0, 66, 3)]
    assert {tuple(sorted(one)) for one in each} == {("a", "b", "c")} and len(set(each)) > 3 and len(ends) == 22
    expected = {name: [float(3 * n + one.index(name) + 1) for n, one in enumerate(each)][2:] for name in "abc"}
    assert found == expected  # the first two rounds do not count
    first = list(turns)
    assert taken() == expected and turns == first


@pytest.mark.mpi
def test_the_time_is_that_of_the_slowest_rank(mpi_world):
    import time

    from commengine import Communicator

    with Communicator(mpi_world, device="cpu") as world:
        last = world.rank == world.size - 1
        took = slowest(world, lambda: time.sleep(0.05 if last else 0.0))
    assert took >= 0.05 and len(set(mpi_world.allgather(took))) == 1
