"""Which device a rank gets, and every reason why it cannot: found on all ranks before anything hangs."""

import sys
from types import SimpleNamespace

import pytest
import torch

from commengine import CollectiveError, Communicator
from commengine.device.choice import (
    choose_device,
    device_problem,
    identity,
    loaded_nccl,
    local_rank,
    may_share,
    parse_device,
    places,
    runtime_problem,
    sharing_problem,
)
from commengine.device.nccl import load_runtime, to_install
from tests.support import mpirun
from tests.support.device.cuda_stand_in import host_runtime

CUDA = torch.device("cuda")
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.mark.parametrize(
    ("device", "parsed"),
    [
        ("cpu", "cpu"),
        (torch.device("cpu"), "cpu"),
        (torch.device("cpu", 0), "cpu"),
        ("cuda", "cuda"),
        ("cuda:3", "cuda:3"),
        (3, "cuda:3"),
        (torch.device("cuda", 1), "cuda:1"),
        (None, "cuda"),
    ],
    ids=str,
)
def test_devices_in_every_spelling(device, parsed):
    assert str(parse_device(device)) == parsed


@pytest.mark.parametrize("device", ["gpu", "mps", "cuda:x", torch.device("meta"), 1.5, -1])
def test_no_device(device):
    with pytest.raises(CollectiveError, match=r"device=.* must be 'cpu', 'cuda', 'cuda:N'"):
        parse_device(device)


def test_problems_of_the_device():
    two = host_runtime(devices=2).cuda
    assert device_problem(CUDA, two, "12.8") is None
    assert device_problem(torch.device("cuda:1"), two, "12.8") is None
    assert "'cuda:0' to 'cuda:1'" in device_problem(torch.device("cuda:2"), two, "12.8")
    assert "built without CUDA" in device_problem(CUDA, two, "")
    assert "finds no CUDA device" in device_problem(CUDA, host_runtime(devices=0).cuda, "12.8")


def test_problems_of_the_binding():
    runtime = host_runtime()
    assert runtime_problem(runtime, "12.4", []) is None
    said = runtime_problem(runtime, "13.0", [])
    assert "torch is built for CUDA 13 and CuPy for CUDA 12" in said and "pip install '.[gpu-cuda13]'" in said
    assert "two NCCL libraries are loaded, /a and /b" in runtime_problem(runtime, "12.4", ["/a", "/b"])
    assert "NCCL 2.9.6 is too old: 2.10.0" in runtime_problem(host_runtime(version=20906), "12.4", [])


def test_loaded_libraries_are_told_apart_by_their_files(tmp_path):
    real = tmp_path / "libnccl.so.2"
    real.touch()
    link = tmp_path / "other" / "libnccl.so.2"
    link.parent.mkdir()
    link.symlink_to(real)
    line = "7f0000000000-7f0000001000 r-xp 00000000 fe:00 123                      "
    maps = "".join(f"{line}{path}\n" for path in (real, real, link, "/usr/lib/libnccl-net.so", "/usr/lib/libm.so.6"))
    assert loaded_nccl(maps) == [str(real)]
    assert loaded_nccl(maps + f"{line}/opt/libnccl.so.2.21.5\n") == sorted([str(real), "/opt/libnccl.so.2.21.5"])
    assert loaded_nccl(f"{line}[heap]\n") == []


def test_sharing_a_device():
    assert sharing_problem(["a", "b"], 2) is None
    said = sharing_problem(["a", "a", "b", "b"], 2)
    assert "4 ranks of this node use 2 CUDA devices" in said and "NCCL_MULTI_RANK_GPU_ENABLE=1" in said
    asked = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    assert may_share(host_runtime(version=23000), asked)
    assert not may_share(host_runtime(version=22907), asked) and not may_share(host_runtime(), {})


def test_the_launcher_tells_a_ranks_number_on_its_node():
    assert local_rank({"MPI_LOCALRANKID": "3", "SLURM_LOCALID": "0"}) == 3  # mpiexec inside a Slurm allocation
    assert local_rank({"OMPI_COMM_WORLD_LOCAL_RANK": "2"}) == 2
    assert local_rank({"SLURM_LOCALID": "5", "RANK": "9"}) == 5
    assert local_rank({}) is None and local_rank({"SLURM_LOCALID": ""}) is None


def test_ranks_of_a_node_are_counted_by_the_launcher_or_in_the_group():
    assert places([(14, 6), (12, 4)]) == [6, 4]  # whatever their order in the group
    assert places([(12, None), (13, 5)]) == [0, 1]
    assert places([(12, 0), (13, 0)]) == [0, 1]  # inherited from something that started one task


HIDDEN = "import sys; sys.modules[{name!r}] = None; from commengine.device.nccl import load_runtime; load_runtime()"


@pytest.mark.slow
def test_missing_cupy_names_the_extras():
    done = mpirun.command([sys.executable, "-c", HIDDEN.format(name="cupy")], timeout=60, fresh=False)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("commengine.errors.CollectiveError: CuPy cannot be imported")
    assert to_install() in last and "transport='staged' needs no CuPy" in last


def test_the_extra_fits_torch():
    """The package is on no index: the command works in a checkout."""
    assert to_install("12.8") == "in a checkout of commengine, pip install '.[gpu]'"
    assert to_install("13.0") == "in a checkout of commengine, pip install '.[gpu-cuda13]'"
    assert "'.[gpu]' (CUDA 12) or pip install '.[gpu-cuda13]' (CUDA 13)" in to_install("")


