"""Every layout of at most 4 ranks, and six of 8: the first and the 20th step, equal bits, resumes from any to any.

``make test-long`` runs the former, and the latter is a command of half an hour:

    RANKS=8 tests/run --long tests/trainers/pipeline/test_schedule_layouts.py
"""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from commengine import Communicator, ProcessGrid
from tests.support.training import small_runs
from tplayers import placements
from trainers.tasks.kinds import task_of

pytestmark = [pytest.mark.long, pytest.mark.mpi(min_size=2), pytest.mark.timeout(900)]

KINDS = ("gpt", "llama", "bert")
STEPS = 20


class Layout(NamedTuple):
    """Sizes of groups, and the stretches of a stage's layers."""

    tensor: int
    pipeline: int
    data: int
    chunks: int = 1


#: by the number of ranks, of which a layout may use fewer
LAYOUTS = {
    2: [Layout(1, 1, 2), Layout(2, 1, 1), Layout(1, 2, 1), Layout(1, 2, 1, 2)],
    4: [
        Layout(1, 3, 1), Layout(1, 1, 4), Layout(2, 1, 2), Layout(4, 1, 1), Layout(2, 2, 1), Layout(1, 2, 2),
        Layout(1, 4, 1), Layout(1, 2, 2, 2),
    ],
    8: [
        Layout(1, 8, 1), Layout(2, 4, 1), Layout(4, 2, 1), Layout(2, 2, 2), Layout(1, 4, 2), Layout(1, 2, 4, 2),
    ],
}  # fmt: skip


def each(world):
    """The layouts, and for each the ranks that it uses; None on the others."""
    for layout in LAYOUTS[world.size]:
        used = layout.tensor * layout.pipeline * layout.data
        mine = world.split(0 if world.rank < used else None, name="used")
        if mine is not None:
            yield layout, mine
            mine.close()
        world.mpi.Barrier()


def layers(world):
    """A layer for each stretch of the longest pipeline."""
    return max(4, world.size)


def small(kind, layout, comm, count, **options):
    grid = ProcessGrid(comm, tensor=layout.tensor, pipeline=layout.pipeline)
    return small_runs.trainer(kind, grid, chunks=layout.chunks, layers=count, micro=1, **options)


class Truth(NamedTuple):
    """A step on one rank. parameters, gradients: of the whole model after it, by name, where they are compared."""

    losses: dict
    norm: float
    parameters: dict
    gradients: dict


def truths(itself, kind, count, steps, compared, order=None, **options):
    """The steps of the whole model on this rank."""
    alone = small_runs.alone(itself, kind, order=order, layers=count, micro=1, **options)
    found = []
    for number in range(steps):
        step = alone.step()
        parameters, gradients = {}, {}
        if number in compared:
            parameters = {name: one.detach().clone() for name, one in alone.model.named_parameters()}
            gradients = small_runs.gradients(alone)
        found.append(Truth(dict(step.losses), step.norm, parameters, gradients))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_and_the_20th_step_in_float64(mpi_world, itself, kind):
    """Losses, norms and all gradients, which Adam would hide a factor of, and the parameters after them."""
    close = {"rtol": 1e-10, "atol": 1e-12}
    config = replace(small_runs.CONFIG, micro_batch_size=1)
    with Communicator(mpi_world) as world:
        expected = truths(itself, kind, layers(world), STEPS, (0, STEPS - 1), config=config)
        for layout, used in each(world):
            trainer = small(kind, layout, used, layers(world), config=config, sequence_parallel=layout.tensor == 2)
            placed = placements(trainer.model)
            for truth in expected:
                step = trainer.step()
                if not truth.parameters:
                    continue
                torch.testing.assert_close(dict(step.losses), truth.losses, **close)
                assert step.norm == pytest.approx(truth.norm, rel=1e-10)
                for name, gradient in small_runs.gradients(trainer).items():
                    torch.testing.assert_close(gradient, placed[name].part(truth.gradients[name]), msg=name, **close)
                for name, parameter in trainer.model.named_parameters():
                    torch.testing.assert_close(parameter.detach(), placed[name].part(truth.parameters[name]), **close)
            trainer.close()


