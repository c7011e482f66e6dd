"""The rows of a study that count: one state's, the best, and which are measured again."""

import json

import pytest

from bench.study import sizes
from bench.study.kept import split, worst
from bench.timing.states import States
from commengine import UsageError
from tests.bench.study.test_answers import row
from tests.bench.timing.test_states import states


def seen(size, state, width=0.01, *, converged=True, spent=2e-6):
    about = {"state": state, "state_seen": state, "asked_bytes": size - 1}
    return row(size, "engine", spent, width=width, converged=converged).but(**about)


def two_states():
    """State 0 in 3 us, of 30 turns, and state 1 in 1 us, of 60."""
    made = states(*[3.0] * 31, *[1.0] * 70)
    for _ in range(90):
        made.turn(int)
    return made


def test_rows_of_the_state_with_most_turns_count_and_others_are_marked():
    machine = two_states()
    assert machine.main() == 1 and machine.shown() == [1, 0]
    measured = [seen(64, 0), seen(64, 1, 0.2, converged=False), seen(64, 1, 0.1), seen(128, 0)]
    kept, others = split(measured, machine)
    assert [(one.bytes, one.state, one.state_seen, one.disturbed) for one in kept] == [
        (64, None, 1, None), (128, None, 0, True)
    ]  # fmt: skip
    assert kept[0].ci == measured[2].ci and others == measured[:2]
    again, left = split([*kept, *others, seen(128, 1, 0.3, converged=False)], machine)  # as at the next unit
    assert not any(one.disturbed for one in again) and len(again) == 2 and len(left) == 3
    assert split(measured, None)[0][0].bytes == 64


def test_states_go_on_in_the_next_call():
    machine = two_states()
    after = states(1.02)
    after.restore(json.loads(json.dumps(machine.to_json())))
    assert (after.main(), after.shown(), after.to_json()) == (1, [1, 0], machine.to_json())
    assert after.turn(int)[1] == 1 and isinstance(after, States)


def test_the_longest_interval_is_measured_again_and_the_rows_with_few_tries_first():
    rows = [seen(9, 0), seen(17, 0, 0.3, converged=False), seen(33, 0, 0.2, converged=False)]
    assert worst(rows, {}) == ("all_reduce", 16) and worst(rows[:1], {}) is None
    assert worst(rows, {("all_reduce", 16): 1}) == ("all_reduce", 32)
    assert worst([*rows, seen(65, 0).but(disturbed=True)], {}) == ("all_reduce", 64)


@pytest.mark.parametrize(
    "text", ["{", '{"rows": [], "units": []}', '{"rows": [{}], "units": [], "skipped": []}',
             '{"rows": [], "units": [], "skipped": [], "states_seen": [1]}'],
)  # fmt: skip
def test_a_damaged_file_says_how_to_begin_anew(text, tmp_path):
    path = tmp_path / "collectives.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"collectives\.json: .*; give --overwrite to begin anew"):
        sizes.older(path)
