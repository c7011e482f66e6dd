"""What one rank asks for, every rank learns; a failure of one rank is an error of all."""

import pytest

from commengine import UsageError
from trainers.run.step_agreement import StepAgreement

pytestmark = [pytest.mark.mpi, pytest.mark.every_size]


def test_every_rank_learns_the_largest_value_of_each_flag(world):
    now = {"stop": 0, "writing": 0}
    agreement = StepAgreement(world)
    for name in now:
        agreement.add(name, lambda name=name: now[name])
    assert agreement.exchange() == {"stop": 0, "writing": 0}
    now["writing"] = 7 * (world.rank == world.size - 1)
    assert agreement.exchange() == {"stop": 0, "writing": 7}
    now.update(stop=world.rank, writing=0)
    assert agreement.exchange() == {"stop": world.size - 1, "writing": 0}


def test_without_flags(world):
    assert StepAgreement(world).exchange() == {}


@pytest.mark.parametrize("failing", [[0], [-1], [0, -1]])
def test_a_failure_is_one_error_with_the_words_of_the_first_rank(world, failing):
    ranks = [number % world.size for number in failing]
    agreement = StepAgreement(world)
    agreement.add("stop", lambda: 1)
    agreement.add_failure(lambda: None)
    if world.rank in ranks:  # a source that other ranks lack
        agreement.add_failure(lambda: f"metrics.jsonl of rank {world.rank}: no space left — at all")
    with pytest.raises(UsageError) as caught:
        agreement.exchange()
    assert str(caught.value) == f"metrics.jsonl of rank {min(ranks)}: no space left — at all"
    assert world.mpi.allgather(str(caught.value)) == [str(caught.value)] * world.size


def test_a_name_stands_for_one_flag(world):
    agreement = StepAgreement(world)
    agreement.add("stop", lambda: 0)
    with pytest.raises(ValueError, match="'stop' is there already"):
        agreement.add("stop", lambda: 1)
