"""The order of a rank's calls, from dependencies: against all orders of small graphs, and damaged graphs."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.traces.graph import GraphError, GraphNode, calls_of, in_order


def chain(*nodes):
    return [GraphNode(number, tuple(before), 0.0, calls) for number, before, calls in nodes]


def test_the_lowest_number_that_may_come_next_comes_next():
    nodes = chain((5, [], True), (1, [5], True), (2, [], True), (3, [1, 2], True))
    assert [node.number for node in in_order(nodes)] == [2, 5, 1, 3]
    timed = [GraphNode(5, (), 1.0, True), GraphNode(2, (), 7.0, True)]
    assert [node.number for node in in_order(timed)] == [5, 2]  # a known time counts before the number


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        (chain((1, [], True), (1, [], True)), "there are two nodes 1"),
        (chain((1, [7], True)), "node 1 depends on node 7, which is not there"),
        (chain((0, [], True), (1, [2], True), (2, [1], False)), "node 1 depends on itself, through other nodes"),
        (chain((4, [4], True)), "node 4 depends on itself"),
    ],
)
def test_damaged_graphs_are_named(nodes, message):
    with pytest.raises(GraphError, match=message):
        in_order(nodes)


def reaches(nodes, early, late):
    """Whether ``late`` comes after ``early`` by dependencies, by walking backwards."""
    before = {node.number: node.before for node in nodes}
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
    nodes = [
        GraphNode(
            number, tuple(data.draw(st.sets(st.integers(0, number - 1), max_size=3))) if number else (), 0.0,
            data.draw(st.booleans()),
        )
        for number in range(size)
    ]  # fmt: skip
    ordered = in_order(nodes)
    found = calls_of(ordered)
    calls = [node.number for node in ordered if node.calls]
    assert [one.call for one in found] == calls
    for place, one in enumerate(found):
        later = (at for at in range(place + 1, len(calls)) if reaches(nodes, calls[place], calls[at]))
        assert one.waited == next(later, None)
