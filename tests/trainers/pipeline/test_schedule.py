"""Steps of a pipeline: losses, norms, all gradients and parameters are those of the whole model on one rank."""

import weakref
from dataclasses import replace

import pytest
import torch

from commengine import CollectiveError, Communicator, ProcessGrid
from tests.support.small_models import KINDS
from tests.support.training import small_runs
from tplayers import placements
from tplayers.formulas import kept_microbatches
from trainers.run.evaluation import evaluate

pytestmark = pytest.mark.mpi(min_size=2)

long, on_4 = pytest.mark.long, pytest.mark.sizes(2, 4)

LAYOUTS = {2: [(1, 2)], 4: [(1, 4), (2, 2), (1, 2)]}


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


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("kind", "zero1"),
    [
        pytest.param("gpt", True, marks=on_4),
        *((kind, False) for kind in KINDS),
        *(pytest.param(kind, True, marks=long) for kind in KINDS[1:]),
    ],
)
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "tied"),
    [
        (5, True), (2, False), *(pytest.param(count, tied, marks=long) for count in (3, 4, 8) for tied in (True, False))
    ],
)  # fmt: skip
def test_interleaved_stages_with_any_number_of_microbatches(mpi_world, itself, tied, count):
    """8 samples on each replica, in as many micro-batches: also fewer than stages, in the order without chunks."""
    kind = {"micro": 1, "layers": 9, "untie_embeddings_and_output_weights": not tied, "recompute": "full"}
    config = replace(small_runs.CONFIG, micro_batch_size=1, global_batch_size=count)
    with Communicator(mpi_world) as world:
        chunks = 2 if count >= world.size else 1
        grid = ProcessGrid(world, pipeline=world.size)
        trainer = small_runs.trainer("gpt", grid, config=config, chunks=chunks, size=count, **kind)
        alone = small_runs.alone(itself, "gpt", config=config, size=count, **kind)
        for _ in range(2):
            assert_same(trainer, alone, trainer.step(), alone.step())
        trainer.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt", *(pytest.param(kind, marks=long) for kind in ("llama", "bert"))])
def test_the_same_bits_at_every_layout(mpi_world, itself, kind):
    """With canonical shards: losses, norms and parameters of a pipeline are those of one rank, to the last bit."""
    config = replace(small_runs.CONFIG, micro_batch_size=1, use_distributed_optimizer=True, clip_grad=1.0)
    config = small_runs.Canonical(**vars(config))
    options = {"canonical": 4, "micro": 1, "dtype": torch.float32}
    options |= {"num_query_groups": 4} if kind == "llama" else {}
    with Communicator(mpi_world, order="tree") as world:
        for tensor, pipeline, chunks in [(1, 2, 1), (1, 2, 2), *([(2, 2, 1), (1, 4, 1)] if world.size == 4 else [])]:
            grid = ProcessGrid(world, tensor=tensor, pipeline=pipeline)
            trainer = small_runs.trainer(kind, grid, config=config, chunks=chunks, **options)
            alone = small_runs.alone(itself, kind, config=config, order="tree", **options)
            for _ in range(3):
                step, expected = trainer.step(), alone.step()
                assert dict(step.losses) == dict(expected.losses)
                assert step.norm == expected.norm
            trainer.optimizer.wait_for_parameters()
            placed, whole = placements(trainer.model), dict(alone.model.named_parameters())
            for name, parameter in trainer.model.named_parameters():
                assert torch.equal(parameter, placed[name].part(whole[name])), name
            trainer.close()


def test_stages_with_different_numbers_of_microbatches_are_an_error_on_all(mpi_world):
    with Communicator(mpi_world) as world, ProcessGrid(world, pipeline=world.size) as grid:
        trainer = small_runs.trainer("gpt", grid, micro=2 if world.rank else 4)
        with pytest.raises(CollectiveError, match=r"need the same number of micro-batches: .* from 2 to 4"):
            trainer.step()


class Finite(small_runs.Batches):
    """Three global batches of 8 samples."""

    def __len__(self):
        return 3


@pytest.mark.parametrize("kind", ["gpt", "bert"])
@pytest.mark.parametrize("chunks", [1, 2])
def test_an_evaluation_has_the_losses_of_one_rank(mpi_world, itself, chunks, kind):
    with Communicator(mpi_world) as world:
        grid = ProcessGrid(world, pipeline=2)
        trainer = small_runs.trainer(kind, grid, chunks=chunks, layers=8)
        alone = small_runs.alone(itself, kind, layers=8)
        found, expected = (
            evaluate(
                one.model, one.objective, Finite(kind, one.grid.data, micro=1), one.grid, iterations=2,
                schedule=schedule,
            )
            for one, schedule in ((trainer, trainer.schedule), (alone, None))
        )  # fmt: skip
        for name, mean in expected.items():
            assert found[name].loss == pytest.approx(mean.loss, rel=1e-10)
            assert found[name].items == mean.items
        trainer.close()


class LiveTensors:
    """Bytes of the tensors that autograd has saved for backwards and not let go, now and at most."""

    def __init__(self):
        self.bytes = self.most = 0

    def pack(self, tensor):
        kept = Kept(tensor)
        nbytes = tensor.nbytes
        self.bytes += nbytes
        self.most = max(self.most, self.bytes)
        weakref.finalize(kept, self._let_go, nbytes)
        return kept

    def _let_go(self, nbytes):
        self.bytes -= nbytes


class Kept:
    """A saved tensor."""

    def __init__(self, tensor):
        self.tensor = tensor


@pytest.mark.parametrize("count", [1, 4])
def test_a_stage_keeps_the_activations_of_so_many_microbatches_as_the_formula_says(mpi_world, count):
    """min(p - i, m) of stage i (Narayanan et al. 2021, section 2.2), counted by what autograd holds."""
    config = replace(small_runs.CONFIG, micro_batch_size=2, global_batch_size=2 * count)
    with Communicator(mpi_world) as world, ProcessGrid(world, pipeline=world.size) as grid:
        trainer = small_runs.trainer("gpt", grid, config=config, size=2 * count, layers=4)
        live, each = LiveTensors(), []
        forward = trainer.schedule._forward

        def counted(*args):
            before = live.bytes
            result = forward(*args)
            each.append(live.bytes - before)
            return result

        trainer.schedule._forward = counted
        with torch.autograd.graph.saved_tensors_hooks(live.pack, lambda kept: kept.tensor):
            trainer.step()
        expected = kept_microbatches(world.rank, world.size, count)
        assert len(each) == count and len(set(each)) == 1 and live.bytes == 0
        # While the backward of one is under way, its forward's tensors are there, and some of its own.
        assert expected <= live.most / each[0] < expected + 0.5
        trainer.close()
