"""The order of a rank's calls, from dependencies: against all orders of small graphs, and damaged graphs."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.traces.graph import in_order, waits


def test_the_lowest_number_that_may_come_next_comes_next():
    before = {5: [], 1: [5], 2: [], 3: [1, 2]}
    assert in_order(before, dict.fromkeys(before, 0)) == [2, 5, 1, 3]
    assert in_order({5: [], 2: []}, {5: 1.0, 2: 7.0}) == [5, 2]  # a known time counts before the number


@pytest.mark.parametrize(
    ("before", "message"),
    [
        ({1: [7]}, "node 1 depends on node 7, which is not there"),
        ({0: [], 1: [2], 2: [1]}, "node 1 depends on itself, through other nodes"),
        ({4: [4]}, "node 4 depends on itself"),
    ],
)
def test_damaged_graphs_are_named(before, message):
    with pytest.raises(ValueError, match=message):
        in_order(before, dict.fromkeys(before, 0))


def reaches(before, early, late):
    """Whether ``late`` comes after ``early`` by dependencies, by walking backwards."""
    todo, seen = [late], set()
    while todo:
        one = todo.pop()
        if one == early:
            return True
        todo += [number for number in before[one] if number not in seen]
        seen.update(before[one])
    return False


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_waiting_against_a_search_of_the_graph(data):
    size = data.draw(st.integers(1, 12))
    before = {
        number: data.draw(st.sets(st.integers(0, number - 1), max_size=3)) if number else set()
        for number in range(size)
    }
    chosen = data.draw(st.sets(st.integers(0, size - 1)))
    ordered = in_order(before, dict.fromkeys(before, 0))
    calls = [number for number in ordered if number in chosen]
    found = waits(ordered, before, chosen)
    assert [call for call, _ in found] == calls
    for place, (call, waited) in enumerate(found):
        later = (at for at in range(place + 1, len(calls)) if reaches(before, call, calls[at]))
        assert waited == next(later, None)