def test_missing_libnccl_names_the_extras(monkeypatch):
    pytest.importorskip("cupy")
    from cupy.cuda import nccl

    monkeypatch.setattr(nccl, "available", False)
    with pytest.raises(CollectiveError, match=r"finds no libnccl.so.2: in a checkout of"):
        load_runtime()


def test_two_parts_of_one_gpu_are_one_device():
    """Of MIG: NCCL compares the places on the bus, and would refuse them late."""

    def part(uuid, bus):
        return SimpleNamespace(name="part", uuid=uuid, pci_domain_id=0, pci_bus_id=bus, pci_device_id=0)

    parts = [part("MIG-1", 0x1B), part("MIG-2", 0x1B), part("MIG-3", 0x43)]
    names = [identity(index, SimpleNamespace(get_device_properties=parts.__getitem__)) for index in range(3)]
    assert names[0] == names[1] == "00000000:1b:00" and names[2] != names[0]
    assert "2 ranks of this node use 1 CUDA device " in sharing_problem(names[:2], 2)


# Together ---------------------------------------------------------------------------------------------------------


@pytest.mark.mpi(min_size=1)
@pytest.mark.every_size
def test_ranks_of_a_node_take_devices_in_turn(mpi_world, monkeypatch):
    monkeypatch.setattr("commengine.device.choice.device_problem", lambda *_: None)
    monkeypatch.setattr("commengine.device.choice.runtime_problem", lambda *_: None)
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)

    def choose(devices, device="cuda", transport="nccl", version=23203):
        runtime = host_runtime(devices=devices, version=version)
        return choose_device(mpi_world, device, transport, cuda=runtime.cuda, load=lambda: runtime)[0]

    # Open MPI may number the ranks of a node in another order than the world does.
    assert sorted(mpi_world.allgather(choose(4).index)) == list(range(mpi_world.size))
    assert choose(1, transport="staged") == torch.device("cuda", 0)  # MPI does not mind
    if mpi_world.size == 1:
        assert choose(4, "cuda:3") == torch.device("cuda", 3)
        return
    for few, device in ((1, "cuda"), (4, "cuda:0")):
        with pytest.raises(CollectiveError, match=f"{mpi_world.size} ranks of this node use 1 CUDA device "):
            choose(few, device)
    monkeypatch.setenv("NCCL_HOSTID", f"host {mpi_world.rank}")  # NCCL takes them for ranks of several hosts
    assert sorted(mpi_world.allgather(choose(2).index)) == sorted(rank % 2 for rank in range(mpi_world.size))
    monkeypatch.setenv("NCCL_HOSTID", "one host")
    with pytest.raises(CollectiveError, match=r"needs one for each rank: .* or another NCCL_HOSTID for each rank"):
        choose(1)
    monkeypatch.delenv("NCCL_HOSTID")
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert sorted(mpi_world.allgather(choose(2).index)) == sorted(rank % 2 for rank in range(mpi_world.size))
    with pytest.raises(CollectiveError, match="needs one for each rank"):
        choose(1, version=22907)


@pytest.mark.mpi(min_size=2)
@pytest.mark.every_size
def test_two_groups_of_a_node_take_different_devices(mpi_world, monkeypatch):
    """Neither knows of the other, as in a program that runs two models."""
    monkeypatch.setattr("commengine.device.choice.device_problem", lambda *_: None)
    monkeypatch.setattr("commengine.device.choice.runtime_problem", lambda *_: None)
    half = mpi_world.Split(mpi_world.rank * 2 // mpi_world.size, -mpi_world.rank)
    runtime = host_runtime(devices=mpi_world.size)
    device, _ = choose_device(half, "cuda", cuda=runtime.cuda, load=lambda: runtime)
    half.Free()
    assert sorted(mpi_world.allgather(str(device))) == [f"cuda:{rank}" for rank in range(mpi_world.size)]


@pytest.mark.mpi(min_size=2)
def test_a_problem_of_one_rank_is_every_ranks_error(mpi_world):
    last = mpi_world.rank == mpi_world.size - 1

    def load():
        if last:
            raise CollectiveError("no libnccl")
        return host_runtime()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("commengine.device.choice.device_problem", lambda *_: None)
        patch.setattr("commengine.device.choice.runtime_problem", lambda *_: None)
        with pytest.raises(CollectiveError) as error:
            choose_device(mpi_world, "cuda", cuda=host_runtime().cuda, load=load)
    assert str(error.value) == f"rank {mpi_world.size - 1}: device='cuda': no libnccl"


@NO_GPU
@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("transport", ["nccl", "staged"])
def test_without_a_gpu_the_error_says_so(mpi_world, transport):
    with pytest.raises(CollectiveError, match=r"^device='cuda(:0)?': (this torch|torch finds no CUDA device)"):
        Communicator(mpi_world, device="cuda" if transport == "nccl" else 0, transport=transport)
    with pytest.raises(CollectiveError, match="transport='gloo' is not one of nccl, staged"):
        Communicator(mpi_world, transport="gloo")
    with Communicator(mpi_world, device=torch.device("cpu")) as comm:
        assert comm.device == torch.device("cpu")
