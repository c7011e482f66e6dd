"""MPI's files in /dev/shm: a job that is killed leaves none, and those that older jobs left are removed."""

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from commengine.startup import segments
from tests.support import mpirun
from tests.support.lab import small_shm

#: a job with everything that lies in shared memory, which then waits: each rank prints what it maps there
PROGRAM = """
import os, re, sys, time
import torch
from commengine import Communicator, launch
def main(world):
    with Communicator(world.mpi, timeout=60) as comm:
        kept = comm.empty((1 << 18,)).fill_(1)
        lane = comm.new_stream()
        private = torch.ones(1 << 18)
        comm.all_reduce(private, stream=lane).wait()
        comm.all_reduce(private)
        comm.all_reduce(kept)
        assert kept.eq(world.size).all()
        with open("/proc/self/maps") as maps:
            found = sorted({line.split(None, 5)[5].strip() for line in maps if "shm/" in line or "memfd:" in line})
        sys.stdout.write("".join(f"{os.getpid()} {path}\\n" for path in found) + "ready\\n")
        sys.stdout.flush()
        if "wait" in sys.argv:
            time.sleep(100)
launch.run(main)
"""


def start(folder, *words):
    (folder / "program.py").write_text(PROGRAM)
    argv = [mpirun.mpiexec(), "-n", "2", sys.executable, str(folder / "program.py"), *words]
    return mpirun.start(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, fresh=False)


def told(job):
    """What the ranks said before they waited: {process id: the files that it maps}."""
    found, ready = {}, 0
    while ready < 2:
        line = job.stdout.readline()
        assert line, job.communicate()
        if line == "ready\n":
            ready += 1
        else:
            pid, path = line.rstrip("\n").split(" ", 1)
            found.setdefault(int(pid), []).append(path)
    return found


@pytest.mark.slow
def test_a_job_that_is_killed_leaves_nothing_in_shared_memory(tmp_path):
    """SIGKILL for the ranks and the launcher at once: nobody can clean up."""
    job = start(tmp_path, "wait")
    try:
        mapped = told(job)
        for pid in mapped:
            os.kill(pid, signal.SIGKILL)
    finally:
        os.killpg(job.pid, signal.SIGKILL)
        job.communicate()
    paths = {path for found in mapped.values() for path in found}
    assert len(mapped) == 2 and len(paths) > 3, "MPI's own, a tensor's, slots and flags"
    assert [path for path in paths if not path.endswith(" (deleted)") and Path(path).exists()] == []


@pytest.mark.slow
def test_a_job_that_ends_well_does_not_miss_its_files(tmp_path):
    job = start(tmp_path)
    out, err = job.communicate(timeout=60)
    assert (job.returncode, err) == (0, ""), (out, err)


def aged(path, seconds):
    path.write_bytes(b"0" * 100)
    when = time.time() - seconds
    os.utime(path, (when, when))
    return path


def test_only_what_no_process_maps_is_stale(tmp_path, monkeypatch):
    import mmap

    monkeypatch.setattr(segments, "_mapped", lambda process, folder, real=segments._mapped: real(process, tmp_path))
    monkeypatch.setattr(segments, "sees_all_processes", lambda: True)  # CI may be a container
    stale = aged(tmp_path / "mpich_shm_12ab_0", 60)
    window = aged(tmp_path / "mpich_shar_tmpXy12Zz", 60)
    ours = aged(tmp_path / "commengine-12ab", 60)
    intel = aged(tmp_path / "Intel_MPI_3hhKhj", 60)
    also = aged(tmp_path / "sm_segment.node.0.12ab.0", 60)
    used = aged(tmp_path / "mpich_shm_34cd_0", 60)
    young = aged(tmp_path / "mpich_shm_56ef_0", 5)
    other = aged(tmp_path / "sem.mine", 60)
    with used.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        assert segments.remove_stale(tmp_path, {"SLURM_LOCALID": "1"}) == []
        assert sorted(segments.remove_stale(tmp_path, {})) == sorted([stale, also, window, ours, intel])
        assert used.exists() and young.exists() and other.exists()
        assert segments.unlink_own(tmp_path) == [used]
    assert segments.unlink_own(tmp_path) == []
    assert segments.remove_stale(tmp_path / "missing", {}) == []


