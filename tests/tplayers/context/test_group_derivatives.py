"""Attention over a context group: a second derivative is right, or it is refused on all ranks."""

import pytest
import torch
from torch import nn

import tplayers
from commengine import Communicator
from tests.support.autograd.refusals import require_right_or_refused
from tests.tplayers.conftest import draw
from tplayers.context.group import CONTEXT_METHODS, ContextGroup

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.slow]


def core(q, k, v, drawn, bias):
    scores = (q @ k.transpose(-2, -1)).masked_fill(~torch.ones(q.shape[2], k.shape[2]).tril().bool(), -torch.inf)
    return (scores / q.shape[-1] ** 0.5).softmax(-1) @ v


@pytest.mark.parametrize("method", CONTEXT_METHODS)
def test_right_or_refused(mpi_world, method):
    with Communicator(mpi_world, device="cpu", timeout=60) as comm:
        context = ContextGroup(comm, method)
        rows = [context.chunks.positions(rank, 4 * comm.size, torch.device("cpu")) for rank in range(comm.size)]

        def parts(x):
            return context.attention(x, 0.5 * x, 2 * x, None, None, dropout=0.0, core=core)

        def whole(x):
            every = tplayers.all_gather(x.movedim(2, 0).contiguous(), comm)[torch.cat(rows).argsort()].movedim(0, 2)
            return core(every, 0.5 * every, 2 * every, None, None)[:, :, rows[comm.rank]]

        x = draw(1, 4, 4, 3, seed=comm.rank)
        assert require_right_or_refused(parts, whole, (nn.Module(), nn.Module()), x, comm)[1] >= 12
