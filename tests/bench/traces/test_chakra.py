"""Chakra traces: those of mlc-chakra are read as they are meant, ours are what its schema says, and damage is named."""

import gzip
import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.step_study.recording import Group
from bench.traces import formats
from commengine import UsageError
from tests.support.traces import chakra_files

pytest.importorskip("google.protobuf", reason="protobuf is not installed: pip install '.[chakra]'")
RECORDINGS = Path(__file__).resolve().parents[1] / "recordings"
WITHOUT = "mlc-chakra is not installed: pip install --no-deps mlc-chakra"


def read(trace, groups=None):
    return formats.parse(formats.read(Path(trace), groups))


@pytest.mark.parametrize(
    ("name", "call"),
    [
        # mlc-chakra's generator was asked for 65536 bytes; comm_size is a rank's input, our bytes the larger buffer.
        ("ALL_REDUCE", ("all_reduce", "sum", "float32", (16384,), 65536)),
        ("ALL_GATHER", ("all_gather", None, "float32", (32768,), 131072)),
        ("REDUCE_SCATTER", ("reduce_scatter", "sum", "float32", (16384,), 65536)),
        ("ALL_TO_ALL", ("all_to_all", None, "float32", (16384,), 65536)),
        ("BROADCAST", ("broadcast", None, "float32", (16384,), 65536)),
        ("BARRIER", ("barrier", None, "none", (), 0)),
    ],
)
def test_the_traces_of_mlc_chakras_generator(name, call):
    what = read(RECORDINGS / "chakra-generator" / name)
    assert what.groups == (Group("all ranks", (0, 1)),) and what.size == 2
    for calls in what.calls:
        assert [(one.operation, one.redop, one.dtype, one.shape, one.bytes) for one in calls] == [call]


def test_groups_overlap_and_messages_of_a_trace_made_with_mlc_chakra():
    data = formats.read(RECORDINGS / "chakra-groups")
    what = formats.parse(data)
    assert set(what.groups) == {Group("group 1", (0, 1)), Group("group 2", (2, 3)), Group("all ranks", (0, 1, 2, 3))}
    for rank, calls in enumerate(what.calls):
        own = (0, 1) if rank < 2 else (2, 3)
        everyone, message = (0, 1, 2, 3), ("send", rank + 2) if rank < 2 else ("recv", rank - 2)
        assert [(one.operation, one.bytes, what.groups[one.group].ranks, one.root) for one in calls] == [
            ("all_reduce", 4096, own, None), ("reduce_scatter", 8192, own, None),
            (message[0], 512, everyone, message[1]), ("all_gather", 8192, own, None), ("broadcast", 10, everyone, 0),
        ]  # fmt: skip
        assert [one.dtype for one in calls] == ["bfloat16", "float32", "float32", "float32", "uint8"]
        reduction, gather = calls[1], calls[3]
        assert reduction.stream == gather.stream == 1  # the message runs beside the reduction
        assert calls[2].enqueue < reduction.wait_start < gather.enqueue
        assert [round(1e6 * one.seconds) for one in calls] == [40, 60, 5, 30, 9]
    assert "not replayed: 4 MEM_LOAD_NODE" in data["notes"]
    assert what.scaled(2).groups == (Group("group 1", (0, 1)), Group("all ranks", (0, 1)))


def test_the_fixture_is_what_mlc_chakra_writes(tmp_path):
    pytest.importorskip("chakra", reason=WITHOUT)
    chakra_files.write(tmp_path)
    names = [f"work.{rank}.et" for rank in range(4)] + ["comm_groups.json"]
    for name in names:
        assert (tmp_path / name).read_bytes() == (RECORDINGS / "chakra-groups" / name).read_bytes()


def test_groups_may_lie_elsewhere(tmp_path):
    shutil.copytree(RECORDINGS / "chakra-groups", tmp_path / "t")
    groups = shutil.move(tmp_path / "t" / "comm_groups.json", tmp_path / "groups.json")
    with pytest.raises(UsageError, match=r"work.0.et: node 2: the ranks of group '1' are not known; .* --groups"):
        read(tmp_path / "t")
    assert read(tmp_path / "t" / "work", groups) == read(RECORDINGS / "chakra-groups")
    groups.write_text('{"1": [0, 0]}')
    with pytest.raises(UsageError, match=r"groups.json: want the ranks of each group by its number"):
        read(tmp_path / "t", groups)
    groups.write_text('{"1": [2, 3], "2": [0, 1]}')
    with pytest.raises(UsageError, match=r"rank 0, all_reduce: the rank is not in 'group 1', which has ranks \[2, 3\]"):
        read(tmp_path / "t", groups)


