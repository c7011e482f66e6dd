"""The choice of a communicator's device. If one rank cannot have its device, every rank raises the same error."""

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

#: how device tensors travel: by NCCL; by an MPI that takes device addresses; by any MPI, through pinned host memory
TRANSPORTS = ("nccl", "mpi", "staged")

#: the first NCCL that lets ranks share a device, as ncclGetVersion writes it, and the environment variable for it
NCCL_SHARING = 23000
SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"

#: the CUDA version that torch is built for, such as "12.8"; "" if it is built without CUDA
CUDA_OF_TORCH = str(torch.version.cuda or "")

DeviceLike = str | int | torch.device | None


def parse_device(device: DeviceLike, cuda: Any = torch.cuda) -> torch.device:
    """Return ``device`` as a torch.device, without an index if this rank is to choose one.

    Raises CollectiveError for anything but the CPU and CUDA devices.
    """
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
    """Return this rank's device and the runtime for its tensors (None for the CPU). Collective over ``comm``.

    Without an index in ``device``, the ranks of a node take its devices in turn. Raises CollectiveError, on every rank
    alike, when a rank cannot have its device, and for settings with which NCCL would hang or crash.
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
    assert runtime is not None  # otherwise there was a problem
    node = comm.Split_type(load_mpi().COMM_TYPE_SHARED)
    index = node.rank % cuda.device_count() if str(wanted) == "cuda" else wanted.index
    taken = node.allgather(identity(index, cuda))
    node.Free()
    if transport == "nccl" and not may_share(runtime):
        problem = sharing_problem(taken, cuda.device_count())
    raise_together(comm, problem)
    return torch.device("cuda", index), runtime


def device_problem(wanted: torch.device, cuda: Any, version: str = CUDA_OF_TORCH) -> str | None:
    """Return why this process has no such device, or None.

    version: the CUDA version that torch is built for.
    """
    if not version:
        return f"this torch ({torch.__version__}) is built without CUDA: {EXTRAS}, or use device='cpu'"
    count = cuda.device_count() if cuda.is_available() else 0
    if count == 0:
        return "torch finds no CUDA device (no GPU, no driver, or CUDA_VISIBLE_DEVICES hides it); or use device='cpu'"
    if str(wanted) != "cuda" and wanted.index >= count:
        return f"there are {count} CUDA devices, 'cuda:0' to 'cuda:{count - 1}'"
    return None


def runtime_problem(runtime: Runtime, version: str = CUDA_OF_TORCH, libraries: list[str] | None = None) -> str | None:
    """Return why torch and the NCCL binding do not fit each other, or None.

    version: the CUDA version that torch is built for. libraries: the loaded NCCL libraries; None: look for them.
    """
    ours, theirs = int(version.split(".")[0]), runtime.cuda_version // 1000
    if ours != theirs:
        return f"torch is built for CUDA {ours} and CuPy for CUDA {theirs}: {EXTRAS}"
    if len(found := loaded_nccl() if libraries is None else libraries) > 1:
        return f"two NCCL libraries are loaded, {' and '.join(found)}: let torch and CuPy find the same one"
    if (least := runtime.nccl.get_version()) < NCCL_LEAST:
        return f"NCCL {version_text(least)} is too old: {version_text(NCCL_LEAST)} or newer is needed"
    return None


def loaded_nccl(maps: str | None = None) -> list[str]:
    """Return the files of all NCCL libraries in this process; [] if the system does not tell.

    maps: the text of ``/proc/self/maps``; None: read it.
    """
    if maps is None:
        try:
            maps = Path("/proc/self/maps").read_text()
        except OSError:
            return []
    paths = re.findall(r"(/\S*/libnccl\.so[.\d]*)(?: \(deleted\))?$", maps, re.MULTILINE)
    return sorted({os.path.realpath(path) for path in paths})


def identity(index: int, cuda: Any) -> str:
    """Return a name for device ``index`` that is unique on the node, whatever CUDA_VISIBLE_DEVICES says."""
    found = cuda.get_device_properties(index)
    return str(getattr(found, "uuid", None) or f"{found.name} {index}")


def may_share(runtime: Runtime, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether NCCL lets several ranks of a communicator use one device."""
    return environ.get(SHARING) == "1" and runtime.nccl.get_version() >= NCCL_SHARING


def sharing_problem(taken: list[str], count: int) -> str | None:
    """Return why NCCL refuses the devices ``taken`` by the ranks of a node, or None. count: devices this rank sees."""
    if max(Counter(taken).values()) == 1:
        return None
    ranks, devices = len(taken), len(set(taken))
    return (
        f"{ranks} ranks of this node use {devices} CUDA device{'s' * (devices > 1)} (this rank sees {count}), and NCCL "
        f"needs one for each rank: start fewer ranks, or give each its own, or set {SHARING}=1 with NCCL "
        f"{version_text(NCCL_SHARING)} or newer to share, or use transport='staged'"
    )


def version_text(version: int) -> str:
    """Return NCCL's version number as people write it: 21800 is 2.18.0."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"
