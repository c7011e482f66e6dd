"""bench.overlap: on a slow link reductions take their time, and overlap hides a part of it; ratios are of one round."""

from argparse import Namespace

import numpy as np
import pytest

RATE = 4e6  # bytes a second


@pytest.mark.mpi(min_size=2)
def test_steps_on_a_slow_link_last_as_long_as_their_gradients_take(mpi_world):
    from bench import overlap
    from commengine import Communicator
    from trainers.tasks.gpt import GPTTrainConfig

    config = GPTTrainConfig(
        num_layers=2, hidden_size=32, num_attention_heads=2, seq_length=16, vocab_size=256, mock_data=True,
        make_vocab_size_divisible_by=1, ddp_bucket_size=10_000, hidden_dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    config.validate(mpi_world.size)
    with Communicator(mpi_world) as world:
        variants = overlap.measure(world, config, RATE, 3)
        parameters = variants[0].trainer.parameters()
    assert [(one.overlap, one.rate) for one in variants] == [(False, None), (True, None), (False, RATE), (True, RATE)]
    assert all(len(one.seconds) == len(one.hidden) == 3 for one in variants)
    for one in variants:
        assert all(0 <= share <= 1 for share in one.hidden) and (one.overlap or not any(one.hidden))
    slow, overlapped = variants[2:]
    assert min(slow.seconds) >= 4 * parameters / RATE  # fp32, nothing beside it
    assert max(overlapped.hidden) > 0
    surroundings = {"command": "", "date": "", "load_average_before": 0.0, "hardware": "", "versions": {}, "ranks": 2}
    text = overlap.markdown(surroundings, variants, vars(Namespace(rounds=3, micro_batch_size=1)))
    gain = np.median(np.array(slow.seconds) / np.array(overlapped.seconds))
    assert f"| 0.004 GB/s | {np.median(slow.seconds):.3f} | {np.median(overlapped.seconds):.3f} |" in text
    assert f"| {gain:.2f} [" in text


@pytest.mark.mpi
def test_one_rank_has_nothing_to_reduce(mpi_world):
    from mpi4py import MPI

    from bench import overlap
    from commengine import Communicator, UsageError

    with Communicator(MPI.COMM_SELF) as single, pytest.raises(UsageError, match="two ranks or more"):
        overlap.main(single, [])
