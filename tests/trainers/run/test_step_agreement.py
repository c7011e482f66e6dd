"""What one rank asks for, every rank learns; a failure of one rank is an error of all."""

import pytest

from commengine import UsageError
from trainers.run.step_agreement import agree

pytestmark = [pytest.mark.mpi, pytest.mark.every_size]


def test_every_rank_learns_the_largest_value_of_each_flag(world):
    last = world.rank == world.size - 1
    assert agree(world, None, 0, 0) == [0, 0]
    assert agree(world, None, 0, 7 * last) == [0, 7]
    assert agree(world, None, world.rank, 0) == [world.size - 1, 0]
    assert agree(world, None) == []


@pytest.mark.parametrize("failing", [[0], [-1], [0, -1]])
def test_a_failure_is_one_error_with_the_words_of_the_first_rank(world, failing):
    ranks = [number % world.size for number in failing]
    problem = f"metrics.jsonl of rank {world.rank}: no space left — at all" if world.rank in ranks else None
    with pytest.raises(UsageError) as caught:
        agree(world, problem, 1)
    assert str(caught.value) == f"metrics.jsonl of rank {min(ranks)}: no space left — at all"
    assert world.mpi.allgather(str(caught.value)) == [str(caught.value)] * world.size
