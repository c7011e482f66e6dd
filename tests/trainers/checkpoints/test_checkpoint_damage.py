"""Damaged checkpoints: every changed byte is refused by the name of its file, on all ranks, before anything is used."""

import random
import shutil
from pathlib import Path

import pytest

from commengine import UsageError
from trainers.checkpoints import run_state

pytestmark = pytest.mark.mpi


@pytest.fixture
def folder(world, tmp_path):
    """Rank 0's temporary folder, on all ranks."""
    return Path(world.mpi.bcast(str(tmp_path)))


@pytest.fixture
def saved(world, folder, trainer):
    """(A trainer that can load it, the folder of a checkpoint.)"""
    settings = {"save": str(folder), "load": str(folder), "tensor_model_parallel_size": world.size}
    made = trainer(world, **settings)
    made.step()
    run_state.CheckpointSaver(made).start(background=False)
    return made, folder / "iter_0000001"


def flip(path, place, bit):
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0] ^ (1 << bit)
        file.seek(place)
        file.write(bytes([byte]))


def refused(world, made, change, undo):
    """What all ranks say about a checkpoint that rank 0 changes."""
    if world.rank == 0:
        change()
    world.barrier()
    with pytest.raises(UsageError) as caught:
        run_state.resume(made)
    world.barrier()
    if world.rank == 0:
        undo()
    world.barrier()
    assert len(set(world.mpi.allgather(str(caught.value)))) == 1
    return str(caught.value)


@pytest.mark.slow
def test_every_flipped_bit_is_refused_by_name(world, saved):
    """60 bytes of the model, the optimizer, the state and the checksums, and each of the pointer."""
    made, found = saved
    draw = random.Random(world.mpi.bcast(7))
    for name in ["model.safetensors", "optimizer.safetensors", "state.json", "checksums", "../latest"]:
        path = (found / name).resolve()
        size = path.stat().st_size
        for place in range(size) if size < 60 else [0, size - 1, *(draw.randrange(size) for _ in range(58))]:
            bit = draw.randrange(8)
            one = refused(world, made, lambda: flip(path, place, bit), lambda: flip(path, place, bit))  # noqa: B023
            assert str(path) in one and one.startswith("--load"), one
    assert run_state.resume(made)  # all changes are undone


def test_another_dtype_in_the_header_is_refused(world, saved):
    made, found = saved
    path, copy = found / "model.safetensors", found.parent / "copy"
    if world.rank == 0:
        shutil.copy(path, copy)

    def relabel():
        path.write_bytes(path.read_bytes().replace(b'"F32"', b'"I32"'))

    assert f"{path}: damaged: bytes 0 to" in refused(world, made, relabel, lambda: shutil.copy(copy, path))


def test_a_missing_list_of_checksums_is_refused_unless_it_is_not_wanted(world, saved, trainer):
    made, found = saved
    aside = found.parent / "aside"
    said = refused(world, made, lambda: (found / "checksums").rename(aside), lambda: aside.rename(found / "checksums"))
    assert f"{found / 'checksums'}: no such file" in said and "--no-verify-checkpoints" in said
    if world.rank == 0:
        (found / "checksums").unlink()
        flip(found / "model.safetensors", (found / "model.safetensors").stat().st_size - 5, 0)
    world.barrier()
    unchecked = trainer(world, load=str(found.parent), tensor_model_parallel_size=world.size, verify_checkpoints=False)
    assert run_state.resume(unchecked)


def test_other_checkpoints_are_named(world, saved):
    made, found = saved
    made.step()
    run_state.CheckpointSaver(made).start(background=False)
    path = found.parent / "iter_0000002" / "optimizer.safetensors"
    said = refused(world, made, lambda: flip(path, 5000, 3), lambda: flip(path, 5000, 3))
    assert str(path) in said and "other checkpoints there: iter_0000001" in said
    assert path.is_file()


def test_a_file_that_vanishes_is_one_error(world, saved):
    made, found = saved
    path, aside = found / "optimizer.safetensors", found.parent / "aside"
    assert f"{path}: no such file" in refused(world, made, lambda: path.rename(aside), lambda: aside.rename(path))


def test_a_folder_whose_name_is_of_another_iteration_is_refused(world, saved, trainer):
    made, found = saved
    copy = found.with_name("iter_0000006")
    if world.rank == 0:
        shutil.copytree(found, copy)
    world.barrier()
    other = trainer(world, load=str(copy), tensor_model_parallel_size=world.size)
    with pytest.raises(UsageError, match=r"iter_0000006/state.json: it is of iteration 1, .* of 6") as caught:
        run_state.resume(other)
    assert "the name iter_0000001" in str(caught.value)
    assert run_state.resume(made)
