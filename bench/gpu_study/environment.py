"""What a job on somebody else's GPU ran in, so that its log leaves nothing to guess: ``python -m`` this module."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import resource
import shutil
import subprocess
from importlib.metadata import distributions
from pathlib import Path

SECRET = re.compile("TOKEN|SECRET|PASSW|KEY|CREDENTIAL|COOKIE", re.IGNORECASE)
#: commands that tell of the GPU and of compilers, where they are there
COMMANDS = (["nvidia-smi", "-q"], ["cc", "--version"], ["c++", "--version"], ["nvcc", "--version"], ["ip", "address"])


def variables() -> list[str]:
    """The environment; of what looks secret only the name."""
    return [f"{name}={'...' if SECRET.search(name) else value}" for name, value in sorted(os.environ.items())]


def packages() -> list[str]:
    """The installed packages with their versions."""
    return sorted({f"{one.metadata['Name']} {one.version}" for one in distributions()}, key=str.lower)


def limits() -> list[str]:
    """Of this process, as (soft, hard); -1 is no limit. And the size of /dev/shm in bytes."""
    names = ("RLIMIT_MEMLOCK", "RLIMIT_NOFILE", "RLIMIT_NPROC", "RLIMIT_STACK", "RLIMIT_AS")
    found = [f"{name} {resource.getrlimit(getattr(resource, name))}" for name in names]
    with contextlib.suppress(OSError):
        found.append(f"/dev/shm {shutil.disk_usage('/dev/shm')}")
    return found


def libraries() -> list[str]:
    """The libraries of CUDA, NCCL and MPI that are mapped after torch, CuPy and mpi4py have been imported."""
    for name in ("torch", "mpi4py.MPI", "cupy.cuda.nccl"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    paths = re.findall(r"(/\S+\.so[\w.]*)$", Path("/proc/self/maps").read_text(), re.MULTILINE)
    return sorted({path for path in paths if re.search(r"/lib(cu|nv|nccl|mpi|uc|fabric|torch_cuda)", path)})


def main() -> None:
    """Print it all."""
    for title, found in (
        ("variables", variables()), ("packages", packages()), ("limits", limits()), ("libraries", libraries()),
    ):  # fmt: skip
        print(f"== {title}", *found, sep="\n", flush=True)
    for words in COMMANDS:
        if shutil.which(words[0]):
            print(f"== {' '.join(words)}", flush=True)
            subprocess.run(words, check=False)


if __name__ == "__main__":
    main()