@pytest.mark.parametrize("kind", KINDS)
def test_losses_of_20_steps_in_float32(mpi_world, itself, kind):
    options = {
        "config": replace(small_runs.CONFIG, micro_batch_size=1, use_distributed_optimizer=True), "dtype": torch.float32
    }  # fmt: skip
    with Communicator(mpi_world) as world:
        expected = truths(itself, kind, layers(world), STEPS, (), **options)
        for layout, used in each(world):
            trainer = small(kind, layout, used, layers(world), **options)
            for truth in expected:
                assert trainer.step().loss == pytest.approx(sum(truth.losses.values()), rel=1e-5)
            trainer.close()


@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_of_one_rank(mpi_world, itself, kind):
    config = small_runs.Canonical(**vars(replace(small_runs.CONFIG, micro_batch_size=1, clip_grad=1.0)))
    options = {"config": config, "canonical": 4, "dtype": torch.float32}
    options |= {"num_query_groups": 4} if kind == "llama" else {}
    with Communicator(mpi_world, order="tree") as world:
        expected = truths(itself, kind, layers(world), 5, (4,), order="tree", **options)
        for layout, used in each(world):
            trainer = small(kind, layout, used, layers(world), **options)
            placed = placements(trainer.model)
            for truth in expected:
                step = trainer.step()
                assert (dict(step.losses), step.norm) == (truth.losses, truth.norm)
            for name, parameter in trainer.model.named_parameters():
                assert torch.equal(parameter, placed[name].part(expected[-1].parameters[name])), name
            trainer.close()


# ---- resumes, with the trainer's own options and files


def settings(layout, kind, count, **folders):
    from trainers.settings.commands import BERTSettings, GPTSettings

    llama = {
        "normalization": "RMSNorm", "swiglu": True, "position_embedding_type": "rope", "disable_bias_linear": True,
        "untie_embeddings_and_output_weights": True, "group_query_attention": True, "num_query_groups": 4,
    }  # fmt: skip
    each_stretch = count // (layout.pipeline * layout.chunks) if layout.chunks > 1 else None
    return (BERTSettings if kind == "bert" else GPTSettings)(
        mock_data=True, vocab_size=100, num_layers=count, hidden_size=32, num_attention_heads=4, seq_length=16,
        make_vocab_size_divisible_by=128, global_batch_size=8, micro_batch_size=1, train_iters=9, lr=1e-3,
        deterministic=True, tensor_model_parallel_size=layout.tensor, pipeline_model_parallel_size=layout.pipeline,
        num_layers_per_virtual_pipeline_stage=each_stretch, use_distributed_optimizer=layout.data > 1,
        **(llama if kind == "llama" else {}), **{name: str(folder) for name, folder in folders.items()},
    )  # fmt: skip


def went_on(layout, kind, comm, count, steps, **folders):
    """The folder of the checkpoint that a run writes after some steps. It resumes if ``load`` is given."""
    from trainers.checkpoints.run_state import CheckpointSaver, resume

    config = task_of(settings(layout, kind, count, **folders)).completed(comm.size)
    trainer = task_of(config).new_trainer(comm, task_of(config).open_corpus())
    if "load" in folders:
        assert resume(trainer) is not None
    for _ in range(steps):
        trainer.step()
    trainer.optimizer.wait_for_parameters()
    CheckpointSaver(trainer).start()
    trainer.close()
    return Path(folders["save"]) / f"iter_{trainer.iteration:07}"


def weights(folder):
    """The bytes of the model and of the optimizer's state."""
    return [(folder / f"{name}.safetensors").read_bytes() for name in ("model", "optimizer")]


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_from_any_layout_at_any(mpi_world, itself, kind, tmp_path):
    """Two steps and a third: the files are those of the run of three steps on one rank, byte for byte."""
    root = mpi_world.bcast(tmp_path)
    with Communicator(mpi_world, order="tree") as world, Communicator(itself, order="tree") as single:
        mine = root / f"alone-{world.rank}"
        alone = Layout(1, 1, 1)
        first = weights(went_on(alone, kind, single, layers(world), 2, save=mine))
        last = weights(went_on(alone, kind, single, layers(world), 3, save=root / f"straight-{world.rank}"))
        layouts = [layout for layout in LAYOUTS[world.size] if layout.pipeline != 3]
        for before in layouts:
            saved = root / f"{before}"
            assert weights(went_on(before, kind, world, layers(world), 2, save=saved)) == first
            for after in layouts:
                found = went_on(after, kind, world, layers(world), 1, load=saved, save=root / f"{before} to {after}")
                assert weights(found) == last
