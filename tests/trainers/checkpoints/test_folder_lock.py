"""The lock of a save folder: one holder at a time; a crash here frees it at once, one elsewhere after a minute."""

import contextlib
import fcntl
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from commengine import UsageError
from tests.support import mpirun
from tests.support.small_disk import make_read_only, small_disk, why_not
from trainers.checkpoints import pointer
from trainers.checkpoints.folder_lock import DEAD_SECONDS, NAME, FolderLock, hold, read

FORK = multiprocessing.get_context("fork")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def age(path: Path, seconds: float) -> None:
    """Let the file be touched last this long ago."""
    os.utime(path, (time.time() - seconds,) * 2)


def record(folder: Path, **changed: object) -> Path:
    """A lock file of this process, with some fields changed."""
    lock = FolderLock(folder)
    assert lock.attempt() is None
    fields = {**read(lock.path).fields, **changed}
    lock.release()
    lock.path.write_text(json.dumps(fields))
    return lock.path


def killed(folder: Path) -> None:
    """Leave the lock of a process that was killed; nobody has waited for it yet, so it is a zombie."""

    def hold_it() -> None:
        assert FolderLock(folder).attempt() is None
        os.kill(os.getpid(), signal.SIGKILL)

    process = FORK.Process(target=hold_it)
    process.start()
    while process.is_alive():
        time.sleep(0.01)
    assert (folder / NAME).exists()


def test_one_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "71")
    with FolderLock(tmp_path) as first, FolderLock(tmp_path) as second:
        assert first.attempt() is None
        holder = second.attempt()
        assert holder is not None and f"process {os.getpid()} on " in str(holder) and "job 71" in str(holder)
        second.release()  # it never had it
        assert names(tmp_path) == [NAME] and first.problem() is None
        first.release()
        assert names(tmp_path) == []
        assert second.attempt() is None and first.attempt() is not None
    assert names(tmp_path) == []


def test_a_process_of_this_host_that_was_killed_frees_it_at_once(tmp_path):
    killed(tmp_path)
    with FolderLock(tmp_path) as lock:
        assert lock.attempt() is None
        assert names(tmp_path) == [NAME] and read(lock.path).fields["pid"] == os.getpid()
    assert names(tmp_path) == []


def test_a_process_number_that_was_given_again_is_another_process(tmp_path):
    record(tmp_path, start="1")
    with FolderLock(tmp_path) as lock:
        assert lock.attempt() is None


@pytest.mark.parametrize("elsewhere", [{"namespace": "another boot"}, {"namespace": None}, {"host": "b", "pid": 1}])
def test_another_host_is_dead_after_a_minute_without_a_touch(tmp_path, elsewhere):
    """Its process number says nothing here."""
    path = record(tmp_path, **{"namespace": "another boot", "host": "elsewhere", **elsewhere})
    with FolderLock(tmp_path) as lock:
        assert "on " in str(lock.attempt())
        age(path, DEAD_SECONDS - 10)
        assert lock.attempt() is not None
        age(path, DEAD_SECONDS + 1)
        assert lock.attempt() is None and names(tmp_path) == [NAME]


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe", b"[1]", b'{"pid": 3}', b'{"nonce": "../x", "pid": 3}', b"[" * 9999]
)
def test_a_damaged_file_counts_as_another_hosts(tmp_path, content):
    (tmp_path / NAME).write_bytes(content)
    with FolderLock(tmp_path) as lock:
        assert "damaged" in str(lock.attempt())
        age(tmp_path / NAME, DEAD_SECONDS + 1)
        assert lock.attempt() is None
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    "changed",
    [{"pid": pid} for pid in (0, -1, True, 2**31, 10**12)] + [{"nonce": nonce} for nonce in ("a" * 300, "A" * 32, 3)],
)
def test_a_record_that_no_process_can_have_written_is_damaged(tmp_path, changed):
    """The kernel refuses such process numbers with an exception, and the file system such long names."""
    path = record(tmp_path, start="hidden", **changed)
    with FolderLock(tmp_path) as lock:
        assert "damaged" in str(lock.attempt())
        age(path, DEAD_SECONDS + 1)
        assert lock.attempt() is None
    assert names(tmp_path) == []


