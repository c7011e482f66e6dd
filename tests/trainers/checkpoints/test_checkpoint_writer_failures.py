"""A save that is killed, or fails on any rank, at any of its file operations: the checkpoint before stays as it was."""

import contextlib
import json
import re
from pathlib import Path

import pytest
from safetensors.torch import load_file

from commengine import UsageError
from tests.support.file_operations import FileOperations
from tests.support.small_disk import resize, small_disk, why_not
from trainers.checkpoints import checkpoint, pointer, run_folder
from trainers.checkpoints.checkpoint_writer import CheckpointWriter
from trainers.settings.commands import TrainSettings

FULL = OSError(28, "No space left on device")


class Killed(BaseException):
    """The process is gone: nothing that it would do afterwards happens."""


@pytest.fixture
def folder(world, tmp_path):
    """Rank 0's temporary folder, on all ranks."""
    return Path(world.mpi.bcast(str(tmp_path)))


def made(world, tensor):
    from commengine import ProcessGrid
    from tplayers import GPT, GPTConfig, initialize
    from trainers.training.optimizer import Optimizer
    from trainers.training.reduction import GradientBuckets

    grid = ProcessGrid(world, tensor=tensor)
    model = GPT(GPTConfig(1, 16, 4, 30, 8, make_vocab_size_divisible_by=32), grid.tensor)
    initialize(model, 1)
    gradients = GradientBuckets(model, grid.data, overlap=False, bucket_size=10_000)
    return grid, model, Optimizer(gradients, weight_decay=0.1, betas=(0.9, 0.99), eps=1e-8)


def save(folder, made, value, iteration, background=False):
    """A checkpoint that can be told from others by ``value``."""
    import torch

    grid, model, optimizer = made
    with torch.no_grad():
        model.final_norm.bias.fill_(value)
    settings = {"num_layers": 1}
    CheckpointWriter(
        folder, checkpoint.Progress(iteration, iteration), model, optimizer, settings, grid, background=background
    ).finish()


def value_of(found):
    """The value of a checkpoint that must be whole; None for none."""
    if found is None:
        return None
    assert re.fullmatch(r"iter_\d{7}(\.old)?", found.name)  # .old: its replacement was killed between two renames
    assert json.loads((found / "state.json").read_text())["settings"] == {"num_layers": 1}
    load_file(found / "optimizer.safetensors")
    return load_file(found / "model.safetensors")["final_norm.bias"].unique().item()


def newest(folder):
    """What the same command would go on from: `--load` and `--save` are the same folder."""
    return value_of(run_folder.checkpoint_to_load(TrainSettings(load=str(folder), save=str(folder))))


def stop_at(number, error, *, once=False):
    """Before change ``number`` of this process, and before all later ones unless ``once``: ``error``."""

    def before(count, name):
        if count == number or (count > number and not once):
            raise error

    return FileOperations(before)


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("case", "background", "step"),
    [
        pytest.param("first", False, 1, marks=pytest.mark.long),
        pytest.param("same name", False, 1, marks=pytest.mark.long),
        pytest.param("second", True, 1, marks=pytest.mark.long),
        ("second", True, 3),
    ],
)
def test_a_kill_before_any_change_leaves_the_old_checkpoint_or_the_new_one(alone, tmp_path, case, background, step):
    """Then the same command goes on, and its next save leaves nothing behind of the one that was cut."""
    this = made(alone, 1)
    old, iteration = (None, 1) if case == "first" else (0.0, 1 if case == "same name" else 2)
    seen = set()
    for number in range(step, 200, step):
        folder = tmp_path / str(number)
        if case != "first":
            save(folder, this, 0.0, 1)
        operations = stop_at(number, Killed())
        try:
            with operations:
                save(folder, this, 1.0, iteration, background)
        except Killed:
            seen.add(found := newest(folder))
            assert found in (old, 1.0)
            save(folder, this, 2.0, iteration + 1)
            assert newest(folder) == 2.0
            assert all(re.fullmatch(r"iter_\d{7}|latest", path.name) for path in folder.iterdir())
        else:
            break
    assert number > 15 and number - step <= operations.count < number, (number, operations.count)
    assert seen == {old, 1.0}
    this[0].close()


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize(("again", "background"), [(True, False), pytest.param(False, True, marks=pytest.mark.long)])
def test_an_error_at_any_change_of_any_rank_is_one_error_on_all(world, folder, again, background):
    """again: the new checkpoint has the name of the old one, which another run left."""
    this = made(world, world.size)
    save(folder, this, 0.0, 1)
    old, failures = 0.0, 0
    for rank in range(world.size):
        for number in range(1, 200):
            new, iteration = float(100 * rank + number), 1 if again else 2
            try:
                with stop_at(number if rank == world.rank else 10**9, FULL):
                    save(folder, this, new, iteration, background)
            except UsageError as error:
                failures += 1
                said = str(error)
                assert said.startswith(f"--save {folder}: writing {folder}/") and ".tmp/" not in said, said
                assert (
                    "No space left on device (a checkpoint of this run takes 0.1 MB); as they were: iter_0000001"
                    in said
                )
                assert newest(folder) in (old, new)
                world.barrier()
                save(folder, this, new, iteration)  # what failed does not stand in the way
                assert newest(folder) == new
                old = new
                world.barrier()
            else:
                old = new
                break
    assert failures >= 20
    save(folder, this, 0.0, 3)
    assert sorted(path.name for path in folder.iterdir())[0] == "iter_0000001" and not list(folder.glob("*.*"))
    this[0].close()