def test_a_single_file_is_not_a_trace():
    with pytest.raises(UsageError, match=r"work.1.et: is one file; give the folder .*chakra-groups with the files"):
        read(RECORDINGS / "chakra-groups" / "work.1.et")


def test_compressed_files_are_read(tmp_path):
    for path in (RECORDINGS / "chakra-groups").iterdir():
        raw = path.read_bytes()
        (tmp_path / path.name).write_bytes(gzip.compress(raw) if path.suffix == ".et" else raw)
    assert read(tmp_path) == read(RECORDINGS / "chakra-groups")


def cut(path, size):
    path.write_bytes(path.read_bytes()[:size])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: cut(f / "work.1.et", 300), r"work.1.et: no Chakra trace: the Node at byte \d+ cannot be read"),
        (lambda f: cut(f / "work.0.et", 0), "work.0.et: no Chakra trace: the file is empty"),
        (lambda f: (f / "work.2.et").write_bytes(b"\xff" * 64), "GlobalMetadata at byte 0 cannot be read: Too many"),
        (lambda f: (f / "work.2.et").write_bytes(b"\x07" + b"\xff" * 7), "GlobalMetadata at byte 0 cannot be read"),
        (lambda f: (f / "work.2.et").write_text("pickle"), "work.2.et: no Chakra trace"),
        (lambda f: (f / "work.2.et").unlink(), "there are traces of 3 ranks, and none of rank 2"),
        (lambda f: shutil.copy(f / "work.0.et", f / "other.0.et"), "holds the traces other, work; name one of them"),
        (lambda f: shutil.copy(f / "work.0.et", f / "work.1.et"), "the traces do not fit"),
    ],
)
def test_damaged_traces_are_named(damage, message, tmp_path):
    folder = shutil.copytree(RECORDINGS / "chakra-groups", tmp_path / "t")
    damage(folder)
    with pytest.raises(UsageError, match=message) as caught:
        read(folder)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 700


def node(number, kind, *after, **attributes):
    from bench.traces.chakra_schema import NODES, attribute, message_types

    made = message_types()["Node"](id=number, type=NODES.index(kind), data_deps=after)
    for name, value in attributes.items():
        kind = "string_val" if isinstance(value, str) else "bool_list" if isinstance(value, list) else "int64_val"
        made.attr.append(attribute(name, kind, value))
    return made


def write(folder, *ranks):
    from bench.traces.chakra_schema import message_types, write_messages

    for rank, nodes in enumerate(ranks):
        write_messages(folder / f"x.{rank}.et", message_types()["GlobalMetadata"](version="1"), nodes)
    return folder


