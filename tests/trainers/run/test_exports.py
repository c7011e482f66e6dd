"""The folders for transformers that a run writes: also after a kill, and where one cannot be written."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from commengine import UsageError
from trainers import pretrain_gpt
from trainers.checkpoints import disk, run_state
from trainers.run.exports import Exports
from trainers.run.metrics import Metrics
from trainers.settings.rules import require_valid
from trainers.tasks.commands import PRETRAIN_GPT
from trainers.tasks.gpt import GPTTask
from trainers.tasks.kinds import task_of

pytestmark = pytest.mark.mpi

SIZES = (
    "--mock-data --num-layers 1 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --vocab-size 50 --eval-iters 0 "
    "--micro-batch-size 1 --train-iters 2 --sample-tokens 0"
)


@contextlib.contextmanager
def begun(world, save: Path, *words: str) -> Iterator[tuple[GPTTask, Exports, run_state.CheckpointSaver]]:
    """A run of one step that has just saved, with its exports."""
    config = PRETRAIN_GPT.parse([*SIZES.split(), "--save", str(save), *words])
    require_valid(config, world.size)
    task = GPTTask.started(task_of(config).completed(world.size), world)
    metrics = Metrics(None, 0, 2, tensorboard=None, active=world.rank == 0)
    saver = run_state.CheckpointSaver(task.trainer)
    task.trainer.step()
    saver.start()
    yield task, Exports(task, metrics, saver), saver
    saver.finish()
    metrics.close()
    task.trainer.close()


def test_a_run_that_goes_on_finishes_what_a_kill_left(world, tmp_path):
    folder = Path(world.mpi.bcast(str(tmp_path)))
    hf, left = folder / "iter_0000001" / "hf", folder / "iter_0000001" / ".hf.commengine-tmp"
    for words, written in (["--save-hf"], True), ([], False), (["--no-save-hf"], False):
        with begun(world, folder, *words) as (_, exports, saver):
            saver.finish()
            if world.rank == 0:  # as a kill in the export leaves it
                disk.make_empty(left / "new")
                (left / "new" / "model.safetensors").write_text("half")
            world.barrier()
            exports.go_on()
            assert hf.is_dir() == written and not left.exists()
            world.barrier()
            if written:
                before = (hf / "model.safetensors").stat().st_mtime_ns, load_file(hf / "model.safetensors").keys()
                exports.go_on()  # it is there
                assert (hf / "model.safetensors").stat().st_mtime_ns == before[0] and len(before[1]) > 10
            world.barrier()
            exports.at_end()
            assert hf.is_dir() == (words != ["--no-save-hf"])
        world.barrier()


def test_only_an_export_that_was_asked_for_can_fail_a_run(world, tmp_path, capfd):
    folder = Path(world.mpi.bcast(str(tmp_path)))
    for words in ([], ["--save-hf"]):
        with begun(world, folder, *words) as (_, exports, saver):
            saver.finish()
            if world.rank == 0:
                (folder / "iter_0000001" / ".hf.commengine-tmp").write_text("no folder can be made here")
            world.barrier()
            if words:
                with pytest.raises(UsageError, match=r"writing .*\.hf\.commengine-tmp failed"):
                    exports.after_save()
            else:
                exports.at_end()
                said = capfd.readouterr().err
                assert ("ends without a folder hf for transformers: writing" in said) == (world.rank == 0)
            assert not (folder / "iter_0000001" / "hf").exists()
        world.barrier()


def test_a_folder_that_cannot_be_is_refused_before_anything_is_written(world, tmp_path, monkeypatch):
    folder = Path(world.mpi.bcast(str(tmp_path))) / "run"
    words = [*SIZES.split(), "--save", str(folder), "--save-hf", "--normalization", "RMSNorm"]
    monkeypatch.setattr("sys.argv", ["pretrain_gpt", *words])
    with pytest.raises(UsageError, match=r"--save-hf: .*normalization='RMSNorm'"):
        pretrain_gpt.main(world)
    world.barrier()
    assert list(folder.iterdir()) == []
