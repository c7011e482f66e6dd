"""A Communicator whose GPU is host memory: tensors that say they lie on cuda:0, and streams that are stand-ins."""

import contextlib

import torch

from commengine import Communicator, communicator
from commengine.device.backends import NcclBackend
from commengine.device.nccl import NcclWire
from commengine.device.staged import HostedBackend
from tests.support.device.cuda_stand_in import host_runtime

CUDA = torch.device("cuda", 0)


class CudaTensor(torch.Tensor):
    """Host memory that says it is a device's."""

    is_cpu = False
    is_cuda = True
    device = CUDA


def on_device(tensor):
    """The same memory, as a device tensor; None stays None."""
    return None if tensor is None else tensor.as_subclass(CudaTensor)


def opens_stand_ins(runtime, device=CUDA):
    """What stands for `open_backend`: it opens backends on ``runtime``, whatever device is asked for."""

    def opened(comm, host, _, transport):
        if transport == "nccl":
            return NcclBackend(NcclWire.open(runtime, comm, device)), None
        return HostedBackend(runtime, device, host), None

    return opened


def communicator_stand_in(monkeypatch, mpi_comm, transport="nccl", device=CUDA, **options):
    """A Communicator on stand-ins, and its runtime.

    With NCCL the test is skipped where `tests.support.device.nccl.library` cannot be had.
    """
    if transport == "nccl":
        from tests.support.device.nccl.library import cupy_runtime

        runtime = cupy_runtime()
    else:
        runtime = host_runtime()
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(monkeypatch.context())
        patch.setattr(communicator, "open_backend", opens_stand_ins(runtime, device))
        comm = Communicator(mpi_comm, device="cpu", transport=transport, **options)
    return comm, runtime
