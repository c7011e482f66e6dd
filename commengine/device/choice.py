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
from commengine.mpi import load_mpi, reduced

from .nccl import CUDA_OF_TORCH, NCCL_LEAST, WITHOUT_CUPY, Runtime, load_runtime, to_install

if TYPE_CHECKING:
    from mpi4py import MPI

#: how device tensors travel: by NCCL; or by the transports of the host, through pinned host memory
TRANSPORTS = ("nccl", "staged")

#: the first NCCL that lets ranks share a device, as ncclGetVersion writes it, and the environment variable for it
NCCL_SHARING = 23000
SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"

#: NCCL refuses two ranks on one device of one host, and this environment variable is the host's name to it
HOST_ID = "NCCL_HOSTID"

#: the environment variables in which launchers tell a rank its number among the ranks of COMM_WORLD on its node. The
#: first one that is set counts: an mpiexec inside a Slurm allocation sets its own variable and inherits Slurm's
LOCAL_RANKS = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "PALS_LOCAL_RANKID", "SLURM_LOCALID")

DeviceLike = str | int | torch.device | None


def parse_device(device: DeviceLike) -> torch.device:
    """Return ``device`` as a torch.device, without an index if this rank is to choose one; None is "cuda".

    Raises CollectiveError for anything but the CPU and CUDA devices.
    """
    if device is None:
        return torch.device("cuda")
    try:
        parsed = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, TypeError):
        parsed = None
    if parsed is None or parsed.type not in ("cpu", "cuda"):
        raise CollectiveError(f"device={device!r} must be 'cpu', 'cuda', 'cuda:N', a torch.device, or None to choose")
    return torch.device("cpu") if parsed.type == "cpu" else parsed


def stays_on_host(comm: MPI.Intracomm, device: DeviceLike, cuda: Any = torch.cuda) -> bool:
    """Whether the group's device is the CPU without a further look. Collective over ``comm`` if ``device`` is None.

    That is so where the ranks ask for the CPU, or leave the choice and find no CUDA device. They have compared before
    that they ask for the same kind of device.
    """
    if device is not None:
        return parse_device(device).type == "cpu"
    return not reduced(comm, cuda.is_available(), load_mpi().MAX)


def choose_device(
    comm: MPI.Intracomm,
    device: DeviceLike,
    transport: str = "nccl",
    *,
    cuda: Any = torch.cuda,
    load: Callable[[], Runtime] = load_runtime,
) -> tuple[torch.device, Runtime]:
    """Return this rank's CUDA device and the runtime for its tensors. Collective over ``comm``.

    Without an index in ``device``, the ranks of a node take its devices in turn (see `places`). The runtime has no NCCL
    if the transport needs none, or if a single rank has none: it has nobody to speak to. Raises CollectiveError, on
    every rank alike, when a rank cannot have its device, and for settings with which NCCL would hang or crash.
    """
    wanted = parse_device(device)
    runtime, names, problem = Runtime(None, cuda, 0), list[str](), device_problem(wanted, cuda)
    if problem is None:
        try:
            host = os.environ.get(HOST_ID, "")
            names = [f"{host} {identity(index, cuda)}" for index in range(cuda.device_count())]
        except RuntimeError as error:  # a device that is broken, or another process's alone
            problem = str(error)
    if problem is None and transport == "nccl":
        try:
            loaded = load()
            problem = runtime_problem(loaded)
        except CollectiveError as error:
            problem = str(error)
        if problem is None:
            runtime = loaded
        elif comm.size == 1:
            problem = None
    asked = "" if device is None else f"device={str(wanted)!r}: "
    raise_together(comm, None if problem is None else asked + problem)
    index, taken = _taken(comm, wanted, names)
    if runtime.nccl is not None and not may_share(runtime):
        problem = sharing_problem(taken, len(names))
    raise_together(comm, problem)
    return torch.device("cuda", index), runtime


def _taken(comm: MPI.Intracomm, wanted: torch.device, names: list[str]) -> tuple[int, list[str]]:
    """Return the index of this rank's device, and the devices of all ranks of its node. Collective over ``comm``.

    names: of the devices that this rank sees.
    """
    node, index = comm.Split_type(load_mpi().COMM_TYPE_SHARED), wanted.index
    numbers = places(node.allgather((load_mpi().COMM_WORLD.rank, local_rank())))
    if str(wanted) == "cuda":
        index = numbers[node.rank] % len(names)
    taken = node.allgather(names[index])
    node.Free()
    return index, taken


def local_rank(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return this rank's number among the ranks of MPI.COMM_WORLD on its node, or None if no launcher tells it."""
    told = next((environ[name] for name in LOCAL_RANKS if name in environ), "")
    return int(told) if told.isdecimal() else None


def places(ranks: list[tuple[int, int | None]]) -> list[int]:
    """Return the numbers by which the ranks of a group on one node take its devices, in the order of ``ranks``.

    ranks: (rank in COMM_WORLD, local rank) of each. The numbers are the local ranks, which count all ranks of
    COMM_WORLD on the node: two groups of a node then take different devices, although neither knows of the other. If
    they are unknown or not all different, the group's ranks are counted in the order of COMM_WORLD.
    """
    order = sorted(world for world, _ in ranks)
    told = [local for _, local in ranks if local is not None]
    return told if len(set(told)) == len(ranks) else [order.index(world) for world, _ in ranks]


def device_problem(wanted: torch.device, cuda: Any, version: str = CUDA_OF_TORCH) -> str | None:
    """Return why this process has no such device, or None.

    version: the CUDA version that torch is built for.
    """
    if not version:
        return (
            f"this torch ({torch.__version__}) is built without CUDA, and only another torch can use a GPU: "
            f"{to_install(version)}; or use device='cpu'"
        )
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
        return f"torch is built for CUDA {ours} and CuPy for CUDA {theirs}: {to_install(version)}; {WITHOUT_CUPY}"
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
    """Return a name for device ``index`` that is unique on the node, whatever CUDA_VISIBLE_DEVICES says.

    That is its place on the PCI bus where torch tells it, because NCCL compares the places: two parts of one GPU (MIG)
    have different UUIDs, and NCCL refuses them.
    """
    found = cuda.get_device_properties(index)
    if hasattr(found, "pci_bus_id"):
        return f"{found.pci_domain_id:08x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}"
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
        f"{version_text(NCCL_SHARING)} or newer or another {HOST_ID} for each rank to share, or use "
        "transport='staged' or device='cpu'"
    )


def version_text(version: int) -> str:
    """Return NCCL's version number as people write it: 21800 is 2.18.0."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"
