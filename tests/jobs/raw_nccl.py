"""CuPy's NCCL binding on this job's ranks, without the engine: ``mpiexec -n N python tests/jobs/raw_nccl.py``.

It tells a problem of the installation (CuPy, NCCL, the driver, ranks on one GPU) from a problem of ours. With
``--on-host`` the binding calls the tests' own libnccl, which needs no GPU.
"""

import argparse
import sys
from pathlib import Path

import torch
from mpi4py import MPI

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from commengine.device.choice import loaded_nccl, version_text
from commengine.device.nccl import load_runtime
from commengine.dtypes import NCCL_REDUCTIONS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--on-host", action="store_true", help="move host memory, by the libnccl of the tests")
    parser.add_argument("--elements", type=int, default=1 << 20, help="elements of a tensor (default: %(default)s)")
    given = parser.parse_args()
    world = MPI.COMM_WORLD
    if given.on_host:
        import pytest

        try:
            from tests.support.device.nccl.library import cupy_runtime
        except pytest.skip.Exception as reason:
            print(f"rank {world.rank}: skipped, {reason}")
            return
        runtime, device = cupy_runtime(), torch.device("cpu")
    else:
        runtime = load_runtime()
        device = torch.device("cuda", world.rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    nccl = runtime.nccl
    stream = runtime.cuda.current_stream()
    unique = world.bcast(nccl.get_unique_id() if world.rank == 0 else None)
    comm = nccl.NcclCommunicator(world.size, unique, world.rank)
    for op in ("sum", "avg"):  # on one rank only avg launches a kernel
        tensor = torch.full((given.elements,), float(world.rank + 1), device=device)
        code, redop = NCCL_REDUCTIONS[torch.float32, op]
        data = tensor.data_ptr()
        comm.allReduce(data, data, tensor.numel(), code, redop, stream.cuda_stream)
        stream.synchronize()
        total = world.size * (world.size + 1) / 2
        wanted = total if op == "sum" else total / world.size
        assert torch.allclose(tensor.cpu(), torch.full_like(tensor, wanted, device="cpu")), (op, tensor[:4], wanted)
        print(f"rank {world.rank} of {world.size}: {op} is right", flush=True)
    comm.destroy()
    if world.rank == 0:
        libraries = ", ".join(loaded_nccl()) or "none"
        print(f"NCCL {version_text(nccl.get_version())}; loaded libraries: {libraries}", flush=True)


if __name__ == "__main__":
    main()
