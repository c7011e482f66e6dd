"""The machine beside a result: its GPUs, driver and libraries are named, and a machine without them has none."""

import os
from types import SimpleNamespace

from bench.command import machine


def cuda(*names):
    found = [SimpleNamespace(name=name, total_memory=80 << 30) for name in names]
    return SimpleNamespace(
        is_available=lambda: bool(found), device_count=lambda: len(found), get_device_properties=found.__getitem__
    )


def test_devices_are_named_with_their_memory():
    assert machine.devices(cuda()) == []
    assert machine.devices(cuda("GPU A", "GPU B")) == ["GPU A (80.0 GiB)", "GPU B (80.0 GiB)"]


def test_driver_is_what_nvidia_smi_prints(tmp_path, monkeypatch):
    script = tmp_path / "nvidia-smi"
    script.write_text("#!/bin/sh\n[ \"$1\" = --query-gpu=driver_version ] && printf '580.1.3\\n580.1.3\\n'\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert machine.driver() == "580.1.3"


def test_nccl_reads_the_version_of_the_library_that_is_loaded(monkeypatch):
    class Library:
        def ncclGetVersion(self, number):  # noqa: N802
            number._obj.value = 23007
            return 0

    monkeypatch.setattr(machine.ctypes, "CDLL", lambda name: Library())
    assert machine.nccl() == "2.30.7"
    monkeypatch.undo()
    assert machine.nccl("libno-such-library.so.2") is None


def test_environment_of_a_machine_with_a_gpu_has_its_software(monkeypatch):
    monkeypatch.setattr(machine, "devices", lambda: ["GPU A (80.0 GiB)"] * 8)
    monkeypatch.setattr(machine, "driver", lambda: "580.1.3")
    monkeypatch.setattr(machine, "nccl", lambda: "2.30.7")
    versions = {"cupy-cuda13x": "14.2.0", "nvidia-nccl-cu13": "2.28.9"}
    installed = machine.installed
    monkeypatch.setattr(
        machine, "installed", lambda names: versions if names == machine.GPU_PACKAGES else installed(names)
    )
    result = machine.environment("bench.gpu")
    assert result["hardware"].endswith("; 8 x GPU A (80.0 GiB)")
    assert result["versions"].items() >= {**versions, "driver": "580.1.3", "NCCL loaded": "2.30.7"}.items()
    text = "\n".join(machine.heading("Title", result))
    assert "driver 580.1.3" in text and "8 x GPU A" in text


def test_environment_without_a_gpu_claims_none(monkeypatch):
    monkeypatch.setattr(machine, "devices", list)
    result = machine.environment("bench.gpu")
    assert result["gpus"] == [] and not result["versions"].keys() & {"driver", "NCCL loaded", "CUDA"}


def test_cores_of_a_bound_process_are_some_of_the_machines(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {8, 9})
    assert machine.environment("bench.gpu")["hardware"].startswith("2 of 64 cores of ")
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert machine.environment("bench.gpu")["hardware"].startswith("2 cores of ")
