"""What is done after the end of a start."""

import os

import pytest

from trainers.supervision.command import Position
from trainers.supervision.policy import Policy
from trainers.supervision.settings import SuperviseSettings


def policy(**given):
    return Policy(SuperviseSettings(**given))


def goes_on(decision):
    """Whether the run is started again on as many ranks."""
    return decision.status is None and not decision.smaller


@pytest.mark.parametrize("status", [0, os.EX_TEMPFAIL, 130])
def test_an_end_is_not_started_again(status):
    decision = policy().after(status, Position(7, 5), smaller=True)
    assert decision.status == status and not decision.smaller


def test_wrong_options_are_not_tried_again_but_an_error_in_training_is():
    decision = policy().after(2, Position(None, 0), smaller=True)
    assert decision.status == 2
    assert goes_on(policy().after(2, Position(7, 5), smaller=False))


@pytest.mark.parametrize("status", [1, 9, 124, 137, -9])
def test_a_crash_that_repeats_at_one_step_ends_it_and_others_do_not(status):
    chosen = policy(repeats=3)
    for step in (7, 9, 7, 9, 12, 12, 13):
        assert goes_on(chosen.after(status, Position(step, 5), smaller=False))
    assert "2 times in a row" in chosen.after(status, Position(13, 5), smaller=True).text
    last = chosen.after(status, Position(13, 5), smaller=True)
    assert last.status == 1
    assert "in or after step 13, 3 times in a row" in last.text


def test_a_start_that_was_ended_is_a_crash():
    chosen = policy(repeats=2)
    first = chosen.after(None, Position(None, 5), smaller=False)
    assert goes_on(first)
    assert "took too long to begin a step (--start-minutes) before its first step" in first.text
    assert chosen.after(None, Position(None, 5), smaller=True).smaller
    assert goes_on(chosen.after(None, Position(None, 5), smaller=False))
    assert chosen.after(1, Position(None, 5), smaller=False).status == 1


def test_starts_that_fail_take_fewer_ranks_while_there_are_any():
    chosen = policy(repeats=2)
    nothing = Position(None, 5)
    assert goes_on(chosen.after(9, Position(6, 5), smaller=True))
    found = [chosen.after(1, nothing, smaller=smaller) for smaller in (True, True, False, False)]
    assert [(one.status, one.smaller) for one in found] == [(None, False), (None, True), (None, False), (1, False)]


def test_waits_double_until_a_newer_checkpoint():
    chosen = policy(back_off=2.0, longest_back_off=10.0)
    saved = [0, 0, 0, 0, 5, 5, 10]
    waits = [chosen.after(1, Position(n, at), smaller=False).wait for n, at in enumerate(saved, 1)]
    assert waits == [2, 4, 8, 10, 2, 4, 2]
    assert policy(back_off=0.0).after(1, Position(1, 0), smaller=False).wait == 0


def test_restarts_have_a_limit():
    chosen = policy(restarts=2)
    found = [chosen.after(1, Position(step, 0), smaller=False) for step in (1, 2, 3)]
    assert [one.status for one in found] == [None, None, 1]
    assert "after 2 restarts (--restarts)" in found[-1].text and found[-1].status == 1
    chosen = policy(restarts=2)
    assert [chosen.after_no_room().wait for _ in range(2)] == [1, 2]
    assert chosen.after_no_room().status == 1