COLL = "COMM_COLL_NODE"


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([node(1, COLL, 2, comm_type=0, comm_size=8)], "x.0.et: node 1 depends on node 2, which is not there"),
        ([node(1, COLL, comm_type=0, comm_size=8)] * 2, "x.0.et: there are two nodes 1"),
        ([node(1, COLL, comm_type=17, comm_size=8)], "node 1: comm_type 17 is unknown; there are 0 to 9"),
        ([node(1, COLL, comm_type=0, comm_size=-8)], "node 1: all_reduce of -2 elements"),
        ([node(1, COLL, comm_type=0, comm_size=8, involved_dim=[True, False])], "dimensions of a network"),
        ([node(1, "COMM_SEND_NODE", comm_size=8)], "node 1: comm_dst is missing"),
        ([node(1, "COMM_SEND_NODE", comm_size=8, comm_dst=9)], "node 1: comm_dst is 9, which is no rank"),
        ([node(1, "COMP_NODE")], "no rank communicates: nothing to replay"),
        ([node(1, COLL)], r"nothing to replay \(.*not replayed: 2 COMM_COLL_NODE without comm_size\)"),
    ],
    ids=range(9),
)  # fmt: skip
def test_traces_that_cannot_be_replayed_are_named(nodes, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        read(write(tmp_path, nodes, nodes))


def test_a_ring_that_sends_first_is_replayed_and_a_deadlock_is_refused(tmp_path):
    """In ASTRA-sim a send ends before its receive begins, so in a ring all may send first."""
    ring = [
        [
            node(1, "COMM_SEND_NODE", comm_size=8, comm_dst=(rank + 1) % 3),
            node(2, "COMM_RECV_NODE", 1, comm_size=8, comm_src=(rank - 1) % 3),
        ]
        for rank in range(3)
    ]
    what = read(write(tmp_path, *ring))
    assert [(one.operation, one.peers, one.bytes) for one in what.calls[1]] == [("sendrecv", (2, 0), 8)]
    wrong = [
        [
            node(1, "COMM_RECV_NODE", comm_size=8, comm_src=(rank - 1) % 3),
            node(2, "COMM_SEND_NODE", 1, comm_size=8, comm_dst=(rank + 1) % 3),
        ]
        for rank in range(3)
    ]
    with pytest.raises(UsageError, match="a replay would not end, because ranks wait for each other: rank 0 in recv"):
        read(write(tmp_path, *wrong))


def communicate(world, stream, windows):
    """All kinds of calls, on this rank."""
    import torch

    size, rank = world.size, world.rank
    one, all_of_them = torch.zeros(64), torch.zeros(64 * size)
    work = world.all_reduce(windows, stream=stream)
    world.all_gather(all_of_them, one)
    world.reduce_scatter(one.bfloat16(), all_of_them.bfloat16(), op="avg")
    work.wait()
    world.all_reduce(torch.zeros(3, dtype=torch.int64), op="max", stream=stream)
    world.broadcast(one, 1)
    world.reduce(one, 1, op="min")
    world.gather(all_of_them if rank == 0 else None, one, 0)
    world.scatter(one, all_of_them if rank == 1 else None, 1)
    world.all_to_all(torch.zeros_like(all_of_them), all_of_them)
    world.barrier()
    sent, received = torch.zeros(3 + rank), torch.zeros(3 + (rank - 1) % size)
    world.sendrecv(sent, (rank + 1) % size, received, (rank - 1) % size)
    if rank < 2:
        (world.send if rank == 0 else world.recv)(one, 1 - rank)
    stream.synchronize()


@pytest.mark.mpi(min_size=2)
def test_a_trace_written_here_replays_as_our_own_recording_does(mpi_world, folder):
    """Every operation, with windows and streams, in both formats: equal calls, and equal replays."""
    from bench.step_study import replaying
    from commengine import Communicator, trace

    with Communicator(mpi_world) as world:
        with world.split(world.rank // 2, name="pair") as pair:
            stream, windows = world.new_stream(), world.empty((1 << 14,)).zero_()
            with trace(world, pair) as log:
                communicate(world, stream, windows)
                pair.barrier()
            for name in formats.WRITTEN:
                if world.rank == 0:
                    (folder / name).mkdir()
                world.barrier()
                formats.save(world, name, folder / name, log)
            del windows
        world.barrier()
        ours, chakra = (read(folder / name) for name in ("commengine", "chakra"))
        assert set(ours.groups) == set(chakra.groups)

        def named(what):
            """All calls, with their groups in place of the groups' numbers."""
            return [[vars(one) | {"group": what.groups[one.group]} for one in calls] for calls in what.calls]

        assert named(ours) == named(chakra)

        rows = [replaying.measure(world, what, warmup=0, rounds=1) for what in (ours, chakra)]
        kept = ("operation", "redop", "root", "group", "ranks", "dtype", "shape", "bytes", "replayed_bytes", "window")
        one, other = ([{name: row[name] for name in kept} for row in many] for many in rows)
        assert one == other and len(one) == len(ours.calls[world.rank]) >= 12


@pytest.mark.mpi(min_size=2)
def test_traces_of_other_programs_are_replayed(mpi_world):
    """On two ranks: all that mlc-chakra's generator makes, and the first two ranks of four, with streams."""
    from mpi4py import MPI

    from bench.step_study import replaying
    from commengine import Communicator

    two = mpi_world.Split(0 if mpi_world.rank < 2 else MPI.UNDEFINED)
    if two == MPI.COMM_NULL:
        return
    names = {path.name.partition(".")[0] for path in (RECORDINGS / "chakra-generator").iterdir()}
    with Communicator(two) as world:
        what = [read(RECORDINGS / "chakra-generator" / name) for name in sorted(names)]
        what.append(read(RECORDINGS / "chakra-groups").scaled(2))
        for one in what:
            rows = replaying.measure(world, one, warmup=0, rounds=1)
            assert [row["operation"] for row in rows] == [call.operation for call in one.calls[world.rank]]
            assert all(row["replayed_bytes"] == row["bytes"] and row["isolated_s"] > 0 for row in rows)
        assert [row["stream"] for row in rows] == [1, 1, 1, 0]
    two.Free()


def fields(raw):
    """The fields of a protobuf message, by the encoding's own rules: [(number, value)], bytes for what has a length."""
    found, at = [], 0
    while at < len(raw):
        key, at = varint(raw, at)
        if key & 7 == 0:
            value, at = varint(raw, at)
        elif key & 7 == 1:
            value, at = struct.unpack_from("<d", raw, at)[0], at + 8
        else:
            size, at = varint(raw, at)
            value, at = raw[at : at + size], at + size
        found.append((key >> 3, value))
    return found


def varint(raw, at):
    value = shift = 0
    while True:
        value |= (raw[at] & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if raw[at - 1] < 0x80:
            return value, at


def write_step(folder):
    """Write a step of rank 0 of 8: a reduction, a gather beside compute, and a reduction that needs both."""
    from bench.traces import chakra_writer, foreign
    from commengine import CollectiveEvent

    def event(operation, enqueue, end, stream=None, wait=None):
        return CollectiveEvent(
            operation, "sum", None, "float32", (512,), 512, 2048, "tensor", 2, stream, enqueue, enqueue, end,
            wait, end if wait else None, (), ((2048, False),),
        )  # fmt: skip

    events = [
        event("all_reduce", 10.0001, 10.0002), event("all_gather", 10.0003, 10.0007, "tensor/stream1", 10.0006),
        event("reduce_scatter", 10.0007, 10.0009),
    ]  # fmt: skip
    groups = {"tensor": [0, 3]}
    numbers = foreign.numbered([*groups.items(), ("data", [0])])
    trace = SimpleNamespace(events=events)
    one = foreign.Written(folder / "step.0.et", 0, 8, trace, groups, numbers, (10.0, 10.001))
    chakra_writer.write_rank(one)
    return one.path


def test_the_files_are_what_the_schema_and_astra_sim_say(tmp_path):
    """Decoded by hand with the field numbers of et_def.proto: the chain of dependencies, times, and attributes."""
    path = write_step(tmp_path)
    assert json.loads((tmp_path / "comm_groups.json").read_text()) == {"2": [0, 3]}

    raw, at, messages = path.read_bytes(), 0, []
    while at < len(raw):
        size, at = varint(raw, at)
        messages.append(fields(raw[at : at + size]))
        at += size
    metadata, *nodes = messages
    assert (1, b"1.0.0") in metadata
    short = []
    for one in nodes:
        attributes = [dict(fields(value)) for number, value in one if number == 10]
        named = {about[1].decode(): about for about in attributes}
        assert named["is_cpu_op"][27] == 0
        about = tuple(
            named[name][field] for name, field in [("comm_type", 9), ("comm_size", 9), ("pg_name", 29)] if name in named
        )
        after = [depends for number, value in one if number == 5 for depends in _packed(value)]
        values = dict(one)
        short.append((values[1], values[3], after, values.get(6, 0), values.get(7, 0), about))
    comp, coll = 4, 7
    assert short == [
        (1, comp, [], 0, 100, ()), (2, coll, [1], 100, 100, (0, 2048, b"2")), (3, comp, [2], 200, 100, ()),
        (4, coll, [3], 300, 400, (2, 1024, b"2")),  # all_gather: comm_size is a rank's input
        (5, comp, [3], 300, 300, ()),  # beside the gather
        (6, coll, [4, 5], 700, 200, (7, 2048, b"2")), (7, comp, [6], 900, 100, ()),
    ]  # fmt: skip


def _packed(value):
    at, found = 0, []
    while at < len(value):
        one, at = varint(value, at)
        found.append(one)
    return found


@pytest.mark.slow
def test_mlc_chakras_jsonizer_reads_our_files(tmp_path):
    pytest.importorskip("chakra", reason=WITHOUT)
    done = subprocess.run(
        [sys.executable, "-m", "chakra.src.jsonizer.jsonizer", "--input_filename", str(write_step(tmp_path)),
         "--output_filename", str(tmp_path / "x.json")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    text, at, found = (tmp_path / "x.json").read_text(), 0, []
    while at < len(text):
        value, at = json.JSONDecoder().raw_decode(text, at)
        found.append(value)
    metadata, *nodes = found
    assert metadata["version"] == "1.0.0" and [one["id"] for one in nodes] == list("1234567")
    gather, scatter = nodes[3], nodes[5]
    assert (gather["type"], gather["dataDeps"], gather["durationMicros"]) == (COLL, ["3"], "400")
    assert (scatter["dataDeps"], scatter["startTimeMicros"]) == (["4", "5"], "700")
    about = {one["name"]: one for one in gather["attr"]}
    assert about["comm_type"]["int64Val"] == "2" and about["comm_size"]["int64Val"] == "1024"
    assert about["pg_name"]["stringVal"] == "2" and about["is_cpu_op"]["boolVal"] is False
