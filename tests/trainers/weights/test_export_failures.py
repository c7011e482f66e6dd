"""Exports that are killed, or meet a full disk: the old export is whole, the next start works, there is one error."""

import contextlib
import errno
import hashlib
import json
import re
import sys

import pytest
import torch
from safetensors.torch import load_file

from commengine import ProcessGrid, UsageError
from tests.support import mpirun
from tests.support.file_operations import FileOperations
from tests.support.small_disk import resize, small_disk, why_not
from tplayers import GPT, GPTConfig, initialize
from trainers import pretrain_gpt
from trainers.checkpoints import pointer
from trainers.weights.export import NEW, OLD, SmallFiles, export, remove_leftovers

FULL = OSError(errno.ENOSPC, "No space left on device")
TINY = [
    "--mock-data", "--num-layers", "1", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "16",
    "--vocab-size", "500", "--make-vocab-size-divisible-by", "128", "--micro-batch-size", "1",
    "--global-batch-size", "4", "--eval-iters", "0", "--sample-tokens", "0",
]  # fmt: skip


def value_of(folder):
    """The value of a whole export that `valued` made; None where there is none."""
    if not folder.exists():
        return None
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["GPT2LMHeadModel"]
    return load_file(folder / "model.safetensors")["transformer.ln_f.bias"].unique().item()


@pytest.mark.slow
@pytest.mark.mpi
def test_an_error_at_any_change_of_any_rank_is_one_error_on_all_and_loses_nothing(world, folder):
    place, aside = folder / "out", folder / ".out.commengine-tmp" / OLD
    with ProcessGrid(world, tensor=world.size) as grid:
        model = GPT(GPTConfig(1, 16, 4, 30, 8, make_vocab_size_divisible_by=32), grid.tensor)
        initialize(model, 1)

        def write(value, fails_at=10**9):
            """Export a model of this value; from change ``fails_at`` on files can only be removed. The error."""
            with torch.no_grad():
                model.final_norm.bias.fill_(value)

            def before(number, name):
                if number >= fails_at and name not in ("unlink", "rmdir"):
                    raise FULL

            try:
                with FileOperations(before):
                    export(model, grid, place, SmallFiles())
            except UsageError as error:
                return str(error)
            return None

        assert write(0.0) is None
        old, failures = 0.0, 0
        for rank in range(world.size):
            for number in range(1, 200):
                new = float(100 * rank + number)
                said = write(new, fails_at=number if rank == world.rank else 10**9)
                world.barrier()
                if said is None:
                    old = new
                    break
                failures += 1
                assert "No space left on device" in said and str(folder) in said
                there = value_of(place)
                assert there in (old, new) or value_of(aside) == old  # nothing can be renamed, to give it its name back
                world.barrier()
                if world.rank == 0:
                    remove_leftovers(place)
                    assert value_of(place) == (old if there is None else there)
                assert write(new) is None
                assert value_of(place) == new and [path.name for path in folder.iterdir()] == ["out"]
                old = new
                world.barrier()
        assert failures > 20
    world.barrier()


@pytest.mark.mpi
def test_an_export_that_a_kill_left_without_its_name_gets_it_back(world, folder):
    """Also where the next export fails."""
    place, own = folder / "out", folder / ".out.commengine-tmp"
    with ProcessGrid(world, tensor=world.size) as grid:
        model = GPT(GPTConfig(1, 16, 4, 30, 8, make_vocab_size_divisible_by=32), grid.tensor)
        initialize(model, 1)
        export(model, grid, place, SmallFiles())
        if world.rank == 0:
            own.mkdir()
            place.rename(own / OLD)
            (own / NEW).mkdir()
        world.barrier()

        def refuse():
            raise UsageError("not this time")

        with pytest.raises(UsageError, match="not this time"):
            export(model, grid, place, SmallFiles(), may_replace=refuse)
        world.barrier()
        assert value_of(place) == 0.0 and [path.name for path in folder.iterdir()] == ["out"]
    world.barrier()


@contextlib.contextmanager
def disk_of(world, folder, kilobytes):
    """A `small_disk` of rank 0, for all ranks. Yields a function that gives it another size."""
    with contextlib.ExitStack() as mounted:
        if world.rank == 0:
            mounted.enter_context(small_disk(folder, kilobytes))
        world.barrier()

        def sized(kilobytes):
            world.barrier()
            if world.rank == 0:
                resize(folder, kilobytes)
            world.barrier()

        yield sized
        world.barrier()


@pytest.fixture(scope="module")
def mountable():
    if reason := why_not():
        pytest.skip(f"no small disk can be mounted: {reason}")


