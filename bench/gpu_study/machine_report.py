"""The machine: its GPUs, the driver, and the versions of CUDA, CuPy and NCCL. It measures nothing.

Below the table stands what a job on somebody else's GPU ran in, so that its log leaves nothing to guess: variables (of
what looks secret only the name), the libraries of CUDA, NCCL and MPI that are loaded, packages, limits, compilers.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from bench.gpu_study.rows import RowFile

SECRET = re.compile("TOKEN|SECRET|PASSW|KEY|CREDENTIAL|COOKIE", re.IGNORECASE)
#: commands that tell the rest, where they are there
COMMANDS = (
    [sys.executable, "-m", "pip", "list"], ["sh", "-c", "ulimit -a; df -h /dev/shm"], ["nvidia-smi", "-q"],
    ["cc", "--version"], ["c++", "--version"], ["nvcc", "--version"], ["ip", "address"],
)  # fmt: skip


def libraries() -> list[str]:
    """The libraries of CUDA, NCCL and MPI that are mapped after torch, CuPy and mpi4py have been imported."""
    for name in ("mpi4py.MPI", "cupy.cuda.nccl"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    paths = re.findall(r"(/\S+\.so[\w.]*)$", Path("/proc/self/maps").read_text(), re.MULTILINE)
    return sorted({path for path in paths if re.search(r"/lib(cu|nv|nccl|mpi|uc|fabric|torch_cuda)", path)})


def run(given: Any) -> None:
    """Print the machine, a row for each GPU, and all the rest."""
    rows = RowFile(given, "The machine", ["| GPU | | compute capability |", "|--:|---|---|"])
    for index, name in enumerate(given.environment["gpus"]):
        major, minor = torch.cuda.get_device_capability(index)
        rows.add([index, name, f"{major}.{minor}"], {"gpu": name, "capability": f"{major}.{minor}"})
    variables = [f"{name}={'...' if SECRET.search(name) else value}" for name, value in sorted(os.environ.items())]
    print("== variables", *variables, "== libraries", *libraries(), sep="\n", flush=True)
    for words in COMMANDS:
        if shutil.which(words[0]):
            print(f"== {' '.join(words)}", flush=True)
            subprocess.run(words, check=False)
