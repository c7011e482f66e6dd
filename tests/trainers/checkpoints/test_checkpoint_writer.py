"""Checkpoints that are written in the background hold the state of the moment at which they were begun."""

import threading
from pathlib import Path

import pytest
import torch

from commengine import UsageError
from trainers.checkpoints import disk, pointer, run_state
from trainers.checkpoints.checkpoint_writer import DONE, FAILED, WRITING, CheckpointWriter

pytestmark = pytest.mark.mpi


@pytest.fixture
def folder(world, tmp_path):
    """Rank 0's temporary folder, on all ranks."""
    return Path(world.mpi.bcast(str(tmp_path)))


@pytest.fixture
def held(monkeypatch):
    """An event that writers in the background wait for."""
    released = threading.Event()
    plain = disk.RangeWriter.write

    def write(self, start, data):
        if threading.current_thread() is not threading.main_thread():
            assert released.wait(30)
        plain(self, start, data)

    monkeypatch.setattr(disk.RangeWriter, "write", write)
    return released


def agreed(world, saver):
    """The largest state of all ranks."""
    state = torch.tensor([saver.state()])
    world.all_reduce(state, "max")
    return int(state)


LAYOUTS = [{}, {"use_distributed_optimizer": True, "bf16": True}]


@pytest.mark.every_size
@pytest.mark.parametrize("layout", LAYOUTS, ids=["fp32", "zero1-bf16"])
def test_training_goes_on_and_the_files_are_those_of_the_moment(world, folder, trainer, held, layout):
    split = {"tensor_model_parallel_size": 2 if world.size > 1 else 1, **layout}
    made = trainer(world, save=str(folder / "later"), async_save=True, **split)
    made.step()
    saver = run_state.CheckpointSaver(made)
    saver.start()
    assert agreed(world, saver) == WRITING
    saver.settle(WRITING)
    assert pointer.latest(folder / "later") is None
    made.step()  # the parameters change, and nothing of that may reach the files
    held.set()
    while (state := agreed(world, saver)) == WRITING:
        pass
    assert state == DONE and pointer.latest(folder / "later") is None
    saver.settle(state)
    assert pointer.latest(folder / "later").name == "iter_0000001" and saver.state() == DONE
    saver.settle(DONE)  # nothing is being written
    other = trainer(world, save=str(folder / "at once"), **split)
    other.step()
    run_state.CheckpointSaver(other).start(background=False)
    for file in ("model.safetensors", "optimizer.safetensors"):
        one, two = ((folder / name / "iter_0000001" / file).read_bytes() for name in ("later", "at once"))
        assert one == two
    world.barrier()


def test_the_next_checkpoint_waits_for_the_one_before(world, folder, trainer, held):
    made = trainer(world, save=str(folder), async_save=True, keep_last=1)
    saver = run_state.CheckpointSaver(made)
    made.step()
    saver.start()
    threading.Timer(0.2, held.set).start()
    made.step()
    saver.start()
    assert pointer.latest(folder).name == "iter_0000001"
    saver.finish()
    assert [path.name for path in pointer.complete(folder)] == ["iter_0000002"]
    world.barrier()


def test_a_write_that_fails_on_one_rank_is_one_error_on_all(world, folder, trainer, held, monkeypatch):
    made = trainer(world, save=str(folder), async_save=True, tensor_model_parallel_size=world.size)
    made.step()
    saver = run_state.CheckpointSaver(made)
    run_state.CheckpointSaver(made).start(background=False)
    made.step()
    plain = disk.os.pwrite

    def full(file, data, start):
        if threading.current_thread() is not threading.main_thread() and world.rank == world.size - 1:
            raise OSError(28, "No space left on device")
        return plain(file, data, start)

    monkeypatch.setattr(disk.os, "pwrite", full)
    saver.start()
    held.set()
    while (state := agreed(world, saver)) == WRITING:
        pass
    assert state == FAILED
    with pytest.raises(UsageError, match=r"writing .*iter_0000002/.*No space left .*as they were: iter_0000001"):
        saver.settle(state)
    world.barrier()
    assert sorted(path.name for path in folder.iterdir()) == ["iter_0000001", "latest"]
    assert saver.state() == DONE
    world.barrier()


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True], ids=["a slow disk", "a full disk meanwhile"])
def test_no_rank_waits_long_in_a_collective_while_another_one_writes(world, folder, trainer, held, monkeypatch, fails):
    """It would be taken for a hang. Rank 0's disk is slow until the ranks have asked each other three times."""
    made = trainer(world, save=str(folder), async_save=True, tensor_model_parallel_size=world.size)
    made.step()
    plain, looks = disk.os.pwrite, []
    last = world.rank == world.size - 1

    def full(file, data, start):
        if fails and last and threading.current_thread() is not threading.main_thread():
            raise OSError(28, "No space left on device")
        return plain(file, data, start)

    def look(self):
        looks.append(found := ask(self))
        if len(looks) == 3:
            held.set()
        return found

    ask = CheckpointWriter._largest_state
    monkeypatch.setattr(disk.os, "pwrite", full)
    monkeypatch.setattr(CheckpointWriter, "_largest_state", look)
    if fails and last and world.size > 1:
        held.set()
    saver = run_state.CheckpointSaver(made)
    saver.start()
    if fails and world.size > 1:
        threading.Timer(0.5, held.set).start()  # the others end after the failure was told, not before
        with pytest.raises(UsageError, match="No space left"):
            saver.finish()
        assert FAILED in looks
    elif not fails:
        saver.finish()
        assert looks[:3] == [WRITING] * 3 and looks[-1] == DONE
        assert pointer.latest(folder).name == "iter_0000001"
    else:
        held.set()
        with pytest.raises(UsageError, match="No space left"):
            saver.finish()
    world.barrier()
    assert not list(folder.glob("*.tmp"))
    world.barrier()


def test_only_the_last_checkpoints_are_kept(world, folder, trainer):
    made = trainer(world, save=str(folder), keep_last=2, keep_every=3)
    for _ in range(6):
        made.step()
        run_state.CheckpointSaver(made).start(background=False)
    assert [int(path.name[5:]) for path in pointer.complete(folder)] == [3, 5, 6]
    world.barrier()


def test_a_run_that_lost_its_folder_leaves_the_other_runs_files_alone(world, folder, trainer, held):
    """Its process was stopped for a minute, say; the run that took the folder over writes the same iteration."""
    made = trainer(world, save=str(folder), async_save=True)
    made.step()
    problem = None
    saver = run_state.CheckpointSaver(made, lambda: problem)
    saver.start()
    problem = "another run has taken the folder over"
    world.barrier()
    held.set()
    with pytest.raises(UsageError, match="another run has taken the folder over"):
        saver.finish()
    world.barrier()
    assert [path.name for path in folder.iterdir()] == ["iter_0000001.tmp"]
    world.barrier()
