"""trainers.convert: the dtype and the order of the numbers in a run, and in a folder that is written from it."""

import json

import pytest
import torch
from safetensors.torch import load_file

from commengine import ProcessGrid, UsageError
from trainers.tasks.commands import PRETRAIN_GPT
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


@pytest.mark.mpi
@pytest.mark.sizes(1)
def test_a_gpt2_with_two_dropouts_trains_with_one_that_is_chosen(world, theirs, folder, command, changed):
    """Generation and a conversion have no dropout, and take it; a training run has to be told which one it has."""
    if world.rank == 0:
        theirs("GPT-2").save_pretrained(folder / "in")
        changed(folder / "in" / "config.json", embd_pdrop=0.2, resid_pdrop=0.1)
    world.barrier()
    with ProcessGrid(world) as grid:
        assert load_trained(f"hf:{folder / 'in'}", grid).settings.hidden_dropout == 0.1
    command(world, "--from", "hf", folder / "in", "--save", folder / "run")
    command(world, "--load", folder / "run", "--to", "hf", folder / "out")
    assert json.loads((folder / "out" / "config.json").read_text())["embd_pdrop"] == 0.2
    for load in (f"hf:{folder / 'in'}", str(folder / "run")):
        words = ["--load", load, "--mock-data", "--vocab-size", "57"]
        with pytest.raises(UsageError, match=r"embd_pdrop 0\.2 and resid_pdrop 0\.1 differ, .* with --hidden-dropout"):
            PRETRAIN_GPT.parse(words)
        assert PRETRAIN_GPT.parse([*words, "--hidden-dropout", "0.2"]).hidden_dropout == 0.2
    world.barrier()
