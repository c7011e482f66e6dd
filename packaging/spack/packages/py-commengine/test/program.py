# The program of README.md.
# ruff: noqa: D100, D103

import torch

import tplayers
from commengine import launch


def main(world):  # a Communicator over MPI.COMM_WORLD
    mlp = tplayers.MLP(512, 2048, world)  # each rank holds 1 / ranks of each weight matrix
    tplayers.initialize(mlp, seed=1)  # the same model on any number of ranks
    y = mlp(torch.ones(16, 1, 512))  # [sequence, batch, hidden], equal on all ranks
    y.square().mean().backward()  # each rank has the gradients of what it holds
    if world.rank == 0:
        print(y.square().mean().item())


launch.run(main)
