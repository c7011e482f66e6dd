"""Generation stage by stage: the tokens are those of the whole model on one rank."""

import pytest
import torch

from commengine import Communicator, ProcessGrid
from tests.support.small_models import S, made
from tests.support.training.small_runs import parts
from tplayers import Sampling, generate

pytestmark = pytest.mark.mpi(min_size=2)

PROMPTS = [[1, 2, 3], [4], [5, 6]]


@pytest.mark.parametrize("kind", ["gpt", "llama"])
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("sampling", [None, Sampling(temperature=0.7, top_k=5)])
def test_the_tokens_are_those_of_the_whole_model(mpi_world, alone, sampling, chunks, kind):
    options = {"num_layers": 8, "dtype": torch.float64, "sequence_parallel": True}
    expected = generate(made(kind, alone.comm, **options), PROMPTS, S, sampling=sampling, samples=2, warn=False)
    with Communicator(mpi_world) as world, ProcessGrid(world, tensor=world.size // 2, pipeline=2) as grid:
        model = made(kind, grid.tensor, part=parts(8, 2, chunks)[grid.pipeline.rank], **options)
        found = generate(model, PROMPTS, S, sampling=sampling, samples=2, warn=False, pipeline=grid.pipeline)
    assert found == expected  # longer than the model's positions, so rows slide, too
