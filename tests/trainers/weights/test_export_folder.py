"""Folders that commands must not replace: runs, other people's files, the model that a run starts from."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from commengine import UsageError
from tests.support.weights.hugging_face import from_hugging_face
from tests.support.weights.megatron_files import contents, write_megatron
from tplayers import GPTConfig
from trainers.checkpoints.folder_lock import NAME, FolderLock, Record
from trainers.weights.export import NEW, OLD, require_replaceable, working_folder


def make(folder: Path, *files: str) -> Path:
    """A folder with these files, each with a few bytes."""
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("kept")
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_an_export_replaces_exports_alone(tmp_path, monkeypatch):
    run = make(tmp_path / "run", "latest", "metrics.jsonl", "iter_0000003/state.json", "hf_files/config.json",
               "iter_0000003/hf/config.json", "iter_0000003/hf/model.safetensors")  # fmt: skip
    make(tmp_path, "out/config.json", "out/model.safetensors", "out/tokenizer.json", "small/config.json")
    make(tmp_path, "more/config.json", "more/model.safetensors", "more/README.md", "file")
    make(tmp_path, "shards/config.json", "shards/model-00001-of-00002.safetensors", "tree/config.json/x")
    (tmp_path / "linked").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "linked" / name).symlink_to(tmp_path / "out" / name)
    (tmp_path / "link").symlink_to(run)
    (tmp_path / "empty").mkdir()
    before = content(tmp_path)
    refused = {
        "run": r"files that no export writes \(hf_files, iter_0000003, latest\)", "run/iter_0000003": "part of the run",
        "run/iter_0000007": "part of the run", "run/hf_files": "part of the run", "link": "no export writes",
        "run/iter_0000003/hf/..": "part of the run", ".": "no export writes", "more": r"no export writes \(README.md\)",
        "shards": "no export writes", "tree": "no export writes", "linked": "no export writes", "file": "is no folder",
        "small": "is no export .without model.safetensors",
    }  # fmt: skip
    for name, said in refused.items():
        for overwrite in (False, True):
            with pytest.raises(UsageError, match=f"--to hf {tmp_path}.*{said}.*give --to hf a new folder"):
                require_replaceable("--to hf", tmp_path / name, overwrite=overwrite)
    for name in ("out", "run/iter_0000003/hf"):
        with pytest.raises(UsageError, match=r"is there already; .*or --overwrite"):
            require_replaceable("--to hf", tmp_path / name, overwrite=False)
        require_replaceable("--to hf", tmp_path / name, overwrite=True)
    for name in ("new", "empty", "run/new", "new/iter_0000003", "run/iter_0000003/other"):
        require_replaceable("--to hf", tmp_path / name, overwrite=False)
    for name in ("empty", "out"):
        monkeypatch.chdir(tmp_path / name)
        for place in (Path(), Path("../") / name):
            with pytest.raises(UsageError, match=r"--to hf .*: is the working directory.*give --to hf a new folder"):
                require_replaceable("--to hf", place, overwrite=True)
    assert content(tmp_path) == before


@pytest.mark.mpi
def test_the_folder_beside_is_nobody_elses(world, folder):
    """What a killed job left in it goes, but for an export that had lost its name; a failure leaves nothing."""

    def told(work):
        work()

    own = folder / ".out.commengine-tmp"
    if world.rank == 0:
        make(folder, "out.tmp/precious", ".out.tmp/precious", f"{own.name}/{NEW}/half", f"{own.name}/{OLD}/old")
    world.barrier()

    def fail() -> None:
        with working_folder(world, folder / "out", told) as found:
            assert found == own and {path.name for path in own.iterdir()} == {NEW, NAME}
            assert not list((own / NEW).iterdir())
            world.barrier()
            if world.rank == 0:
                make(own, f"{NEW}/half", f"{OLD}/old")
            raise UsageError("in between")

    with pytest.raises(UsageError, match="in between"):
        fail()
    world.barrier()
    assert {path.name for path in folder.iterdir()} == {"out.tmp", ".out.tmp", "out"}
    assert set(content(folder)) == {"out.tmp/precious", ".out.tmp/precious", "out/old"}
    world.barrier()


@contextmanager
def other_job(folder: Path, *files: str) -> Iterator[None]:
    """A job that holds the lock of ``folder``, writes ``files`` when another has asked for the lock, and then ends."""
    folder.mkdir(exist_ok=True)
    lock, asked, attempt = FolderLock(folder), threading.Event(), FolderLock.attempt
    assert lock.attempt() is None

    def observed(self: FolderLock) -> Record | None:
        holder = attempt(self)
        asked.set()
        return holder

    def work() -> None:
        asked.wait(30)
        make(folder, *files)
        lock.release()

    thread = threading.Thread(target=work)
    thread.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FolderLock, "attempt", observed)
        yield
    thread.join()
    assert asked.is_set()


@pytest.mark.slow
@pytest.mark.mpi
def test_of_two_jobs_the_second_is_refused(world, alone, theirs, folder, command):
    """Neither a run nor an export that another job has written meanwhile is replaced."""
    if world.rank == 0:
        theirs("GPT-2").save_pretrained(folder / "in")
        held = other_job(folder / "run", "latest", "iter_0000009/state.json")
        with held, pytest.raises(UsageError, match=r"--save .*run: holds a run already"):
            command(alone, "--from", "hf", folder / "in", "--save", folder / "run")
        assert set(content(folder / "run")) == {"latest", "iter_0000009/state.json"}
        command(alone, "--from", "hf", folder / "in", "--save", folder / "good")
        held = other_job(folder / ".out.commengine-tmp", "../out/config.json", "../out/model.safetensors")
        with held, pytest.raises(UsageError, match=r"--to hf .*out: is there already"):
            command(alone, "--load", folder / "good", "--to", "hf", folder / "out")
        assert set(content(folder / "out").values()) == {b"kept"}
        command(alone, "--load", folder / "good", "--to", "hf", folder / "out", "--overwrite")
        assert set(content(folder / "out")) >= {"config.json", "model.safetensors"}
        assert b"kept" not in content(folder / "out").values()
        assert not (folder / ".out.commengine-tmp").exists()
    world.barrier()


@pytest.mark.mpi
def test_an_export_leaves_what_is_not_one(world, theirs, folder, command, monkeypatch):
    if world.rank == 0:
        theirs("GPT-2").save_pretrained(folder / "in")
        make(folder, "mine.tmp/precious")
    world.barrier()
    run = folder / "run"
    command(world, "--from", "hf", folder / "in", "--save", run)
    before = content(folder)
    for target in (run, run / "iter_0000000", run / "..", run / "hf_files"):
        with pytest.raises(UsageError, match=r"--to hf .*give --to hf a new folder"):
            command(world, "--load", run, "--to", "hf", target, "--overwrite")
    if world.rank == 0:
        (folder / "here").mkdir()
    world.barrier()
    monkeypatch.chdir(folder / "here")
    with pytest.raises(UsageError, match=r"--to hf \.: is the working directory"):
        command(world, "--load", run, "--to", "hf", ".")
    assert content(folder) == before
    command(world, "--load", run, "--to", "hf", folder / "mine")
    for _ in range(2):
        command(world, "--load", run, "--to", "hf", run / "iter_0000000" / "hf", "--overwrite")
    assert content(folder / "mine") == content(run / "iter_0000000" / "hf")
    after = content(folder)
    assert {name: after[name] for name in before} == before
    assert not list(folder.rglob(".*"))
    world.barrier()


@pytest.mark.mpi
@pytest.mark.parametrize("program", ["hf", "megatron"])
def test_a_run_is_apart_from_the_model_that_it_starts_from(world, theirs, folder, command, program):
    """A folder of Megatron-LM has iter_* as ours, and one of transformers may lie in a run."""
    model = theirs("GPT-2")
    origin = folder / "x" / "iter_0000003" / "hf"
    if world.rank == 0 and program == "hf":
        model.save_pretrained(origin)
        make(folder / "x", "latest", "iter_0000003/state.json", "metrics.jsonl")
    elif world.rank == 0:
        shape = GPTConfig(2, 32, 8, 57, 16, make_vocab_size_divisible_by=1)
        ours = {key: values.detach() for key, values in from_hugging_face(model.state_dict(), shape).items()}
        found = contents(ours, 8, version=2, ranks=1, padded=64, attn_mask_type=None)
        write_megatron(folder / "x", found)
    world.barrier()
    origin = origin if program == "hf" else folder / "x"
    before = content(folder)
    (folder / f"link{world.rank}").symlink_to(origin)
    for save in (origin, origin / "run", origin.parent, folder / f"link{world.rank}"):
        for overwrite in ([], ["--overwrite"]):
            with pytest.raises(UsageError, match=f"--save .*: (is|holds|lies in) the model {program}:.*apart from it"):
                command(world, "--from", program, origin, "--save", save, *overwrite)
    assert {name: value for name, value in content(folder).items() if "link" not in name} == before
    size = ["--vocab-size", 57] if program == "megatron" else []
    command(world, "--from", program, origin, "--save", folder / "good", *size)
    world.barrier()
