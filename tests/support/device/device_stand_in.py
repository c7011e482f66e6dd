"""A Communicator whose GPU is host memory: tensors that say they lie on cuda:0, and streams that are stand-ins."""

import contextlib

import torch

from commengine import Communicator, communicator
from commengine.device.backends import HostedBackend, NcclBackend
from commengine.device.nccl import DeviceTransport
from commengine.device.staged import Hosted, StagedTransport
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


def opens_stand_ins(runtime, device=CUDA, chunk=64):
    """What stands for `open_backend`: it opens backends on the stand-ins in ``runtime``, whatever device is asked for.

    chunk: bytes of a piece that is staged.
    """

    def opened(comm, host, _, transport, aware):
        if transport == "nccl":
            return NcclBackend(DeviceTransport.open(runtime, comm, device)), None
        return Unpinned(transport, runtime, device, host), None

    class Unpinned(HostedBackend):
        def __init__(self, kind, runtime, device, host):
            super().__init__(kind, runtime, device, host)
            if kind == "staged":
                staged = StagedTransport(runtime, host, device, pinned=False, chunk=chunk)
                self.transport = Hosted(staged, runtime, device)

        def over(self, host):
            return Unpinned(self.kind, self._runtime, self.device, host)

    return opened


def communicator_stand_in(monkeypatch, mpi_comm, transport="nccl", chunk=64, device=CUDA, **options):
    """A Communicator on stand-ins, and its runtime. chunk: bytes of a piece that is staged.

    With NCCL the test is skipped where `tests.support.device.nccl.library` cannot be had.
    """
    if transport == "nccl":
        from tests.support.device.nccl.library import cupy_runtime

        runtime = cupy_runtime()
    else:
        runtime = host_runtime()
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(monkeypatch.context())
        patch.setattr(communicator, "open_backend", opens_stand_ins(runtime, device, chunk))
        comm = Communicator(mpi_comm, device="cpu", transport=transport, **options)
    return comm, runtime
