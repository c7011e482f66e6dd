"""Which device a communicator is for, and whether it can be: every rank finds out, and all raise or none does."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from commengine.agreement import raise_together
from commengine.errors import CollectiveError
from commengine.mpi import load_mpi

from .nccl import EXTRAS, NCCL_LEAST, Runtime, load_runtime

if TYPE_CHECKING:
    from mpi4py import MPI

#: how device tensors travel: by NCCL; by an MPI that takes device addresses; through pinned host memory, by any MPI
TRANSPORTS = ("nccl", "mpi", "staged")

#: the first NCCL (ncclGetVersion's number) that lets ranks share a device, and the variable that asks for it
NCCL_SHARING = 23000
SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"

#: the CUDA that torch is built for, as "12.8"; "" where it is built for none
CUDA_OF_TORCH = str(torch.version.cuda or "")

DeviceLike = str | int | torch.device | None


def parse_device(device: DeviceLike, cuda: Any = torch.cuda) -> torch.device:
    """``device`` as a torch.device, without an index where this rank is to choose one. Raises CollectiveError."""
    if device is None:
        return torch.device("cuda" if cuda.is_available() else "cpu")
    try:
        parsed = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, TypeError):
        parsed = None
    if parsed is None or parsed.type not in ("cpu", "cuda"):
        raise CollectiveError(f"device={device!r} must be 'cpu', 'cuda', 'cuda:N', a torch.device, or None to choose")
    return torch.device("cpu") if parsed.type == "cpu" else parsed


def choose_device(
    comm: MPI.Intracomm,
    device: DeviceLike,
    transport: str = "nccl",
    *,
    cuda: Any = torch.cuda,
    load: Callable[[], Runtime] = load_runtime,
) -> tuple[torch.device, Runtime | None]:
    """This rank's device, and what its tensors travel on (None: it is the CPU). Collective over ``comm``.

    Where no index is asked for, ranks of ``comm`` on one node take its devices in turn. Raises CollectiveError, on
    every rank alike, where a rank cannot have its device, and for what NCCL would hang or crash at.
    """
    wanted = parse_device(device, cuda)
    on_cpu = wanted.type == "cpu"
    if comm.allreduce(int(on_cpu)) not in (0, comm.size):
        raise_together(comm, f"device={device!r} is {'the CPU' if on_cpu else 'a CUDA device'} here: choose one")
    if on_cpu:
        return wanted, None
    runtime, problem = None, device_problem(wanted, cuda)
    if problem is None:
        try:
            runtime = load() if transport == "nccl" else Runtime(None, cuda, 0)
            problem = runtime_problem(runtime) if transport == "nccl" else None
        except CollectiveError as error:
            problem = str(error)
    raise_together(comm, None if problem is None else f"device={str(wanted)!r}: {problem}")
    assert runtime is not None  # else there was a problem
    node = comm.Split_type(load_mpi().COMM_TYPE_SHARED)
    index = node.rank % cuda.device_count() if str(wanted) == "cuda" else wanted.index
    taken = node.allgather(identity(index, cuda))
    node.Free()
    if transport == "nccl" and not may_share(runtime):
        problem = sharing_problem(taken, cuda.device_count())
    raise_together(comm, problem)
    return torch.device("cuda", index), runtime


def device_problem(wanted: torch.device, cuda: Any, version: str = CUDA_OF_TORCH) -> str | None:
    """Why this process has no such device."""
    if not version:
        return f"this torch ({torch.__version__}) is built without CUDA: {EXTRAS}, or use device='cpu'"
    count = cuda.device_count() if cuda.is_available() else 0
    if count == 0:
        return "torch finds no CUDA device (no GPU, no driver, or CUDA_VISIBLE_DEVICES hides it); or use device='cpu'"
    if str(wanted) != "cuda" and wanted.index >= count:
        return f"there are {count} CUDA devices, 'cuda:0' to 'cuda:{count - 1}'"
    return None


def runtime_problem(runtime: Runtime, version: str = CUDA_OF_TORCH, libraries: list[str] | None = None) -> str | None:
    """Why torch and the binding do not go together."""
    ours, theirs = int(version.split(".")[0]), runtime.cuda_version // 1000
    if ours != theirs:
        return f"torch is built for CUDA {ours} and CuPy for CUDA {theirs}: {EXTRAS}"
    if len(found := loaded_nccl() if libraries is None else libraries) > 1:
        return f"two NCCL libraries are loaded, {' and '.join(found)}: let torch and CuPy find the same one"
    if (least := runtime.nccl.get_version()) < NCCL_LEAST:
        return f"NCCL {version_text(least)} is too old: {version_text(NCCL_LEAST)} or newer is needed"
    return None


def loaded_nccl(maps: str | None = None) -> list[str]:
    """The files of all NCCL libraries in this process; [] where the system does not tell."""
    if maps is None:
        try:
            maps = Path("/proc/self/maps").read_text()
        except OSError:
            return []
    paths = re.findall(r"(/\S*/libnccl\.so[.\d]*)(?: \(deleted\))?$", maps, re.MULTILINE)
    return sorted({os.path.realpath(path) for path in paths})


def identity(index: int, cuda: Any) -> str:
    """What tells device ``index`` of this process from all others of the node, whatever CUDA_VISIBLE_DEVICES says."""
    found = cuda.get_device_properties(index)
    return str(getattr(found, "uuid", None) or f"{found.name} {index}")


def may_share(runtime: Runtime, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether NCCL lets several ranks of a communicator use one device."""
    return environ.get(SHARING) == "1" and runtime.nccl.get_version() >= NCCL_SHARING


def sharing_problem(taken: list[str], count: int) -> str | None:
    """What is wrong where the ranks of a node took the devices ``taken``, of ``count`` that this rank sees."""
    if max(Counter(taken).values()) == 1:
        return None
    ranks, devices = len(taken), len(set(taken))
    return (
        f"{ranks} ranks of this node use {devices} CUDA device{'s' * (devices > 1)} (this rank sees {count}), and NCCL "
        f"needs one for each rank: start fewer ranks, or give each its own, or set {SHARING}=1 with NCCL "
        f"{version_text(NCCL_SHARING)} or newer to share, or use transport='staged'"
    )


def version_text(version: int) -> str:
    """NCCL's number as people write it."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"
