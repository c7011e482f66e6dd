"""Answers bridge_asks.c, and says how many calls it kept."""

import torch

import tplayers
from commengine import Communicator, Decomposition, launch

with launch.abort_on_error(), launch.split_world() as part, Communicator(part.comm, device="cpu") as comm:
    field = tplayers.BridgeField(Decomposition.even((11,), (comm.size,)), dtype=torch.float32)
    asked, kept = [], []
    with tplayers.Bridge(part.other, comm, field, field) as bridge:
        while (what := bridge.answer(lambda x: torch.sin(2 * x))) != "end":
            asked.append(what)
            kept.append(len(bridge._graphs))
    if comm.rank == 0:
        print("ASKED", *asked, *kept)
