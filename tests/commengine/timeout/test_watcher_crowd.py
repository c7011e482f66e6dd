"""What a report costs where there are many ranks: in one process, with a clock and messages of its own."""

import pytest

from commengine.timeout.watcher import ASK_SECONDS, turn_of
from tests.commengine.timeout.crowd import CASES, TIMEOUT, run


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("size", [2, 4, 8, 64, pytest.param(256, marks=pytest.mark.slow)])
def test_a_report_costs_a_few_messages_for_each_rank(case, size):
    """A question, an answer and a last word, by at most a few ranks that ask at once; a thread for each look."""
    found = run(size, case)
    assert found.messages <= (4 if size > 2 else 8) * size
    assert found.threads <= 2 * size
    assert found.bytes <= 200 * found.messages


@pytest.mark.parametrize("size", [8, 64, pytest.param(256, marks=pytest.mark.slow)])
def test_each_rank_names_who_is_missing_to_it(size):
    found = run(size, "one computes")
    last = f"rank {size - 1}, all_reduce #1 (it has made no call there)"
    assert len(found.said) == size
    assert [found.missing(rank) for rank in range(size)] == [[last]] * (size - 1) + [[]]
    assert "has run out of time" in found.said[size - 1]

    found = run(size, "pairs")
    for rank in range(0, size, 2):
        assert found.missing(rank) == [f"rank {rank + 1}, all_reduce #1 (it has made no call there)"]

    found = run(size, "messages")
    for rank in range(0, size, 2):
        assert found.missing(rank) == [f"rank {rank + 1}, recv #1 (it neither sends to this rank nor receives from it)"]

    found = run(size, "a node is gone")
    first = [f"rank {rank}, all_reduce #1 (it does not answer)" for rank in range(size // 8)]
    named = first if len(first) <= 16 else [*first[:16], f"{len(first) - 16} more ranks"]
    assert set(found.said) == set(range(size // 8, size))
    assert all(found.missing(rank) == named for rank in found.said)

    found = run(size, "nobody")
    assert [found.missing(rank) for rank in range(size)] == [["nobody, every rank is in it"]] * size

    found = run(size, "halves")
    for rank in range(size):
        low = rank < size // 2
        assert found.missing(rank)[0] == (
            f"rank {size // 2}, all_reduce #1 (it is in barrier #1 instead)"
            if low
            else "rank 0, barrier #1 (it is in all_reduce #1 instead)"
        )

    found = run(size, "alarm")
    assert all("the network failed" in text for text in found.said.values()) and len(found.said) == size


@pytest.mark.parametrize("size", [3, 64])
def test_another_rank_asks_if_the_first_one_dies_meanwhile(size):
    found = run(size, "one computes", asker_dies=True)
    (gone,) = set(range(size)) - set(found.said)
    for rank in set(found.said) - {size - 1}:
        assert found.missing(rank) == [
            f"rank {gone}, all_reduce #1 (it does not answer)",
            f"rank {size - 1}, all_reduce #1 (it has made no call there)",
        ]
        assert float(found.said[rank].split("not done after ")[1].split()[0]) < TIMEOUT + 2 * ASK_SECONDS + 1


def test_few_ranks_ask_first_wherever_the_others_are_gone():
    """The turns of any eighth of the ranks are those of all: the first turn that has one has few."""
    for size in (2, 3, 8, 64, 1000, 16384):
        turns = [turn_of(rank, size) for rank in range(size)]
        assert turns[0] == 0 and max(turns) <= 8
        for first in range(0, size, max(1, size // 8)):
            left = turns[:first] + turns[first + max(1, size // 8) :]
            assert left.count(min(left)) <= 4
            some = turns[first : first + max(1, size // 8)]
            assert some.count(min(some)) <= 20
