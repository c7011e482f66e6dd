"""Settings that stand in the run's settings and in the model: a contradiction is one error, the same on all ranks."""

from dataclasses import replace

import pytest
import torch

from commengine import ProcessGrid, UsageError
from tests.support.small_models import VOCAB, S
from tests.support.training import small_runs
from tplayers import GPT, GPTConfig, ModelPart, initialize, use_canonical_shards
from trainers.settings.commands import GPTSettings, TrainSettings
from trainers.tasks.gpt import NextToken
from trainers.training.trainer import Trainer

pytestmark = [pytest.mark.mpi(min_size=2)]

SHAPE = GPTConfig(1, 32, 4, VOCAB, S, hidden_dropout=0.0, attention_dropout=0.0, make_vocab_size_divisible_by=8)
CONFIG = small_runs.CONFIG


def made(grid: ProcessGrid, config: TrainSettings, shape: GPTConfig = SHAPE, *, size: int = 8,
         dtype: torch.dtype = torch.float32, canonical: int | None = None) -> Trainer:  # fmt: skip
    model = GPT(shape, grid.tensor, dtype=dtype)
    initialize(model, 1)
    if canonical is not None:
        use_canonical_shards(model, grid.tensor, canonical)
    return Trainer(config, grid, model, NextToken(), small_runs.Batches("gpt", grid.data, micro=1, size=size))


@pytest.mark.parametrize(
    "run, shape, more, problem",
    [
        ({}, {"sequence_parallel": True}, {}, "sequence_parallel: False in the settings of the run, and True in"),
        ({"sequence_parallel": True}, {}, {}, "sequence_parallel: True in the settings of the run, and False in"),
        ({"bf16": True}, {}, {}, "is of float32, and bf16=True, fp16=False need bfloat16"),
        ({"fp16": True}, {}, {"dtype": torch.bfloat16}, "is of bfloat16, and bf16=False, fp16=True need float16"),
        ({}, {}, {"dtype": torch.float16}, "is of float16, and bf16=False, fp16=False need float32"),
        ({}, {}, {"canonical": 4}, "canonical shards: none in the settings of the run, and 4 in the model"),
        ({}, {}, {"size": 4}, "global_batch_size: 8 in the settings of the run, and 4 in its batches"),
    ],
)
def test_a_contradiction_is_one_error_of_all_ranks(mpi_world, run, shape, more, problem):
    from commengine import Communicator

    with Communicator(mpi_world, order="tree" if "canonical" in more else None) as world:
        grid = ProcessGrid(world, tensor=2)
        with pytest.raises(UsageError, match=problem):
            made(grid, replace(CONFIG, **run), replace(SHAPE, **shape), **more)
        grid.close()


def test_the_models_groups_are_those_of_the_grid(world, alone):
    shape, batches = replace(SHAPE, num_layers=2), small_runs.Batches("gpt", alone, micro=1, size=8)
    first = ModelPart(2, (range(1),))
    for group, part, axes, problem in (
        (alone, None, {"tensor": 2}, "the tensor group: rank 0 of 1 in the model, and rank "),
        (alone, None, {"pipeline": 2}, r"part: of layers \[0, 1\] of 2, on stage [01] of 2 of the grid"),
        (alone, first, {"pipeline": 2}, r"part: of layers \[0\] of 2, on stage 1 of 2 of the grid"),
    ):
        grid = ProcessGrid(world, **axes)
        with pytest.raises(UsageError, match=problem):
            Trainer(CONFIG, grid, GPT(shape, group, part=part), NextToken(), batches)
        grid.close()
    with pytest.raises(ValueError, match="num_layers=2: the model has 2 layers, and the part is one of 3"):
        GPT(shape, alone, part=ModelPart.whole(3))


def test_one_ranks_contradiction_is_told_to_all(world):
    with ProcessGrid(world, tensor=2) as grid, pytest.raises(UsageError, match="sequence_parallel: True"):
        made(grid, replace(CONFIG, sequence_parallel=world.rank == 1))


def test_a_transformers_own_settings_are_compared_too(world):
    """`GPTSettings` has the shape of the model; its None says nothing."""
    own = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "hidden_dropout": 0.0}
    shared = {item: getattr(CONFIG, item) for item in ("lr", "global_batch_size", "micro_batch_size")}
    rest = {"make_vocab_size_divisible_by": 8, "tensor_model_parallel_size": 2}
    config = GPTSettings(**own, **shared, **rest, attention_dropout=0.0)
    grid = ProcessGrid(world, tensor=2)
    made(grid, config).close()
    grid = ProcessGrid(world, tensor=2)
    with pytest.raises(
        UsageError, match=r"hidden_dropout: 0\.1 in the settings of the run, and 0\.0 in those of the model"
    ):
        made(grid, replace(config, hidden_dropout=0.1))
    grid.close()


def test_the_losses_of_routers_are_whole_where_both_say_the_same(world, alone):
    """A rank of a tensor group with sequence parallelism has a share of each sequence."""
    found = []
    for group, sequence in ((world, True), (alone, False)):
        grid = ProcessGrid(group, tensor=group.size)
        options = {"num_experts": 2, "moe_aux_loss_coeff": 1.0, "hidden_dropout": 0.0, "attention_dropout": 0.0}
        trainer = small_runs.trainer("llama", grid, sequence_parallel=sequence, **options)
        found.append(dict(trainer.step().router_losses))
        trainer.close()
    assert len(found[0]) == 2 and found[0] == pytest.approx(found[1])