@pytest.mark.slow
def test_a_container_removes_no_file_of_others(tmp_path):
    path = aged(tmp_path / "mpich_shm_12ab_0", 60)
    program = "import sys, pathlib; from commengine.startup.segments import remove_stale as remove;"
    program += "print(remove(pathlib.Path(sys.argv[1]), {}))"
    words = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if "Operation not permitted" in done.stderr or "unshare failed" in done.stderr:
        pytest.skip("no PID namespace can be made here")
    assert done.stdout == "[]\n" and path.exists(), done


def test_a_name_that_another_job_has_taken_since_is_left_alone(tmp_path):
    import mmap

    path = aged(tmp_path / "mpich_shm_1_0", 60)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        path.rename(tmp_path / "kept")
        aged(path, 0)
        (tmp_path / "kept").unlink()
        assert segments.unlink_own(tmp_path) == [] and path.exists()


ENGINE = f"from commengine.startup.start import start_mpi; start_mpi()\n{small_shm.BARE}"
SAID = "/dev/shm has "


@pytest.mark.slow
@pytest.mark.skipif(bool(small_shm.why_not()), reason="this user may not mount a disk of its own")
@pytest.mark.parametrize("megabytes", [*(pytest.param(one, marks=pytest.mark.long) for one in (2, 16, 32)), 14])
def test_a_dev_shm_that_is_too_small_for_mpi_is_one_line(megabytes):
    """It is said where a program without the engine dies, and only there."""
    outcomes = {}
    for name, words in {"bare": small_shm.BARE, "engine": ENGINE}.items():
        job = shlex.join([mpirun.mpiexec(), "-n", "2", sys.executable, "-c", words])
        outcomes[name] = mpirun.command(small_shm.in_small_shm(megabytes, job), timeout=60)
    dies = {name: done.returncode != 0 for name, done in outcomes.items()}
    assert dies["bare"] == dies["engine"] and outcomes["engine"].stderr.count(SAID) == dies["bare"], outcomes


@pytest.mark.parametrize(
    "environ, whole, needed",
    [
        ({}, 32, ""),
        ({}, 31, "MPICH needs 31.5 MB"),
        ({}, 16, "MPICH needs 31.5 MB"),
        ({}, 15, ""),
        ({}, 5, ""),
        ({}, 4, "MPICH needs 31.5 MB"),
        ({"I_MPI_HYDRA_UUID": "1"}, 12, ""),
        ({"I_MPI_HYDRA_UUID": "1"}, 11, "Intel MPI needs 12.0 MB"),
    ],
)
def test_what_each_mpi_needs(tmp_path, monkeypatch, capfd, environ, whole, needed):
    """The sizes are those of docs/mpis.md, for 4 ranks. It is said once."""
    space = SimpleNamespace(f_frsize=1 << 20, f_blocks=whole)
    monkeypatch.setattr(os, "statvfs", lambda folder: space)
    mine: list[socket.socket] = []
    monkeypatch.setattr(segments, "_said", mine)
    segments.say_if_too_small(tmp_path, environ)
    assert capfd.readouterr().err == ""
    segments.say_if_too_small(tmp_path, environ | {"MPI_LOCALNRANKS": "4"})
    said = capfd.readouterr().err
    assert (f"{tmp_path} has {whole}.0 MB, and {needed}" in said) if needed else said == ""
    segments.say_if_too_small(tmp_path, environ | {"MPI_LOCALNRANKS": "4"})  # on another task of the node
    assert capfd.readouterr().err == ""
    for one in mine:
        one.close()
