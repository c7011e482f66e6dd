"""PyTorch's profiles: NCCL's notes as PyTorch documents them, and profiles that PyTorch writes here, with gloo."""

import gzip
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from bench.step_study.recording import Group
from bench.traces import formats
from commengine import UsageError

ROOT = Path(__file__).resolve().parents[3]
WORLD = 4
GROUPS = {"0": ("default_pg", [0, 1, 2, 3]), "1": ("mesh_tp", [0, 1]), "2": ("mesh_tp", [2, 3])}


class Profile:
    """The profile of one rank, with the events that PyTorch writes for NCCL: the host's, the kernels', and others."""

    def __init__(self, rank):
        self.rank, self.events, self.at = rank, [], 1_000_000.0 + 17 * rank
        self.events.append({"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}})
        self.events.append({"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": self.at, "dur": 3.0, "args": {}})

    def call(self, name, group, sent, received, *, kernel="", begin=None, took=50.0, **more):
        """Note a call of the host, and its kernel ``begin`` microseconds after it; None: no kernel is in the file."""
        title, ranks = GROUPS[group]
        args = {
            "External id": len(self.events), "Collective name": name, "In msg nelems": sent, "Out msg nelems": received,
            "Group size": len(ranks), "dtype": "BFloat16", "In split size": "[]", "Out split size": "[]",
            "Process Group Name": group, "Process Group Description": title, "Process Group Ranks": str(ranks),
            "Rank": 0,
        } | {key.replace("_", " "): value for key, value in more.items()}  # fmt: skip
        self.at += 100.0
        host = {"ph": "X", "cat": "cpu_op", "name": "record_param_comms", "ts": self.at, "dur": 5.0, "args": args}
        self.events += [host, {"ph": "X", "cat": "user_annotation", "name": f"nccl:{name}", "ts": self.at, "args": {}}]
        if begin is not None:
            span = {
                "name": f"ncclDevKernel_{kernel}(ncclDevKernelArgsStorage<4096ul>)",
                "ts": self.at + begin,
                "dur": took,
            }
            self.events.append({"ph": "X", "cat": "kernel", "tid": 28, "args": {**args, "stream": 28}} | span)

    def write(self, path, **about):
        """Write the file, compressed if its name says so."""
        config = [
            {"pg_name": name, "pg_desc": title, "pg_size": len(r), "ranks": r} for name, (title, r) in GROUPS.items()
        ]
        info = {"backend": "nccl", "rank": self.rank, "world_size": WORLD, "pg_count": 3, "pg_config": config} | about
        text = json.dumps({"schemaVersion": 1, "distributedInfo": info, "traceEvents": self.events})
        path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


def profile(rank):
    """Four ranks in two tensor groups: a step with an overlapped reduction."""
    made, group = Profile(rank), "1" if rank < 2 else "2"
    made.call("_allgather_base", group, 512, 1024, kernel="AllGather_RING_LL", begin=20.0)
    made.call("allreduce", "0", 4096, 4096, kernel="AllReduce_Sum_bf16_RING_LL", begin=20.0, took=400.0, dtype="Float")
    made.call("_reduce_scatter_base", group, 1024, 512, kernel="ReduceScatter_Sum_bf16_RING_LL", begin=20.0)
    made.call("wait", "0", 0, 0)
    made.call("broadcast", "0", 8, 8, kernel="Broadcast_RING_LL", begin=400.0, dtype="Long", Rank=2)
    made.call("all_to_allv", "0", 400, 400, kernel="SendRecv", begin=400.0, dtype="Byte")
    made.call("all_to_allv", "0", 400, 400, begin=400.0, In_split_size="[100, 100, 150, 50]")
    made.call("allreduce", group, 1, 1, kernel="AllReduce_Max_f32", begin=400.0, dtype="Float")
    if rank < 2:
        made.call("send", "0", 64, 64, Dst_Rank=rank + 2)
    else:
        made.call("recv", "0", 64, 64, Src_Rank=rank - 2)
    return made


@pytest.fixture
def profiles(tmp_path):
    for rank in range(WORLD):
        profile(rank).write(tmp_path / f"host_{9 - rank}.pt.trace.json{'.gz' * (rank % 2)}")
    return tmp_path


def read(trace):
    return formats.parse(formats.read(trace))


def test_the_collectives_of_nccl(profiles):
    data = formats.read(profiles)
    what = formats.parse(data)
    for rank, calls in enumerate(what.calls):
        pair = Group("1 (mesh_tp)", (0, 1)) if rank < 2 else Group("2 (mesh_tp)", (2, 3))
        all_ranks = Group("0 (default_pg)", (0, 1, 2, 3))
        message = ("send", rank + 2) if rank < 2 else ("recv", rank - 2)
        found = [(one.operation, one.redop, one.root, one.dtype, one.bytes, what.groups[one.group]) for one in calls]
        assert found == [
            ("all_gather", None, None, "bfloat16", 2048, pair),
            ("all_reduce", "sum", None, "float32", 16384, all_ranks),
            ("reduce_scatter", "sum", None, "bfloat16", 2048, pair), ("broadcast", None, 2, "int64", 64, all_ranks),
            ("all_to_all", None, None, "uint8", 400, all_ranks), ("all_reduce", "max", None, "float32", 4, pair),
            (message[0], None, message[1], "bfloat16", 128, all_ranks),
        ]  # fmt: skip
        # The reduction of 400 us is not over when the scatter's kernel begins, so both groups have streams.
        assert all(one.stream == 1 for one in calls)
        reduction, scatter = calls[1:3]
        assert scatter.enqueue < reduction.wait_start < calls[3].wait_start
        assert [round(1e6 * one.seconds) for one in calls] == [50, 400, 50, 50, 50, 50, 5]
    assert "not replayed: 4 all_to_allv with unequal parts, 4 wait" in data["notes"]
    assert what.scaled(2).groups == (Group("1 (mesh_tp)", (0, 1)), Group("0 (default_pg)", (0, 1)))


@pytest.mark.mpi(min_size=2)
def test_the_collectives_of_nccl_are_replayed(mpi_world, tmp_path):
    """The parts of the first two of four ranks, on two ranks."""
    from mpi4py import MPI

    from bench.step_study import replaying
    from commengine import Communicator

    folder = mpi_world.bcast(tmp_path)
    if mpi_world.rank == 0:
        for rank in range(WORLD):
            profile(rank).write(folder / f"rank{rank}.json")
    two = mpi_world.Split(0 if mpi_world.rank < 2 else MPI.UNDEFINED)
    if two == MPI.COMM_NULL:
        return
    with Communicator(two) as world:
        world.barrier()
        what = read(folder).scaled(2)
        rows = replaying.measure(world, what, warmup=0, rounds=1)
        operations = ["all_gather", "all_reduce", "reduce_scatter", "broadcast", "all_to_all", "all_reduce"]
        assert [row["operation"] for row in rows] == operations  # the messages' other ranks are gone
        assert all(row["replayed_bytes"] == row["bytes"] and row["stream"] == 1 for row in rows)
    two.Free()


def test_a_call_without_notes_is_counted_and_a_block_of_calls_with_notes_is_none(tmp_path):
    """``nccl:coalesced``, and gloo's calls beside NCCL's. The calls of a block have no events of their own."""
    for rank in range(WORLD):
        made = Profile(rank)
        made.call("allreduce", "0", 8, 8, kernel="AllReduce_Sum", begin=10.0)

        def alone(name, made=made):
            made.at += 100.0
            made.events.append(
                {"ph": "X", "cat": "user_annotation", "name": name, "ts": made.at, "dur": 2.0, "args": {}}
            )

        alone("nccl:coalesced")
        for _ in range(2):  # a block: only its end is an event
            made.call("_allgather_base", "0", 2, 8, kernel="AllGather_RING_LL", begin=10.0)
            made.events = [one for one in made.events if one.get("name") != "nccl:_allgather_base"]
        alone("nccl:coalesced")
        made.call("wait", "0", 0, 0)
        made.events = [one for one in made.events if one.get("name") != "nccl:wait"]
        alone("gloo:all_reduce")
        made.call("broadcast", "0", 8, 8, kernel="Broadcast_RING_LL", begin=10.0)
        made.write(tmp_path / f"{rank}.json")
    data = formats.read(tmp_path)
    operations = [one.operation for one in formats.parse(data).calls[0]]
    assert operations == ["all_reduce", "all_gather", "all_gather", "broadcast"]
    said = "not replayed: 4 gloo:all_reduce without notes, 4 nccl:coalesced without notes, 4 wait"
    assert said in data["notes"]


def test_a_scatter_of_gloo_has_its_shape_on_the_root_alone(tmp_path):
    event = {"ph": "X", "cat": "user_annotation", "ts": 5, "dur": 2.5}
    shaped = {"Input Dims": [[3], [3]], "Input type": ["float", "float"]}

    def read_with(*of_ranks):
        for rank, scatters in enumerate(of_ranks):
            calls = [event | {"name": "gloo:scatter", "ts": 9 + n, "args": args} for n, args in enumerate(scatters)]
            config = [{"pg_name": "0", "ranks": [0, 1]}]
            info = {"rank": rank, "world_size": 2, "pg_config": config}
            text = json.dumps({"schemaVersion": 1, "distributedInfo": info, "traceEvents": calls})
            (tmp_path / f"{rank}.json").write_text(text)
        return read(tmp_path)

    for calls in read_with([shaped, {}], [{}, shaped]).calls:
        found = [(one.operation, one.root, one.dtype, one.bytes) for one in calls]
        assert found == [("scatter", 0, "float32", 24), ("scatter", 1, "float32", 24)]
    with pytest.raises(UsageError, match="profile with record_shapes=True"):
        read_with([shaped, {}], [{}, {}])


def test_calls_that_do_not_overlap_need_no_stream(tmp_path):
    for rank in range(WORLD):
        made = Profile(rank)
        for _ in range(2):
            made.call("allreduce", "0", 8, 8, kernel="AllReduce_Sum", begin=10.0)
        made.write(tmp_path / f"{rank}.json")
    assert [one.stream for one in read(tmp_path).calls[3]] == [0, 0]


def test_a_shortened_list_of_ranks_is_in_the_configuration(tmp_path):
    for rank in range(WORLD):
        made = Profile(rank)
        made.call("allreduce", "1" if rank < 2 else "2", 8, 8, Process_Group_Ranks="[0, ..., 3]")
        made.write(tmp_path / f"{rank}.json")
    assert {group.ranks for group in read(tmp_path).groups} == {(0, 1), (2, 3)}


def note(folder, **args):
    """Change the first note of rank 0; None removes it."""
    path = folder / "host_9.pt.trace.json"
    data = json.loads(path.read_text())
    changed = next(one for one in data["traceEvents"] if one["name"] == "record_param_comms")["args"]
    changed.update(args)
    for name in [name for name, value in args.items() if value is None]:
        del changed[name]
    path.write_text(json.dumps(data))


def lasts(folder, microseconds):
    """Let all events of rank 0 take so long."""
    path = folder / "host_9.pt.trace.json"
    data = json.loads(path.read_text())
    data["traceEvents"] = [one | {"dur": microseconds} for one in data["traceEvents"]]
    path.write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "host_8.pt.trace.json.gz").unlink(), "there are traces of 3 ranks, and none of rank 1"),
        (lambda f: profile(3).write(f / "again.json"), "is of rank 3, as again.json is"),
        (lambda f: (f / "host_9.pt.trace.json").write_text('{"schemaVersion": 1, '), "host_9.pt.trace.json: not JSON"),
        (lambda f: (f / "host_9.pt.trace.json").write_text("[]"), "host_9.pt.trace.json: not an object of JSON"),
        (lambda f: (f / "host_9.pt.trace.json").write_text('{"traceEvents": 3}'), "it has no list traceEvents"),
        (lambda f: profile(0).write(f / "host_9.pt.trace.json", rank=None), "its name has none, such as rank0"),
        (lambda f: profile(0).write(f / "host_9.pt.trace.json", rank="x"), "distributedInfo is damaged: rank x of 4"),
        (lambda f: (f / "host_8.pt.trace.json.gz").write_bytes(b"\x1f\x8bxx"), "trace.json.gz: cannot be read"),
        (lambda f: note(f, **{"Collective name": None, "In msg nelems": 3}), "ranks 0 and 1 of group .* disagree"),
        (lambda f: note(f, **{"In msg nelems": "many"}), "the record_param_comms at 1000100.0 us: invalid literal"),
        (lambda f: note(f, **{"In msg nelems": -4}), "all_gather of -8 elements"),
        (lambda f: note(f, **{"Process Group Ranks": "[1, 2]"}), "rank 0, all_gather: the rank is not in '1 "),
        (lambda f: note(f, **{"Process Group Ranks": "[0, 77]"}), "its group has the ranks .0, 77."),
        (lambda f: note(f, **{"Process Group Ranks": "", "Process Group Name": "x"}), "ranks of its group 'x' of 2"),
        (lambda f: lasts(f, -5.0), "rank 0, event 0: .*: its end .* is before its enqueue"),
        (lambda f: lasts(f, float("nan")), "rank 0, event 0: "),
    ],
    ids=range(16),
)  # fmt: skip
def test_damaged_profiles_are_named(damage, message, profiles):
    damage(profiles)
    with pytest.raises(UsageError, match=message) as caught:
        read(profiles)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_annotations_without_a_group_need_a_single_one(tmp_path):
    event = {"ph": "X", "cat": "user_annotation", "name": "nccl:all_reduce", "ts": 5, "dur": 2.0}
    shaped = event | {"args": {"Input Dims": [[[3], [2, 2]]], "Input type": ["c10::Half"]}}
    for args, groups, message in [
        (shaped, 1, None), (shaped, 2, "do not say of which of 2 process groups"),
        (event | {"args": {}}, 1, "profile with record_shapes=True"),
    ]:  # fmt: skip
        config = [{"pg_name": str(n), "ranks": [0, 1]} for n in range(groups)]
        for rank in range(2):
            info = {"rank": rank, "world_size": 2, "pg_config": config}
            text = json.dumps({"schemaVersion": 1, "distributedInfo": info, "traceEvents": [args]})
            (tmp_path / f"{rank}.json").write_text(text)
        if message is None:
            ((call,), _) = read(tmp_path).calls
            assert (call.operation, call.dtype, call.bytes) == ("all_reduce", "float16", 14)
        else:
            with pytest.raises(UsageError, match=message):
                read(tmp_path)


@pytest.mark.slow
@pytest.mark.long
def test_a_profile_that_pytorch_wrote(tmp_path):
    """Two processes of torch.distributed with gloo, profiled by PyTorch itself."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    about = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "bench.peers.profiled", str(tmp_path)], stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True, env={**os.environ, **about, "PYTHONPATH": path, "RANK": str(rank)},
        )
        for rank in range(2)
    ]  # fmt: skip
    for one in ranks:
        _, errors = one.communicate(timeout=60)
        assert one.returncode == 0, errors
    for calls in read(tmp_path).calls:
        found = [(one.operation, one.dtype, one.bytes) for one in calls]
        assert found == [
            ("all_reduce", "float32", 4000), ("all_gather", "float32", 8000), ("broadcast", "bfloat16", 2000),
            ("all_to_all", "float32", 8000), ("reduce", "float64", 8000), ("scatter", "float32", 8000),
            ("gather", "float32", 8000), ("barrier", "none", 0),
        ]  # fmt: skip
        assert all(one.seconds > 0 for one in calls)
        assert [one.root for one in calls if one.operation == "scatter"] == [1]
