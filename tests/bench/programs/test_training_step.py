"""Our contestant of ``bench.contest step`` is the real trainer, and trains the task as plain PyTorch does."""

import pytest
from safetensors.torch import save_file

from bench.programs.step_task import StepTask

TASK = StepTask(
    vocab_size=96, hidden_size=32, num_layers=2, num_attention_heads=4, seq_length=16, lr=0.02, weight_decay=0.1,
    clip_grad=0.5,
)  # fmt: skip


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(("tensor", "overlap"), [(2, False), (1, False), (1, True)])
@pytest.mark.parametrize("model", [{}, {"model": "bert"}, {"model": "bert", "masked_positions_only": True}], ids=str)
def test_losses_are_those_of_plain_torch(model, tensor, overlap, mpi_world, tmp_path):
    from dataclasses import replace

    import torch

    from bench.peers.models import reference_state
    from bench.peers.plain import adamw, batch, build, make_clip, make_step
    from bench.programs.training_step import make_trainer
    from commengine import Communicator
    from trainers.training.trainer import Trainer

    task = replace(TASK, **model, weights=mpi_world.bcast(str(tmp_path / "weights.safetensors")))
    if mpi_world.rank == 0:
        save_file(reference_state(task), task.weights)
    mpi_world.Barrier()
    plain = build(task)
    clip = make_clip(task, plain)
    step = make_step(plain, adamw(task, plain.parameters()), batch(task), clip)
    expected = [step() for _ in range(5)]
    assert max(expected) - min(expected) > 0.1  # it learns, so an update that is missing shows
    with Communicator(mpi_world) as world:
        trainer = make_trainer(world, task, tensor, overlap=overlap)
        assert type(trainer) is Trainer
        found = [trainer.step().loss for _ in range(5)]
        trainer.close()
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=0, atol=2e-5)
