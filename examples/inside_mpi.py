"""A network inside an MPI program: half of the ranks simulate, the other half run the network on their state.

    mpirun -n 4 python examples/inside_mpi.py

The number of ranks must be even. The program needs no launcher and no environment variables of ours.
"""

import torch
from mpi4py import MPI

import commengine
import tplayers

with commengine.launch.abort_on_error():  # without it, a rank that fails leaves the others waiting for ever
    commengine.launch.check_world_size(MPI.COMM_WORLD.size)  # with a wrong launcher each task is a world of its own
if MPI.COMM_WORLD.size % 2:
    raise SystemExit(1 if MPI.COMM_WORLD.rank else "the number of ranks must be even: mpirun -n 4 python ...")
half = MPI.COMM_WORLD.size // 2
simulates = MPI.COMM_WORLD.rank < half
with commengine.launch.abort_on_error():
    mine = MPI.COMM_WORLD.Split(color=simulates)
    state = torch.linspace(0, 1, 16 * 512).reshape(16, 1, 512)  # [sequence, batch, hidden]
    if simulates:
        MPI.COMM_WORLD.Send(state.numpy(), dest=half + mine.rank)
    else:
        MPI.COMM_WORLD.Recv(state.numpy(), source=mine.rank)
        with (
            commengine.Communicator(mine, device="cpu") as comm,
            commengine.ProcessGrid(comm, tensor=2 if comm.size % 2 == 0 else 1) as grid,
        ):
            mlp = tplayers.MLP(512, 2048, grid.tensor)  # each rank holds 1 / tensor of each weight matrix
            tplayers.initialize(mlp, seed=1)
            with commengine.trace(grid.tensor) as log:
                y = mlp(state)  # [16, 1, 512], equal on all ranks of grid.tensor
            if comm.rank == 0:
                print(grid, list(y.shape), log.summary(), sep="\n")
    mine.Free()
