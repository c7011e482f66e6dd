"""A mixture of experts on a device, and over an expert group of it, against the host's."""

import pytest
import torch

import tplayers
from commengine import CollectiveError, Communicator
from tplayers.experts.losses import RouterLosses
from tplayers.experts.moe import ExpertOptions, MoE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device, or not asked for with -m gpu"),
    pytest.mark.mpi(min_size=1),
    pytest.mark.every_size,
]

OPTIONS = ExpertOptions(8, 2, 64, shared_expert_size=32, shared_expert_gate=True)


@pytest.mark.parametrize("transport", ["nccl", "staged"])
@pytest.mark.parametrize("role", ["tensor", "experts"])
def test_results_and_gradients_are_the_hosts(mpi_world, transport, role):
    from mpi4py import MPI

    host = Communicator(mpi_world, device="cpu", name="host")
    try:
        device = Communicator(mpi_world, device="cuda", transport=transport)
    except CollectiveError as error:
        pytest.skip(str(error))
    found = []
    with (
        host,
        device,
        Communicator(MPI.COMM_SELF, device="cpu") as one,
        Communicator(MPI.COMM_SELF, device="cpu") as other,
    ):
        for group, alone in ((host, one), (device, other)):
            losses = RouterLosses(0.1, 0.01)
            tensor, experts = (group, None) if role == "tensor" else (alone, group)
            moe = MoE(48, OPTIONS, tensor, expert_group=experts, losses=losses)
            tplayers.initialize(moe, 1)
            moe.to(group.device)
            losses.scale = 0.5
            seed = 3 if role == "tensor" else 3 + group.rank
            x = torch.randn(16, 3, 48, generator=torch.Generator().manual_seed(seed)).to(group.device).requires_grad_()
            y = moe(x)
            y.sum().backward()
            found.append([y.detach(), x.grad, *(p.grad for p in moe.parameters())])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(theirs.cpu(), mine, rtol=1e-3, atol=1e-5)
