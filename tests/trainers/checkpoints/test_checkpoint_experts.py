"""Files of a model with experts over expert groups: byte for byte those of one rank, which every layout can read."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from commengine import Communicator, ProcessGrid
from tests.support.training import small_runs
from tplayers import placements
from trainers.checkpoints.checkpoint import MODEL, OPTIMIZER, Progress, load, load_model
from trainers.checkpoints.checkpoint_writer import CheckpointWriter
from trainers.checks.digests import weights_digest
from trainers.weights.export import SmallFiles, export

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.sizes(2, 4)]

OPTIONS = {
    "layers": 2, "dtype": torch.float32, "num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 16,
    "attention_dropout": 0.0, "hidden_dropout": 0.0, "add_qkv_bias": False,
}  # fmt: skip
#: sizes of the tensor, context, pipeline and expert groups
LAYOUTS = {
    2: [(1, 1, 1, 2)], 4: [(1, 1, 1, 2), (1, 1, 1, 4), (2, 1, 1, 2), (1, 2, 1, 2), (1, 1, 2, 2)],
}  # fmt: skip


@pytest.fixture
def folder(mpi_world, tmp_path):
    """Rank 0's temporary folder, on all ranks."""
    return Path(mpi_world.bcast(str(tmp_path)))


def saved(made, folder, number, *, background=False):
    """Save the trainer as step ``number``, and return the folder of the checkpoint."""
    progress = Progress(number, made.optimizer.updates, masters=made.optimizer.masters)
    CheckpointWriter(folder, progress, made.model, made.optimizer, {}, made.grid, background=background).finish()
    return folder / f"iter_{number:07d}"


def state(made):
    """All state of this rank by name: parameters and moments."""
    made.optimizer.wait_for_parameters()
    found = {name: one.detach().clone() for name, one in made.model.named_parameters()}
    return found | {name: one.clone() for name, one in made.optimizer.unsharded()}


@pytest.mark.sizes(2)
@pytest.mark.parametrize("sharded", [False, True])
def test_files_are_those_of_one_rank(mpi_world, itself, folder, sharded):
    """A state that one rank saved is read at every layout, and saved again: the same bytes, and as an export."""
    mpi_world.barrier()
    config = replace(small_runs.CONFIG, use_distributed_optimizer=sharded)
    one = small_runs.alone(itself, "llama", **OPTIONS)
    for _ in range(2):
        one.step()
    if mpi_world.rank == 0:
        truth = saved(one, folder / "one", 2)
        export(one.model, one.grid, folder / "one-hf", SmallFiles())
    truth = folder / "one" / "iter_0000002"
    mpi_world.barrier()
    with Communicator(mpi_world) as world:
        for number, (tensor, context, pipeline, expert) in enumerate(LAYOUTS[world.size]):
            grid = ProcessGrid(world, tensor=tensor, context=context, pipeline=pipeline, expert=expert)
            made = small_runs.trainer("llama", grid, config=config, **OPTIONS)
            load(truth, Progress(2, 2), made.model, made.optimizer, grid)
            placed, whole = placements(made.model), state(one)
            for name, tensor_of in state(made).items():
                part = placed[name.removeprefix("exp_avg.").removeprefix("exp_avg_sq.")].part(whole[name])
                assert torch.equal(tensor_of, part), name
            name = f"{number}-{sharded}"
            again = saved(made, folder / name, 2, background=number % 2 == 1)
            export(made.model, grid, folder / f"{name}-hf", SmallFiles())
            if grid.expert_replicas.rank == 0:
                digest = weights_digest(made)
                assert digest == (weights_digest(one) if grid.replicas.rank == grid.pipeline.rank == 0 else 0)
            world.barrier()
            for file in (MODEL, OPTIMIZER):
                assert (again / file).read_bytes() == (truth / file).read_bytes(), (file, name)
            same = [(folder / each / "model.safetensors").read_bytes() for each in ("one-hf", f"{name}-hf")]
            assert same[0] == same[1], name
            # The model alone, read on one rank.
            alone = small_runs.alone(itself, "llama", **OPTIONS)
            load_model(again, alone.model, alone.grid.world)
            for key, value in alone.model.named_parameters():
                assert torch.equal(value, whole[key])
            alone.close()
            made.close()
    one.close()


@pytest.mark.sizes(2)
def test_masters_of_experts_go_along(mpi_world, itself, folder):
    """In bfloat16 with ZeRO-1: a run goes on at the layout of one rank, and back, without a change of its state."""
    mpi_world.barrier()
    options = OPTIONS | {"dtype": torch.bfloat16}
    config = replace(small_runs.CONFIG, use_distributed_optimizer=True, bf16=True)
    with Communicator(mpi_world) as world:
        for number, (tensor, context, pipeline, expert) in enumerate(LAYOUTS[world.size]):
            grid = ProcessGrid(world, tensor=tensor, context=context, pipeline=pipeline, expert=expert)
            made = small_runs.trainer("llama", grid, config=config, **options)
            made.step()
            first = saved(made, folder / str(number), 1)
            world.barrier()
            one = small_runs.alone(itself, "llama", config=replace(config, use_distributed_optimizer=False), **options)
            load(first, Progress(1, 1, masters=True), one.model, one.optimizer, one.grid)
            if world.rank == 0:
                saved(one, folder / f"{number}-one", 1)
            world.barrier()
            for file in (MODEL, OPTIMIZER):
                assert (first / file).read_bytes() == (folder / f"{number}-one" / first.name / file).read_bytes()
            world.barrier()
            one.close()
            made.close()
