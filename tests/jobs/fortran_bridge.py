"""Calls examples/bridge/cube.f90, and compares with its formula."""

import torch

import tplayers
from commengine import Communicator, Decomposition, launch

with launch.abort_on_error(), launch.split_world() as part, Communicator(part.comm, device="cpu") as comm:
    blocks = Decomposition.even((7, 5), (1, comm.size))
    field = tplayers.BridgeField(blocks, leading=(2,))
    whole = torch.randn(2, 7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mine = (..., *blocks.slices((0, comm.rank)))
    x = torch.arange(1.0, 6.0, dtype=torch.float64)
    u = whole[mine].contiguous().requires_grad_()
    with tplayers.Bridge(part.other, comm, field, field) as bridge:
        y = bridge.call(u)
        (g,) = torch.autograd.grad(y.cos().sum(), u)
    expected = whole**3 * x
    error = float((y - expected[mine]).abs().max())
    error = max(error, float((g + expected.sin()[mine] * (3 * whole**2 * x)[mine]).abs().max()))
    error = max(comm.mpi.allgather(error))
    if comm.rank == 0:
        print("ERROR", error)
