"""Rows to experts, by formula: against messages that are counted one by one, and the crossover at k = e."""

import random

import pytest

from commengine import cost
from commengine.cost import FittedModel, Link, Segment


def even(ranks, part):
    return [[part] * ranks for _ in range(ranks)]


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_even_parts_cost_what_an_all_to_all_costs(p):
    for algorithm in ("direct", "ring"):
        assert cost.uneven_all_to_all(even(p, 5.0), algorithm) == cost.collective("all_to_all", algorithm, 5.0 * p, p)


@pytest.mark.parametrize("p", [2, 3, 5])
def test_uneven_parts_against_every_message(p):
    draw = random.Random(p)
    sent = [[float(draw.choice((0, 1, 7, 100))) for _ in range(p)] for _ in range(p)]
    out, into, steps = [0.0] * p, [0.0] * p, [0.0] * p
    for source in range(p):
        for target in range(p):
            if source != target:
                out[source] += sent[source][target]
                into[target] += sent[source][target]
                turn = (target - source) % p
                steps[turn] = max(steps[turn], sent[source][target])
    direct, ring = (cost.uneven_all_to_all(sent, algorithm) for algorithm in ("direct", "ring"))
    assert cost.busiest(sent) == max(out + into) == direct.path_bytes and direct.steps == 1
    assert (ring.steps, ring.path_bytes) == (p - 1, sum(steps))


def test_what_is_not_square_or_unknown_is_refused():
    with pytest.raises(ValueError, match="as many columns as rows"):
        cost.uneven_all_to_all([[1.0, 2.0]])
    with pytest.raises(ValueError, match="no algorithm 'bruck'"):
        cost.uneven_all_to_all(even(2, 1.0), "bruck")
    assert cost.uneven_all_to_all([[3.0]]) == cost.Cost(0, 0, 0)


def model(ranks, alpha, beta):
    """Collectives whose busy bandwidth is 1 / beta."""
    factor = (ranks - 1) / ranks
    row = (Segment(ranks, 0, alpha, beta * factor),)
    return FittedModel(dict.fromkeys(("all_to_all", "all_gather", "reduce_scatter"), row))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_gathering_is_no_slower_from_k_equal_to_the_ranks_on(ranks):
    """Without latencies, and rows that go everywhere equally often. Latency moves it below."""
    part, beta = 1e6, 1e-10
    link = Link(0.0, beta)
    assert cost.link_crossover(link, part, ranks) == pytest.approx(ranks, rel=1e-3)
    assert cost.link_crossover(Link(1e-4, beta), part, ranks) < ranks
    found = []
    for k in range(1, 2 * ranks + 1):
        sent = even(ranks, k * part / ranks)
        there = cost.there_and_back_seconds(model(ranks, 0.0, beta), sent)
        found.append((k, there / cost.gathered_seconds(model(ranks, 0.0, beta), part, ranks)))
    assert cost.linear_crossover(found) == pytest.approx(ranks, rel=1e-3)
    assert cost.linear_crossover(found[: ranks - 1]) is None


def test_a_popular_expert_slows_its_rank_and_own_rows_count_in_shared_memory():
    hot = [[9.0, 1.0], [9.0, 1.0]]
    by_network, in_memory = (
        cost.all_to_all_seconds(model(2, 0.0, 1.0), hot, shared_memory=shared) for shared in (False, True)
    )
    assert by_network == pytest.approx(9.0)  # what rank 1 sends to rank 0
    assert in_memory == pytest.approx(9.0)  # half of the 18 that rank 0 gets
    back = [[9.0, 9.0], [1.0, 1.0]]
    assert cost.all_to_all_seconds(model(2, 0.0, 1.0), back) == pytest.approx(9.0)
    assert cost.all_to_all_seconds(model(2, 0.0, 1.0), back, shared_memory=True) == pytest.approx(5.0)
    assert cost.all_to_all_seconds(model(2, 1.0, 1.0), [[5.0]]) == 0.0
