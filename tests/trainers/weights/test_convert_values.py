"""trainers.convert: the dtype and the order of the numbers in a run, and in a folder that is written from it."""

import pytest
import torch
from safetensors.torch import load_file

from commengine import ProcessGrid
from trainers.trained import load_trained


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("found", "asked"),
    [
        ("bfloat16", "float32"),
        ("float32", "bfloat16"),
        ("float32", "float16"),
        ("float64", None),
        ("float32", "float64"),
    ],
)
def test_a_run_has_the_dtype_of_the_files_or_the_one_that_was_asked_for(world, theirs, folder, command, found, asked):
    """Whoever loads the run has its values, and not rounded ones; also in float64, in which nothing trains."""
    if world.rank == 0:
        theirs("Llama").to(getattr(torch, found)).save_pretrained(folder / "in")
    world.barrier()
    size = ("--tensor-model-parallel-size", world.size)
    words = () if asked is None else ("--dtype", asked)
    command(world, "--from", "hf", folder / "in", "--save", folder / "run", *words, *size)
    asked = asked or found
    with ProcessGrid(world, tensor=world.size) as grid:
        run = load_trained(folder / "run", grid)
        other = load_trained(f"hf:{folder / 'in'}", grid)
        assert {p.dtype for p in run.model.parameters()} == {getattr(torch, asked)}
        for one, values in zip(run.model.parameters(), other.model.parameters(), strict=True):
            assert torch.equal(one, values.to(one.dtype))
    command(world, "--load", folder / "run", "--to", "hf", folder / "out", *size)
    assert {values.dtype for values in load_file(folder / "out" / "model.safetensors").values()} == {
        getattr(torch, asked)
    }
    world.barrier()


@pytest.mark.mpi
def test_heads_that_were_interleaved_are_permuted_once(world, theirs, folder, command, changed):
    """An export of a model with rope_interleaved is read back as it is."""
    if world.rank == 0:
        theirs("Llama").save_pretrained(folder / "in")
        changed(folder / "in" / "config.json", rope_interleaved=True)
    world.barrier()
    size = ("--tensor-model-parallel-size", world.size)
    command(world, "--from", "hf", folder / "in", "--save", folder / "run", "--rotary-interleaved", *size)
    command(world, "--load", folder / "run", "--to", "hf", folder / "out", *size)
    with ProcessGrid(world, tensor=world.size) as grid:
        run, back = load_trained(folder / "run", grid), load_trained(f"hf:{folder / 'out'}", grid)
        assert all(map(torch.equal, run.model.parameters(), back.model.parameters()))
    world.barrier()
