"""The processes of the rivals: their results, and what is said where one is absent, ends, or cannot be compiled."""

import json
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from bench.peers.calls import compiled as compiled_loops
from bench.peers.calls import deepspeed_shm
from bench.peers.calls.compiled import SOURCES, CompileError, compiled
from bench.transports import environments, peer_process
from bench.transports.peer_process import PEERS, Peer, PeerTransport
from commengine import CollectiveError, Communicator
from tests.support import mpirun

CALLS = "bench.peers.calls"
OTHERS = ["openmpi", "engine@openmpi", "shared@openmpi", "intel", "engine@intel", "shared@intel", "oneccl", "deepspeed"]


def measured(path: Path, *options: object, ranks: int = 2) -> dict:
    words = ("--warmup", 1, "--time-limit", 0.002, "--json", path, *options)
    done = mpirun.run(ranks, "-m", "bench.collectives", *map(str, words), timeout=150)
    assert done.returncode == 0, done.stderr + done.stdout
    return json.loads(path.read_text())


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(not any(map(shutil.which, SOURCES["c_loop"].compilers)), reason="there is no C compiler")
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_loop_in_c_is_right(tmp_path, ranks):
    """Sizes in one slot and beyond, and a number of elements that the ranks cannot share equally."""
    sizes = ("--min-bytes", 40, "--max-bytes", "41K", "--step-factor", 1024)
    result = measured(
        tmp_path / "r.json", "--transports", "c-loop", "--dtypes", "float32", "bfloat16", *sizes, "--operations",
        *PEERS["c-loop"].operations, ranks=ranks,
    )  # fmt: skip
    assert {row["operation"] for row in result["rows"]} == set(PEERS["c-loop"].operations)
    assert not result["skipped"] and not any(row["wrong"] for row in result["rows"])


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_an_installed_rival_is_right(tmp_path, name):
    environment = PEERS[name].environment
    if not (environments.FOLDER / environment / "ready").exists():
        pytest.skip(f"make rivals was not run: there is no {environment}")
    sizes = ("--min-bytes", 40, "--max-bytes", "40K", "--step-factor", 1024)
    result = measured(tmp_path / "r.json", "--transports", "engine", name, "--dtypes", "float32", "bfloat16", *sizes)
    mine = [row for row in result["rows"] if row["transport"] == name]
    assert {row["operation"] for row in mine} == set(PEERS[name].operations)
    assert not any(row["wrong"] for row in mine)


def test_without_a_compiler_one_line_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CompileError, match=r"^needs a compiler for c_loop\.c: none of cc, gcc, clang is here$"):
        compiled(SOURCES["c_loop"])


@pytest.mark.skipif(not shutil.which("cc"), reason="there is no C compiler")
def test_a_source_that_does_not_compile_is_the_compilers_first_line(monkeypatch, tmp_path):
    monkeypatch.setattr(compiled_loops, "FOLDER", tmp_path)
    broken = compiled_loops.LoopSource("c_loop.c", ("cc",), ("-include", "/no/such/file.h"))
    with pytest.raises(CompileError, match=r"does not compile c_loop\.c: .*no/such/file\.h"):
        compiled(broken)
    assert not list((tmp_path / "compiled").glob("*.so"))


@pytest.mark.parametrize("rank", [0, 1])
def test_the_lock_of_a_build_that_was_killed_goes_before_the_next_build(monkeypatch, tmp_path, rank: int):
    """Rank 0 alone deletes it: of the other ranks, one may come while rank 0 builds."""
    lock = tmp_path / deepspeed_shm.LOCK
    lock.parent.mkdir()
    lock.touch()
    locked = []

    class Builder:
        def load(self, *, verbose: bool) -> str:
            locked.append(lock.exists())
            return "operators"

    cpu = ModuleType("deepspeed.ops.op_builder.cpu")
    cpu.ShareMemCommBuilder = Builder
    for name in ("deepspeed", "deepspeed.ops", "deepspeed.ops.op_builder"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, cpu.__name__, cpu)
    monkeypatch.setattr(deepspeed_shm, "dist", SimpleNamespace(get_rank=lambda: rank, barrier=lambda: None))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert deepspeed_shm.operators() == "operators"
    assert locked == ([False, False] if rank == 0 else [True])


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("peer", "message"),
    [
        (Peer("bench.peers.no_such_program", "x", ("all_reduce",)), "No module named bench.peers.no_such_program"),
        pytest.param(Peer(f"{CALLS}.compiled", "no_such_loop", ("all_reduce",), one_node=True),
                     "KeyError: 'no_such_loop'", marks=pytest.mark.long),
        (Peer(f"{CALLS}.another_mpi", "mpi4py", ("all_reduce",), environment="nowhere", job=True, one_node=True),
         "is not installed here; make rivals installs it"),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_a_program_that_ends_is_an_error_of_all_ranks(monkeypatch, mpi_world, peer: Peer, message: str):
    monkeypatch.setitem(PEERS, "ends", peer)
    monkeypatch.setattr(peer_process, "LOOK_SECONDS", 0.05)
    with pytest.raises(CollectiveError, match=message):
        PeerTransport("ends", Communicator(mpi_world, device="cpu"), 64)


@pytest.mark.slow
@pytest.mark.mpi(min_size=2)
def test_a_program_that_does_not_connect_is_an_error_of_all_ranks(monkeypatch, mpi_world):
    monkeypatch.setitem(PEERS, "silent", Peer("this", "x", ("all_reduce",)))  # prints a poem and ends
    monkeypatch.setattr(peer_process, "LOOK_SECONDS", 0.05)
    with pytest.raises(CollectiveError, match="its process ended: The Zen of Python"):
        PeerTransport("silent", Communicator(mpi_world, device="cpu"), 64)
