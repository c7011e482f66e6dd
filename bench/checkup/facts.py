"""What one rank sees of its host, its launcher and its libraries, as values that fit into JSON; measures nothing."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bench.command.machine import devices, installed, nccl, usable_cores
from commengine.mpi import load_mpi

#: variables that change how MPI, UCX, NCCL and threads behave
PREFIXES = (
    "UCX_", "FI_", "OMPI_MCA_", "PRTE_MCA_", "MPIR_CVAR_", "MPICH_", "I_MPI_", "NCCL_", "OMP_", "MKL_", "SLURM_MPI_",
)  # fmt: skip
#: Intel's mpiexec tells its ranks the machine in these
OF_LAUNCHER = (
    "I_MPI_HYDRA_", "I_MPI_INFO_", "I_MPI_PIN_INFO", "I_MPI_PIN_MAPPING", "I_MPI_BIND_WIN_ALLOCATE",
    "I_MPI_INTERNAL_MEM_POLICY", "I_MPI_RETURN_WIN_MEM_NUMA",
)  # fmt: skip
MORE = ("CUDA_VISIBLE_DEVICES", "PALS_RANKID")
LEVELS = ("THREAD_SINGLE", "THREAD_FUNNELED", "THREAD_SERIALIZED", "THREAD_MULTIPLE")
NETWORKS, INFINIBAND = Path("/sys/class/net"), Path("/sys/class/infiniband")
SHARED = Path("/dev/shm")


def rank_facts() -> dict[str, Any]:
    """The facts of this rank. MPI must have started. Not collective."""
    mpi = load_mpi()
    shared = shutil.disk_usage(SHARED) if SHARED.is_dir() else None
    return {
        "rank": mpi.COMM_WORLD.rank,
        "host": socket.gethostname(),
        "launcher": launcher(),
        "mpi": " ".join(mpi.Get_library_version().replace("\0", "").split("\n")[0].split()),
        "mpi_standard": ".".join(map(str, mpi.Get_version())),
        "thread_level": LEVELS[[getattr(mpi, name) for name in LEVELS].index(mpi.Query_thread())],
        "versions": {"python": platform.python_version(), **installed(("torch", "mpi4py", "numpy"))},
        "cores": sorted(usable_cores()),
        "threads": torch.get_num_threads(),
        "shared_memory": None if shared is None else {"bytes": shared.total, "free": shared.free},
        "locked_memory": _locked_memory(),
        "networks": networks(),
        "infiniband": infiniband(),
        "gpus": devices(),
        "cuda_of_torch": torch.version.cuda,
        "nccl": nccl(),
        "cupy": next(iter(installed(("cupy", "cupy-cuda12x", "cupy-cuda13x")).values()), None),
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name in MORE or (name.startswith(PREFIXES) and not name.startswith(OF_LAUNCHER))
        },
    }


def launcher(environ: Mapping[str, str] = os.environ) -> str:
    """The launcher that started this process, from the variables that it sets for its ranks."""
    job = f", inside Slurm job {environ['SLURM_JOB_ID']}" if "SLURM_JOB_ID" in environ else ""
    if "MPI_LOCALNRANKS" in environ:  # before srun: inside a Slurm job mpiexec inherits its variables
        return f"{'Intel MPI' if 'I_MPI_HYDRA_UUID' in environ else 'MPICH'}'s mpiexec (hydra){job}"
    if "PALS_RANKID" in environ:
        return f"Cray PALS{job}"
    if "OMPI_COMM_WORLD_SIZE" in environ and not ("SLURM_STEP_ID" in environ and "PRTE_LAUNCHED" not in environ):
        return f"Open MPI's mpirun{job}"
    if "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ:
        kind = "pmix" if "PMIX_RANK" in environ else "pmi2" if "PMI_FD" in environ else "no PMI"
        return f"srun (job {environ.get('SLURM_JOB_ID')}, step {environ['SLURM_STEP_ID']}, {kind})"
    return "none: this process was started alone"


def networks(folder: Path = NETWORKS) -> list[dict[str, Any]]:
    """The network devices that are up, but the loopback: name, and Mbit/s where the device tells it."""
    found = []
    for path in sorted(folder.glob("*")):
        try:
            flags = int((path / "flags").read_text(), 16)
        except (OSError, ValueError):
            continue
        if flags & 1 and not flags & 8:  # linux/if.h: IFF_UP, IFF_LOOPBACK
            found.append({"name": path.name, "mbit_per_s": _positive(path / "speed")})
    return found


def infiniband(folder: Path = INFINIBAND) -> list[dict[str, str]]:
    """The ports of InfiniBand and RoCE adapters: name, state and rate, in the system's words."""
    found = []
    for port in sorted(folder.glob("*/ports/*")):
        words = {name: _text(port / name) for name in ("state", "rate")}
        found.append({"name": f"{port.parent.parent.name}:{port.name}", **words})
    return found


def _locked_memory() -> int | None:
    """Bytes that this process may lock, which InfiniBand needs; None: any number."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return "unknown"


def _positive(path: Path) -> int | None:
    text = _text(path)  # reading the speed of a virtual device is an error, or gives -1
    return int(text) if text.isdecimal() and int(text) > 0 else None
