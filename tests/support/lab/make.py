"""Run make as a user does, also on a machine that has, or seems to have, GPUs."""

import os
import subprocess
from pathlib import Path

from tests.support.mpirun import ROOT

# What the make that runs the tests may have been given.
_GIVEN = ("MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "ARGS", "NP", "DATA", "CONFIG", "MPI", "DEVICE", "MAKELEVEL")


def make(*words: str, programs: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run make in the repository's root. programs: a folder of programs that are found before others."""
    env = {name: value for name, value in os.environ.items() if name not in _GIVEN}
    if programs is not None:
        env["PATH"] = f"{programs}{os.pathsep}{env['PATH']}"
    return subprocess.run(["make", *words], cwd=ROOT, capture_output=True, text=True, check=False, env=env)


def nvidia_smi(folder: Path, gpus: int, cuda: str = "13.0") -> Path:
    """Write an nvidia-smi that finds ``gpus`` GPUs and a driver for this CUDA; returns the folder."""
    lines = "\\n".join(f"GPU {index}: stand-in (UUID: GPU-{index})" for index in range(gpus))
    table = f"| NVIDIA-SMI 580.65.06   Driver Version: 580.65.06   CUDA Version: {cuda}     |"
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nif [ \"$1\" = -L ]; then printf '{lines}\\n'; else echo '{table}'; fi\n")
    program.chmod(0o755)
    return folder
