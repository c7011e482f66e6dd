"""A group whose device nobody names: it has the GPUs that it can use, and is a host group otherwise, never an error."""

import functools

import pytest
import torch

from commengine import CollectiveError, Communicator, communicator
from commengine.device.backends import open_backend
from commengine.device.staged import HostedBackend
from tests.support.device.cuda_stand_in import host_runtime
from tests.support.device.device_stand_in import on_device

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.sizes(1, 2)]

NO_CUPY = "CuPy cannot be imported (No module named 'cupy')"


@pytest.fixture
def machine(monkeypatch):
    """``machine(4)``: from now on a Communicator sees four stand-ins for GPUs. load: loads CuPy; None: it is there."""
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    monkeypatch.setattr("commengine.device.choice.runtime_problem", lambda *_: None)

    def machine(devices, load=None):
        runtime = host_runtime(devices=devices)
        opened = functools.partial(open_backend, cuda=runtime.cuda, load=load or (lambda: runtime))
        monkeypatch.setattr(communicator, "open_backend", opened)
        monkeypatch.setattr(
            "commengine.device.choice.device_problem",
            lambda *_: None if devices else "torch finds no CUDA device",
        )
        return runtime

    return machine


def no_cupy():
    raise CollectiveError(NO_CUPY)


def works_on_the_host(comm):
    tensor = torch.ones(3)
    comm.all_reduce(tensor)
    assert (tensor == comm.size).all() and comm.device == torch.device("cpu")


def test_without_a_gpu_it_is_a_host_group_and_there_is_nothing_to_say(mpi_world, machine):
    machine(0, no_cupy)
    with Communicator(mpi_world) as comm:
        works_on_the_host(comm)
        assert comm.no_device is None


def test_one_rank_needs_no_cupy(machine):
    from mpi4py import MPI

    machine(1, no_cupy)
    for device in (None, "cuda"):
        with Communicator(MPI.COMM_SELF, device=device) as comm:
            assert comm.device == torch.device("cuda", 0) and comm.no_device is None
            assert isinstance(comm._backend, HostedBackend)


@pytest.mark.mpi(min_size=2)
def test_without_cupy_it_is_a_host_group_and_a_device_tensor_is_told_why(mpi_world, machine):
    machine(4, no_cupy)
    with Communicator(mpi_world) as comm:
        works_on_the_host(comm)
        assert comm.no_device == NO_CUPY
        part = comm.split(0, name="part")
        for group in (comm, part):
            with pytest.raises(CollectiveError) as error:
                group.all_reduce(on_device(torch.ones(3)))
            assert f"tensor lies on cuda:0, the communicator's device is cpu: {NO_CUPY}" in str(error.value)
        part.close()
    with pytest.raises(CollectiveError, match="device='cuda': CuPy cannot be imported"):
        Communicator(mpi_world, device="cuda")
    with Communicator(mpi_world, transport="staged") as comm:
        assert comm.device.type == "cuda"  # needs no CuPy


@pytest.mark.mpi(min_size=2)
def test_one_rank_without_cupy_makes_it_a_host_group_on_all(mpi_world, machine):
    last = mpi_world.size - 1
    machine(4, no_cupy if mpi_world.rank == last else None)
    with Communicator(mpi_world) as comm:
        works_on_the_host(comm)
        assert comm.no_device == f"rank {last}: {NO_CUPY}"


@pytest.mark.mpi(min_size=2)
def test_one_rank_without_a_gpu_makes_it_a_host_group_on_all(mpi_world, machine):
    last = mpi_world.size - 1
    machine(0 if mpi_world.rank == last else 4)
    with Communicator(mpi_world) as comm:
        works_on_the_host(comm)
        assert comm.no_device == f"rank {last}: torch finds no CUDA device"


@pytest.mark.mpi(min_size=2)
def test_more_ranks_than_gpus_are_a_host_group(mpi_world, machine):
    machine(1)
    with Communicator(mpi_world) as comm:
        works_on_the_host(comm)
        assert comm.no_device.startswith(f"{mpi_world.size} ranks of this node use 1 CUDA device (this rank sees 1)")
    with pytest.raises(CollectiveError, match="ranks of this node use 1 CUDA device "):
        Communicator(mpi_world, device="cuda")


def test_a_device_that_does_not_answer_makes_it_a_host_group(mpi_world, machine, monkeypatch):
    runtime = machine(4)

    def broken(index):
        raise RuntimeError("CUDA error: out of memory")

    if mpi_world.rank == 0:
        monkeypatch.setattr(runtime.cuda, "get_device_properties", broken)
    with Communicator(mpi_world) as comm:
        works_on_the_host(comm)
        assert comm.no_device.endswith("CUDA error: out of memory")


def test_a_thread_of_autograd_must_be_able_to_call_mpi(mpi_world, machine, monkeypatch):
    """A device's backward pass runs in one, and its collectives are MPI's unless NCCL moves the tensors."""
    from mpi4py import MPI

    machine(4)
    monkeypatch.setattr(MPI, "Query_thread", lambda: MPI.THREAD_FUNNELED)
    with pytest.raises(CollectiveError, match=r"transport='staged': .*MPI.THREAD_SERIALIZED or more"):
        Communicator(mpi_world, device="cuda", transport="staged")
    with Communicator(mpi_world, transport="staged") as comm:
        works_on_the_host(comm)
        assert "MPI.THREAD_SERIALIZED" in comm.no_device
    monkeypatch.setattr(MPI, "Query_thread", lambda: MPI.THREAD_SERIALIZED)
    with Communicator(mpi_world, device="cuda", transport="staged") as comm:
        assert comm.device.type == "cuda"


@pytest.mark.mpi(min_size=2)
def test_ranks_that_choose_and_ranks_that_ask_are_told(mpi_world, machine):
    machine(4)
    with pytest.raises(CollectiveError, match=r"rank 0 asked for .*device=cuda.*device=None"):
        Communicator(mpi_world, device=None if mpi_world.rank else "cuda")
