"""Losses that jump are told from those that fall or tremble; the batch of a step is saved as it was read."""

import math
import random

import pytest
import torch
from safetensors.torch import load_file

from trainers.checks.in_run import FEWEST, IN_A_ROW, SpikeDetector, save_batch


def course(steps, noise=0.05, seed=3):
    generator = random.Random(seed)
    return [2 + 8 * math.exp(-n / 60) + generator.gauss(0, noise) for n in range(steps)]


@pytest.mark.parametrize("seed", range(20))
def test_a_falling_trembling_loss_has_no_spike(seed):
    detector = SpikeDetector(10)
    assert [detector.deviations(loss) for loss in course(500, seed=seed)] == [None] * 500
    detector = SpikeDetector(10)
    assert {detector.deviations(1.0) for _ in range(50)} == {None}


def test_a_jump_is_a_spike_and_does_not_hide_the_next():
    detector, losses = SpikeDetector(10), course(400)
    for loss in losses:
        assert detector.deviations(loss) is None
    for _ in range(50):
        for _ in range(IN_A_ROW - 1):
            above = detector.deviations(losses[-1] + 3)
            assert above is not None and above > 10
        assert detector.deviations(losses[-1]) is None
    assert detector.deviations(losses[-1] - 3) is None  # downwards is no spike


def test_a_new_level_is_not_a_spike_at_each_step():
    detector, losses = SpikeDetector(10), course(400)
    found = [detector.deviations(loss) for loss in losses + [loss + 3 for loss in losses[100:]]]
    assert [n for n, above in enumerate(found) if above is not None] == list(range(400, 400 + IN_A_ROW))
    assert detector.deviations(losses[-1] + 9) is not None


def test_the_first_losses_are_only_remembered():
    detector = SpikeDetector(10)
    assert [detector.deviations(loss) for loss in ([1.0] * (FEWEST - 1) + [1e9])] == [None] * FEWEST
    assert detector.deviations(1e9) is not None


@pytest.mark.mpi
def test_the_batch_is_saved_once_for_each_replica(world, trainer, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / f"rank-{world.rank}" / "batches"  # no two ranks write into one
    one = trainer(world, tensor_model_parallel_size=world.size, micro_batch_size=2, global_batch_size=8)
    path = save_batch(one, 3, folder)
    assert path.name == "step_0000004-replica_0.safetensors"
    assert path.exists() == (world.rank == 0) and not list(folder.glob("*.tmp"))
    if world.rank == 0:
        found = load_file(path)
        assert found["numbers"].tolist() == list(range(24, 32))
        assert torch.equal(found["tokens"], torch.cat([batch.tokens for batch in one.batches(3)]))
        assert torch.equal(found["labels"], torch.cat([batch.labels for batch in one.batches(3)]))
