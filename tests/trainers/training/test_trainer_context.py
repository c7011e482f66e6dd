"""A trainer with context groups: at every (tensor, context, pipeline, data) of 2 and 4 ranks, the steps of one rank."""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from commengine import CollectiveError, CollectiveMismatch, Communicator, ProcessGrid
from tests.support.training import small_runs
from tplayers import ContextGroup

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.sizes(2, 4), pytest.mark.timeout(600)]

KINDS = ("gpt", "llama", "bert")
METHODS = ("ulysses", "ring", "gather")
STEPS = 3
LAYERS = 2


class Layout(NamedTuple):
    """Sizes of groups."""

    tensor: int
    context: int
    pipeline: int
    data: int


LAYOUTS = {2: [Layout(1, 2, 1, 1)], 4: [Layout(1, 4, 1, 1), Layout(2, 2, 1, 1), Layout(1, 2, 2, 1), Layout(1, 2, 1, 2)]}


@pytest.mark.some(4)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", KINDS)
def test_steps_in_float64(mpi_world, itself, kind, method):
    truth = small_runs.steps_of(small_runs.alone(itself, kind, layers=LAYERS), STEPS)
    with Communicator(mpi_world) as world:
        for number, layout in enumerate(LAYOUTS[world.size]):
            sharded = number % 2 == METHODS.index(method) % 2
            config = replace(small_runs.CONFIG, use_distributed_optimizer=sharded)
            grid = ProcessGrid(world, tensor=layout.tensor, context=layout.context, pipeline=layout.pipeline)
            options = {"sequence_parallel": layout.tensor > 1, "recompute": "selective" if sharded else None}
            trainer = small_runs.trainer(kind, grid, config=config, layers=LAYERS, method=method, **options)
            small_runs.require_steps(trainer, truth, f"{layout}, {sharded=}")
            trainer.close()


@pytest.mark.long
@pytest.mark.sizes(2)
@pytest.mark.parametrize("method", METHODS)
def test_losses_in_float32(mpi_world, itself, method):
    options = {"layers": LAYERS, "dtype": torch.float32}
    whole = small_runs.alone(itself, "llama", **options)
    with Communicator(mpi_world) as world:
        trainer = small_runs.trainer("llama", ProcessGrid(world, context=2), method=method, **options)
        for _ in range(20):
            assert trainer.step().loss == pytest.approx(whole.step().loss, rel=1e-5)
        trainer.close()


@pytest.mark.sizes(2)
def test_canonical_shards_refuse_a_ring(mpi_world):
    config = small_runs.Canonical(**vars(small_runs.CONFIG))
    with (
        Communicator(mpi_world, order="tree") as world,
        ProcessGrid(world, context=2) as grid,
        pytest.raises(ValueError, match=r"context_method='ring' has other bits .*; valid: 'ulysses'"),
    ):
        small_runs.trainer("gpt", grid, config=config, layers=LAYERS, canonical=4, method="ring")


@pytest.mark.sizes(2)
def test_a_model_without_the_group_and_unlike_groups_are_refused(mpi_world, itself):
    model = small_runs.alone(itself, "gpt", layers=LAYERS).model
    with Communicator(mpi_world) as world, ProcessGrid(world, context=2) as grid:
        with pytest.raises(CollectiveError, match=r"without a context group knows the axes .* has context, too"):
            small_runs.Trainer(
                small_runs.CONFIG, grid, model, small_runs.Losses("gpt"), small_runs.Batches("gpt", grid.data)
            )
        with pytest.raises(CollectiveMismatch, match="ContextGroup"):
            ContextGroup(grid.context, "ring" if grid.context.rank else "gather")


@pytest.mark.sizes(4)
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_canonical_shards_in_a_pipeline_have_the_bits_of_one_rank(mpi_world, itself, kind, sharded):
    """Over steps, because the first one may make what a later one needs. sharded: the optimizer, among the group."""
    if mpi_world.size != 4:
        pytest.skip("for 4 ranks")
    config = small_runs.Canonical(**vars(small_runs.CONFIG))
    options = {"layers": LAYERS, "canonical": 4, "canonical_parts": 2, "micro": 1}
    if kind == "llama":  # each shard has its own keys
        options["num_query_groups"] = 4
    whole = small_runs.alone(itself, kind, order="tree", config=config, **options)
    with Communicator(mpi_world, order="tree") as world:
        config = replace(config, use_distributed_optimizer=sharded)
        trainer = small_runs.trainer(kind, ProcessGrid(world, context=2, pipeline=2), config=config, **options)
        for _ in range(STEPS):
            trainer.model.whole()
            assert trainer.step() == whole.step()
        trainer.close()
