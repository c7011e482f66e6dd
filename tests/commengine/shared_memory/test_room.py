"""The memory that is left: of the machine, and under the limits of control groups."""

import os
from types import SimpleNamespace

import pytest

from commengine.shared_memory.room import disk_left, memory_left

MB = 1 << 20
MEMINFO = f"MemTotal:  {16000 * 1024} kB\nMemFree: 5 kB\nMemAvailable:  {8000 * 1024} kB\nHugePages_Total: 0\n"
MACHINE = 8000 * MB - 1000 * MB


def group(folder, most, used, active, inactive, version):
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    before = "" if version == 2 else "total_"
    (folder / names[0]).write_text(f"{most}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{before}active_file {active}\n{before}inactive_file {inactive}\n")


@pytest.fixture
def root(tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(MEMINFO)
    return tmp_path


def test_the_machines(root):
    assert memory_left(root) == MACHINE


@pytest.mark.parametrize("version", [1, 2])
def test_the_least_of_all_groups_counts(root, version):
    """The files' pages in memory are not in the way; a sixteenth of a limit is left."""
    top = root / ("sys/fs/cgroup" if version == 2 else "sys/fs/cgroup/memory")
    line = "0::/job/step\n" if version == 2 else "9:name=systemd:/x\n4:cpu,memory:/job/step\n0::/\n"
    (root / "proc/self/cgroup").write_text(line)
    group(top / "job/step", "max" if version == 2 else (1 << 63) - 4096, 7, 7, 7, version)
    assert memory_left(root) == MACHINE
    group(top / "job", 1600 * MB, 1200 * MB, 300 * MB, 100 * MB, version)
    assert memory_left(root) == (1600 - 100 - 1200 + 400) * MB
    group(top, 800 * MB, 900 * MB, 0, 0, version)
    assert memory_left(root) == -150 * MB


def test_a_group_whose_folder_is_not_to_be_seen(root):
    """Version 1 in a container: the path is that of the host, the container's own group lies at the top."""
    (root / "proc/self/cgroup").write_text("4:memory:/docker/12ab\n")
    group(root / "sys/fs/cgroup/memory", 320 * MB, 100 * MB, 0, 0, 1)
    assert memory_left(root) == 200 * MB


def test_what_this_machine_has():
    assert 0 < memory_left() < 1 << 50


@pytest.mark.parametrize(("whole", "free", "left"), [(64, 60, 28), (64, 30, -2), (30, 28, 8), (4096, 4000, 1952)])
def test_a_half_of_dev_shm_is_left(monkeypatch, whole, free, left):
    """Of 30 MB two thirds, because MPI needs 20 MB."""
    space = SimpleNamespace(f_frsize=4096, f_blocks=whole << 8, f_bavail=free << 8)
    monkeypatch.setattr(os, "statvfs", lambda folder: space)
    assert disk_left() == left * MB
