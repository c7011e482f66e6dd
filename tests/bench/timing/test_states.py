"""The states of a machine: which turns count for which, with times that are given."""

import os

import pytest

from bench.timing.states import MOST_AGAIN, States


class Given:
    """Stands for the probe: the times of 8 bytes, one after the other, in microseconds."""

    def __init__(self, *times):
        self.times = list(times)

    def __call__(self):
        return 1e-6 * self.times[0], 2e-6 * (self.times.pop(0) if len(self.times) > 1 else self.times[0])


def alone():
    from mpi4py import MPI

    return MPI.COMM_SELF


def states(*times):
    """States of one rank, as if it could tell them."""
    made = States(alone(), probe=Given(*times))
    assert not made.known, "one rank has nobody to send to"
    made.known = True
    return made


def test_one_rank_is_told_why_it_has_no_states():
    assert States(alone()).lines() == ["- states of the machine: not told apart, because one rank sends no messages"]


def test_turns_are_counted_for_their_state():
    """Small changes are the same state, whose centre follows; the names go from the fastest on."""
    seen = states(1.4, 1.45, 1.38, 1.05, 1.05, 1.06, 1.06)
    numbers = [seen.turn(lambda: "result") for _ in range(4)]
    assert [result for result, _ in numbers] == ["result"] * 4
    assert [number for _, number in numbers] == [0, 0, 1, 1]
    assert seen.shown() == [1, 0] and seen.again == 1
    (line,) = seen.lines()
    assert "2 states seen (state 1: MPI's 8 bytes in 1.05 us" in line and "1 turns were measured again" in line


def test_a_turn_in_which_the_state_changes_is_measured_again():
    calls = []
    seen = states(1.0, 2.0, 2.0)
    assert seen.turn(lambda: calls.append(1))[1] == 0 and len(calls) == 2
    assert seen.all[0].probes == pytest.approx([2e-6, 2e-6])


def test_a_machine_that_never_rests_ends_too():
    calls = []
    seen = states(*(1.0 + number % 2 for number in range(50)))
    seen.turn(lambda: calls.append(1))
    assert len(calls) == MOST_AGAIN + 1


def test_a_disturbance_is_no_state():
    seen = states(*[1.0] * 60, 5.0, 5.0, *[1.0] * 60)
    numbers = [seen.turn(int)[1] for _ in range(100)]
    assert seen.shown() == [0] and numbers.count(0) >= 98
    assert "one state seen" in seen.lines()[0]


def test_states_whose_centres_meet_are_one():
    """The first probe was a lucky one: what follows lies nearer and nearer to the centre of another state."""
    seen = states(1.60, 1.60, *[1.90] * 8, *[1.72] * 12)
    numbers = [seen.turn(int)[1] for _ in range(16)]
    assert len(set(numbers)) == 2 and len(seen.shown()) == 1
    assert set(seen.assigned(numbers)) == set(seen.shown())


def test_a_call_that_was_always_disturbed_counts_for_the_nearest_state():
    seen = states(*[1.0] * 80, *[4.0] * 4, *[1.0] * 80)
    numbers = [seen.turn(int)[1] for _ in range(130)]
    disturbed = max(numbers)
    assert seen.assigned([0, disturbed]) == [0, None] and seen.assigned([disturbed]) == [0]


def test_ranks_without_cores_take_turns_as_they_are():
    seen = States(alone())
    assert seen.turn(lambda: 7) == (7, 0) and seen.shown() == [0]
    assert "not told apart" in seen.lines()[0]


@pytest.mark.mpi(min_size=2)
def test_ranks_that_are_bound_to_cores_of_their_own_can_tell_states(mpi_world):
    world, before = mpi_world, os.sched_getaffinity(0)
    cores = sorted(set().union(*world.allgather(before)))
    os.sched_setaffinity(0, {cores[world.rank % len(cores)]})
    try:
        seen = States(world)
    finally:
        os.sched_setaffinity(0, before)
    assert seen.known == (world.size <= len(cores))
