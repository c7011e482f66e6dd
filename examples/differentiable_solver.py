"""Find the conductivity of a plate from how heat spread in it: the gradient goes back through a solver on blocks.

    mpirun -n 4 python examples/differentiable_solver.py

The solver runs on a Cartesian communicator of its own, on any number of ranks. Every rank holds the temperature and the
conductivity of its block, and the halo exchange in each time step is differentiable. So a backward pass through 20 time
steps gives each rank the gradient of its conductivities, with all that they do on other ranks.
"""

import torch
from mpi4py import MPI

import commengine
import tplayers

STEPS, EXPERIMENTS, SHAPE = 20, 6, (40, 50)

with commengine.launch.abort_on_error():
    cart = MPI.COMM_WORLD.Create_cart(MPI.Compute_dims(MPI.COMM_WORLD.size, 2), periods=[True, False])
    with commengine.CartesianGrid.from_mpi(cart, device="cpu") as grid:
        blocks = grid.decompose(SHAPE)  # even or uneven; a solver with blocks of its own asks grid.decomposition_of
        mine = blocks.slices(grid.coords)
        halo = tplayers.plan_halo(grid, blocks, 1, padding=["circular", "replicate"])  # a tube with insulated ends

        def spread(heat: torch.Tensor, conductivity: torch.Tensor) -> torch.Tensor:
            """Return the temperature after STEPS time steps. heat: [experiments, this rank's block]."""
            for _ in range(STEPS):
                around = tplayers.transfer(heat, halo, grid.comm)  # [experiments, the block and one strip around it]
                neighbours = around[:, 2:, 1:-1] + around[:, :-2, 1:-1] + around[:, 1:-1, 2:] + around[:, 1:-1, :-2]
                heat = heat + conductivity * (neighbours - 4 * heat)
            return heat

        x, y = torch.meshgrid(*(torch.arange(n) / n for n in SHAPE), indexing="ij")
        truth = (0.12 + 0.08 * torch.sin(2 * torch.pi * x) * torch.cos(torch.pi * y))[mine]
        generator = torch.Generator().manual_seed(1)
        heat = torch.rand((EXPERIMENTS, *SHAPE), generator=generator)[(slice(None), *mine)]
        measured = spread(heat, truth)

        guess = torch.full_like(truth, 0.12).requires_grad_()
        optimizer = torch.optim.Adam([guess], lr=0.004)
        for iteration in range(61):
            optimizer.zero_grad()
            loss = (spread(heat, guess) - measured).square().sum()  # of this rank: the gradient is that of the sum
            loss.backward()
            error = torch.stack([loss.detach(), (guess.detach() - truth).square().sum(), truth.square().sum()])
            grid.comm.all_reduce(error)
            if grid.rank == 0 and iteration % 30 == 0:
                print(f"iteration {iteration:2}: loss {error[0]:.2e}, error {(error[1] / error[2]).sqrt():.1%}")
            optimizer.step()
    cart.Free()
