"""Calls the Fortran program of cubes.f90 and asks it for a gradient. docs/bridge.md has the commands."""

import torch

import tplayers
from commengine import Communicator, Decomposition, launch

with launch.abort_on_error(), launch.split_world() as part, Communicator(part.comm, device="cpu") as comm:
    blocks = Decomposition.even((7, 5), (1, comm.size))  # Fortran's a(5, 7): its first index is the fastest, our last
    field = tplayers.BridgeField(blocks, leading=(2,))
    whole = torch.randn(2, 7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mine = (..., *blocks.slices((0, comm.rank)))
    u = whole[mine].contiguous().requires_grad_()
    with tplayers.Bridge(part.other, comm, gives=field, takes=field, timeout=60) as bridge:
        y = bridge.call(u)
        (gradient,) = torch.autograd.grad(y.cos().sum(), u)
    x = torch.arange(1.0, 6.0, dtype=torch.float64)
    with torch.no_grad():
        expected = (whole**3 * x)[mine]
        wrong = [(y - expected).abs().max(), (gradient + expected.sin() * (3 * whole**2 * x)[mine]).abs().max()]
    value, slope = map(max, zip(*comm.mpi.allgather([float(one) for one in wrong]), strict=True))
    if comm.rank == 0:
        print(f"cubes: the result is wrong by {value:.0e}, the gradient by {slope:.0e}")