@pytest.mark.mpi
def test_a_full_disk_leaves_the_old_export(world, theirs, folder, command, mountable):
    """The weights, or the small files, or the lock have no room; then there is room."""
    size = ("--tensor-model-parallel-size", world.size)
    if world.rank == 0:
        for name, family in (("one", "GPT-2"), ("two", "GPT-2")):
            model = theirs(family)
            with torch.no_grad():
                model.transformer.ln_f.bias.fill_(1.0 if name == "one" else 2.0)
            model.save_pretrained(folder / name)
    world.barrier()
    for name in ("one", "two"):
        command(world, "--from", "hf", folder / name, "--save", folder / f"run-{name}", *size)
    disk, place = folder / "disk", folder / "disk" / "out"
    with disk_of(world, disk, 1000) as resized:
        command(world, "--load", folder / "run-one", "--to", "hf", place, *size)
        used = sum(-(-path.stat().st_size // 4096) * 4 for path in place.iterdir())
        before = {path.name: path.read_bytes() for path in place.iterdir()}
        for spare in (0, 8, 40, used - 4):
            resized(used + spare)
            with pytest.raises(UsageError, match=f"{disk}.*No space left on device"):
                command(world, "--load", folder / "run-two", "--to", "hf", place, "--overwrite", *size)
            world.barrier()
            assert {path.name: path.read_bytes() for path in place.iterdir()} == before, spare
            assert [path.name for path in disk.iterdir()] == ["out"]
            world.barrier()
        resized(1000)
        command(world, "--load", folder / "run-two", "--to", "hf", place, "--overwrite", *size)
        assert value_of(place) == 2.0 and [path.name for path in disk.iterdir()] == ["out"]
        world.barrier()


@pytest.mark.slow
@pytest.mark.mpi(min_size=2)
def test_a_run_with_a_disk_that_is_full_for_its_export_goes_on_there(world, folder, mountable, monkeypatch):
    disk, run = folder / "disk", folder / "disk" / "run"
    words = [*TINY, "--train-iters", "4", "--save-interval", "2", "--save-hf", "--tensor-model-parallel-size", "2"]
    words += ["--tensorboard-dir", str(folder / "board"), "--distributed-timeout-minutes", "0.5"]

    def train(place):
        monkeypatch.setattr(sys, "argv", ["pretrain_gpt", *words, "--save", str(place), "--load", str(place)])
        return pretrain_gpt.main(world)

    assert train(folder / "whole") == 0
    used = sum(-(-path.stat().st_size // 4096) * 4 for path in (folder / "whole" / "iter_0000002").glob("*"))
    with disk_of(world, disk, used + 100) as resized:
        with pytest.raises(UsageError, match=f"writing {run}/iter_0000002/.*No space left on device"):
            train(run)
        world.barrier()
        assert pointer.latest(run).name == "iter_0000002"
        assert not list(run.glob("iter_*/hf")) and not list(run.rglob(".hf*"))
        resized(4000)
        assert train(run) == 0
        for step in (2, 4):
            name = f"iter_{step:07d}/hf/model.safetensors"
            assert (run / name).read_bytes() == (folder / "whole" / name).read_bytes()
        assert not list(run.rglob(".hf*"))
        world.barrier()


def without_lock(files):
    """Without the file of a process that was killed while it took the lock; a start a minute later removes it."""
    return {path: value for path, value in files.items() if not re.search(r"-tmp/run\.lock\.[0-9a-f]{32}$", path)}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("many", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_kill_in_an_export_loses_nothing_and_the_same_command_ends_it(tmp_path, theirs, many):
    for name, value in (("one", 1.0), ("two", 2.0)):
        model = theirs("GPT-2")
        with torch.no_grad():
            model.transformer.ln_f.bias.fill_(value)
        model.save_pretrained(tmp_path / name)
    out, run = tmp_path / "of-convert" / "out", tmp_path / "of-pretrain" / "run"
    first = [["convert", "--from", "hf", tmp_path / "two", "--save", tmp_path / "run-two"]]
    convert = ["--load", tmp_path / "run-two", "--to", "hf", out, "--overwrite"]
    train = [*TINY, "--train-iters", "1", "--save-hf", "--save", run, "--load", run]
    cases = [
        {"command": "convert", "words": convert, "place": out, "before": tmp_path / "one", "many": many},
        {"command": "pretrain_gpt", "words": train, "place": run, "before": None, "many": False},
    ]
    (tmp_path / "cases.json").write_text(json.dumps({"first": first, "cases": cases}, default=str))
    words = [str(mpirun.JOBS / "killed_export.py"), str(tmp_path / "cases.json"), str(tmp_path / "found.json")]
    done = mpirun.command([sys.executable, *words], timeout=200)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    of_convert, of_run = json.loads((tmp_path / "found.json").read_text())
    files = (tmp_path / "one").iterdir()
    old, new = (
        {f"out/{path.name}": hashlib.sha256(path.read_bytes()).hexdigest() for path in files},
        of_convert["whole"],
    )
    assert old["out/model.safetensors"] != new["out/model.safetensors"] and all(path.startswith("out/") for path in new)
    seen = set()
    for name, killed, status, again in of_convert["kills"]:
        there = {path: value for path, value in killed.items() if path.startswith("out/")}
        aside = {path.replace(f".out.commengine-tmp/{OLD}/", "out/"): value for path, value in killed.items()}
        assert there in (old, new) or (not there and old.items() <= aside.items()), name
        seen.add("old" if there == old else "new" if there == new else "aside")
        assert status == 0 and without_lock(again) == new, name
    assert seen == ({"old", "new", "aside"} if many else {"old", "aside"})
    for name, killed, status, again in of_run["kills"]:
        checkpoint = {path for path in killed if re.fullmatch(r"run/iter_0000001/[^/]*(safetensors|json)", path)}
        assert len(checkpoint) == 3 and all(killed[path] == again[path] for path in checkpoint), name
        assert status == 0 and without_lock(again).keys() == of_run["whole"].keys(), name
        export = "run/iter_0000001/hf/model.safetensors"
        assert again[export] == of_run["whole"][export] and export not in killed, name
    assert of_run["kills"]