@pytest.mark.mpi
def test_nothing_but_what_failed_is_removed(world, folder):
    this = made(world, 1)
    save(folder, this, 0.0, 1)
    before = {path.name: path.stat().st_ino for path in (folder / "iter_0000001").iterdir()}
    with pytest.raises(UsageError, match="No space left"), stop_at(9 if world.rank == 0 else 10**9, FULL, once=True):
        save(folder, this, 1.0, 2)
    world.barrier()  # rank 0 removes the files when all ranks know of the error
    assert {path.name: path.stat().st_ino for path in (folder / "iter_0000001").iterdir()} == before
    assert sorted(path.name for path in folder.iterdir()) == ["iter_0000001", "latest"]
    world.barrier()
    this[0].close()


# A real full disk, and the whole command --------------------------------------------------------------------------

#: kilobytes of the disk: nothing fits, half of the first file, all but the last file, one checkpoint but not two
SIZES = (8, 120, 240, 400, 690)


@pytest.mark.long
@pytest.mark.slow
def test_a_full_disk_ends_the_run_with_one_error_and_it_goes_on_when_there_is_room(tmp_path, pretrain, mock, rows):
    """With MPI-IO a rank whose write failed was waited for in a collective of the file, for ever (8k, 120k, ...)."""
    if reason := why_not():
        pytest.skip(f"no small disk can be mounted: {reason}")
    with contextlib.ExitStack() as disks:
        commands = []
        for size in SIZES:
            place = tmp_path / str(size)
            disks.enter_context(small_disk(place, size))
            save = ["--save", place / "d", "--load", place / "d", "--tensorboard-dir", tmp_path / f"board{size}"]
            split = ["--tensor-model-parallel-size", "2", "--save-interval", "2", "--train-iters", "6"]
            commands.append((2, [*mock, *split, *save, "--distributed-timeout-minutes", "0.5", "--log-interval", "6"]))
        for size, outcome in zip(SIZES, pretrain(*commands), strict=True):
            assert outcome.codes == [2, 2], (size, outcome.err)
            assert "Traceback" not in "".join(outcome.err)
            (line,) = [line for line in outcome.err[0].splitlines() if line.startswith("error: ")]
            place = tmp_path / str(size) / "d"
            assert re.search(rf"--save {place}: writing {place}/.*: No space left on device", line)
            kept = pointer.latest(place)
            assert (kept.name if kept else "no older checkpoint") in line
            assert not list(place.glob("*.tmp"))
            resize(tmp_path / str(size), 8000)
        losses = []
        for size, outcome in zip(SIZES, pretrain(*commands), strict=True):
            assert outcome.codes == [0, 0], (size, outcome.err)
            found = pointer.latest(tmp_path / str(size) / "d")
            assert found.name == "iter_0000006"
            losses.append((found / "model.safetensors").read_bytes())
        assert len(set(losses)) == 1
