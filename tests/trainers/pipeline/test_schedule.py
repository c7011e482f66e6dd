"""Steps of a pipeline: losses, norms, all gradients and parameters are those of the whole model on one rank."""

from dataclasses import replace

import pytest
import torch

from commengine import Communicator, ProcessGrid
from tests.support.small_models import KINDS
from tests.support.training import small_runs
from tplayers import placements

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2, 4)]

LAYOUTS = {2: [(1, 2)], 4: [(1, 4), (2, 2), (1, 2)]}


@pytest.fixture
def itself():
    """MPI.COMM_SELF."""
    from mpi4py import MPI

    return MPI.COMM_SELF


def each_layout(world):
    return LAYOUTS[world.size]


def assert_same(trainer, alone, step, expected):
    """The step's losses and norm, and all gradients and parameters of this rank, are those of the whole model."""
    close = {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close(dict(step.losses), dict(expected.losses), **close)
    assert step.norm == pytest.approx(expected.norm, rel=1e-10)
    placed = placements(trainer.model)
    trainer.optimizer.wait_for_parameters()
    whole = dict(alone.model.named_parameters())
    for name, parameter in trainer.model.named_parameters():
        torch.testing.assert_close(parameter.detach(), placed[name].part(whole[name].detach()), **close)
    if not trainer.gradients.shard:
        of_all = small_runs.gradients(alone)
        for name, gradient in small_runs.gradients(trainer).items():
            torch.testing.assert_close(gradient, placed[name].part(of_all[name]), msg=name, **close)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("zero1", [False, True])
def test_steps_are_those_of_one_rank(mpi_world, itself, kind, zero1):
    config = replace(small_runs.CONFIG, use_distributed_optimizer=zero1)
    with Communicator(mpi_world) as world:
        for tensor, pipeline in each_layout(world):
            for split in {False, tensor > 1}:
                trainer = small_runs.trainer(
                    kind, ProcessGrid(world, tensor=tensor, pipeline=pipeline), config=config, sequence_parallel=split
                )
                alone = small_runs.alone(itself, kind, config=config)
                for _ in range(3):
                    assert_same(trainer, alone, trainer.step(), alone.step())
                assert trainer.parameters() == alone.parameters()
                trainer.close()