def test_a_crash_of_the_successor_before_its_rename(tmp_path):
    """The chain of dead records is followed to its end and then removed."""
    first = record(tmp_path, start="1")
    links = [first]
    for number in range(3):
        before = read(links[-1]).nonce
        links.append(tmp_path / f"{NAME}.after.{before}")
        links[-1].write_text(json.dumps({**read(first).fields, "nonce": f"{number:032x}"}))
    with FolderLock(tmp_path) as lock:
        assert lock.attempt() is None
        assert names(tmp_path) == [NAME] and read(lock.path).fields["start"] != "1"


def test_two_that_find_the_same_dead_holder(tmp_path):
    """The slower one has decided before the faster one takes the lock and tidies up, and then finds its name free."""
    record(tmp_path, start="1")
    faster = FolderLock(tmp_path)

    class Slower(FolderLock):
        def _is_dead(self, found):
            dead = super()._is_dead(found)
            if dead:
                assert faster.attempt() is None
            return dead

    slower = Slower(tmp_path)
    holder = slower.attempt()
    assert holder is not None and holder.nonce == read(tmp_path / NAME).nonce != slower._me["nonce"]
    assert names(tmp_path) == [NAME]
    faster.release()
    assert names(tmp_path) == []


def contend(folder: Path, rounds: int, crash: bool) -> None:
    """Take the lock again and again; each time nobody else may have it. Then end with or without giving it back."""
    for _ in range(rounds):
        lock = FolderLock(folder)
        while lock.attempt() is not None:
            time.sleep(0.001)
        with (folder.parent / "inside").open("a") as inside:
            fcntl.flock(inside, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails if anybody is inside
            inside.write("x")
            inside.flush()
            if crash:
                os._exit(0)
        lock.release()


@pytest.mark.slow
@pytest.mark.parametrize("crash", [False, True])
def test_many_processes_at_once(tmp_path, crash):
    folder = tmp_path / "run"
    folder.mkdir()
    rounds, processes = (1, 24) if crash else (25, 6)
    started = [FORK.Process(target=contend, args=(folder, rounds, crash)) for _ in range(processes)]
    for process in started:
        process.start()
    for process in started:
        process.join()
    assert [process.exitcode for process in started] == [0] * processes
    assert len((tmp_path / "inside").read_text()) == rounds * processes
    if not crash:
        assert names(folder) == []


def wait_until(condition) -> None:  # pytest's own time limit ends a wait in vain
    while not condition():
        time.sleep(0.01)


def test_the_holder_touches_its_file_and_makes_it_again(tmp_path):
    with FolderLock(tmp_path, beat=0.02) as lock:
        assert lock.attempt() is None
        age(lock.path, 1000)
        wait_until(lambda: time.time() - lock.path.stat().st_mtime < 500)
        lock.path.unlink()  # somebody tidies up
        wait_until(lock.path.exists)
        assert lock.problem() is None
    assert names(tmp_path) == []


def test_a_holder_that_was_taken_for_dead_learns_who_follows(tmp_path):
    with FolderLock(tmp_path, beat=0.02) as lock:
        assert lock.attempt() is None
        other = {**read(lock.path).fields, "nonce": "0" * 32, "host": "elsewhere", "pid": 17}
        beside = tmp_path / "beside"
        beside.write_text(json.dumps(other))
        beside.replace(lock.path)
        wait_until(lock.problem)
        assert "process 17 on elsewhere" in lock.problem() and str(tmp_path) in lock.problem()
    assert read(tmp_path / NAME).nonce == "0" * 32  # it is not ours to remove


@pytest.mark.parametrize("then", ["another folder", "nothing", "a copy", "a link"])
def test_a_holder_whose_folder_was_renamed_says_so_and_leaves_the_new_one_alone(tmp_path, then):
    folder, away = tmp_path / "run", tmp_path / "away"
    folder.mkdir()
    with FolderLock(folder, beat=0.02) as lock:
        assert lock.attempt() is None and lock.problem() is None
        folder.rename(away)
        if then == "another folder":
            folder.mkdir()
        elif then == "a copy":
            shutil.copytree(away, folder)
        elif then == "a link":
            (tmp_path / "other").mkdir()
            folder.symlink_to(tmp_path / "other")
        before = names(folder) if then != "nothing" else []
        words = "none has its name" if then == "nothing" else "another one has its name"
        assert f"--save {folder}: the folder of this run was renamed" in lock.problem() and words in lock.problem()
        lock._thread.join(5)  # which ends, and touches and makes nothing
        assert not lock._thread.is_alive()
    assert (names(folder) if then != "nothing" else []) == before and folder.exists() == (then != "nothing")
    assert read(away / NAME).nonce == lock._me["nonce"]
    with FolderLock(tmp_path / "link") as other:  # a name that is a link to the same folder is no other one
        (tmp_path / "link").symlink_to(away)
        (away / NAME).unlink()
        assert other.attempt() is None and other.problem() is None


@pytest.mark.slow
def test_a_run_whose_folder_is_renamed_ends_with_one_error_and_loses_nothing(tmp_path, mock):
    folder, away = tmp_path / "run", tmp_path / "away"
    words = [*mock, "--save", str(folder), "--save-interval", "2", "--train-iters", "100000"]
    process = mpirun.start(
        [sys.executable, "-m", "trainers.pretrain_gpt", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        fresh=False,
    )
    try:
        wait_until(lambda: (folder / "iter_0000004" / "state.json").exists() or process.poll() is not None)
        folder.rename(away)
        folder.mkdir()
        said, _ = process.communicate(timeout=60)
    finally:
        mpirun.stop(process)
    assert process.returncode == 2, said
    (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert f"--save {folder}: the folder of this run was renamed" in line
    assert not [name for name in names(folder) if name.startswith("iter_")]
    assert pointer.latest(away) in pointer.complete(away)


PAGE = 4096  # what the smallest file takes on the small disk


@pytest.fixture
def disk(tmp_path):
    """A disk of 256 kB."""
    if reason := why_not():
        pytest.skip(f"no small disk can be mounted: {reason}")
    with small_disk(tmp_path / "disk", 256):
        yield tmp_path / "disk"


def fill(folder: Path, *, pages: int = 0) -> Path:
    """Leave a checkpoint in which a kill came, on a disk that now has room for so many pages."""
    left = folder / "iter_0000002.tmp"
    left.mkdir()
    with (left / "model.safetensors").open("wb", buffering=0) as file:
        os.posix_fallocate(file.fileno(), 0, os.statvfs(folder).f_bavail * PAGE - pages * PAGE)
    assert os.statvfs(folder).f_bavail == pages
    return left


@pytest.mark.parametrize("before", ["nobody", "killed", "a dead host"])
def test_a_full_disk_is_freed_of_what_a_killed_save_left(disk, before):
    if before == "killed":
        killed(disk)
    elif before == "a dead host":
        age(record(disk, namespace="another boot"), DEAD_SECONDS + 1)
    fill(disk)
    with FolderLock(disk) as lock:
        assert lock.attempt() is None
        assert names(disk) == [NAME] and read(lock.path).fields["pid"] == os.getpid()


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_full_disk_keeps_what_a_living_holder_writes(disk, elsewhere):
    with FolderLock(disk) as lock, FolderLock(disk) as other:
        if elsewhere:
            record(disk, namespace="another boot", host="elsewhere")
        else:
            assert lock.attempt() is None
        left = fill(disk)
        holder = other.attempt()
        assert holder is not None and ("on elsewhere" in str(holder)) is elsewhere
        assert names(disk) == [left.name, NAME] and names(left) == ["model.safetensors"]


def test_a_holder_on_a_full_disk_whose_file_was_removed_keeps_its_own_checkpoint(disk):
    """No other process holds the lock then, but what is in the folder is no leftover."""
    with FolderLock(disk, beat=1000) as lock:
        assert lock.attempt() is None
        lock.path.unlink()
        left = fill(disk)
        with pytest.raises(OSError, match="No space left"):
            lock._touched()
        assert names(disk) == [left.name] and names(left) == ["model.safetensors"]
        (left / "model.safetensors").unlink()
        lock._touched()
        assert lock.problem() is None and names(disk) == [left.name, NAME]


def test_a_full_disk_without_leftovers_is_an_error_and_nothing_is_left(disk):
    fill(disk).rename(disk / "data")
    with FolderLock(disk) as lock, pytest.raises(OSError, match="No space left"):
        lock.attempt()
    assert names(disk) == ["data"]


def test_a_disk_that_became_read_only_does_not_bury_the_error_that_says_so(disk):
    lock = FolderLock(disk)
    assert lock.attempt() is None
    make_read_only(disk)
    with pytest.raises(UsageError, match="the first error"), lock:
        raise UsageError("the first error")
    assert names(disk) == [NAME]


@pytest.mark.slow
def test_a_run_on_a_disk_with_room_for_the_lock_alone_removes_what_a_killed_save_left(tmp_path, pretrain, mock):
    """The first row of the metrics comes before the first save, and needs room, too."""
    if reason := why_not():
        pytest.skip(f"no small disk can be mounted: {reason}")
    with small_disk(tmp_path / "disk", 8000):
        folder = tmp_path / "disk" / "run"
        folder.mkdir()
        fill(folder, pages=1)
        save = ["--save", folder, "--load", folder, "--tensorboard-dir", tmp_path / "board"]
        (outcome,) = pretrain((1, [*mock, *save, "--train-iters", "2", "--log-interval", "1"]))
        assert outcome.codes == [0], outcome.err
        assert "iter_0000002" in names(folder) and "iter_0000002.tmp" not in names(folder)


@pytest.mark.slow
@pytest.mark.mpi
def test_ranks_together(world, tmp_path_factory):
    folder = Path(world.mpi.bcast(str(tmp_path_factory.mktemp("locked")) if world.rank == 0 else None))
    with hold(world, folder) as lock:
        with pytest.raises(UsageError) as caught:
            hold(world, folder, wait=0.3)
        assert str(caught.value).startswith(f"--save {folder}: the run of process ")
        assert str(caught.value).endswith(" is at work there; end it, or give another --save")
        assert lock.problem() is None
    world.barrier()
    with hold(world, folder, wait=0):
        pass
    world.barrier()
    with pytest.raises(UsageError, match="cannot be locked"):
        hold(world, folder / "none")


@pytest.mark.slow
def test_a_start_waits_for_the_run_that_is_there_and_says_so(tmp_path, mock):
    """This process is the run that is there; it ends when the other one says that it waits."""
    run = tmp_path / "run"
    run.mkdir()
    with FolderLock(run) as lock:
        assert lock.attempt() is None
        argv = [sys.executable, "-m", "trainers.pretrain_gpt", *mock, "--train-iters", "2", "--save", str(run)]
        process = mpirun.start([mpirun.mpiexec(), "-n", "1", *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               fresh=False)  # fmt: skip
        with contextlib.closing(process.stdout), contextlib.closing(process.stderr):
            ended = threading.Timer(100, process.kill)
            ended.start()
            line = process.stderr.readline()
            assert line.startswith(f"--save {run}: held by the run of process {os.getpid()} on "), line
            lock.release()
            rest, more = process.stdout.read(), process.stderr.read()
            ended.cancel()
            assert process.wait(60) == 0, more
    assert more.count("held by") == 0 and "written to" in rest
    assert NAME not in names(run) and "report.json" in names(run)
