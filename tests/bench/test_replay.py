"""bench.replay: the recorded bytes and nothing else, on the recorded groups; and recordings that do not fit."""

import json
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench.step_study import recording
from bench.step_study.recording import Group
from commengine import UsageError
from tests.support import mpirun

TINY = [
    "--mock-data", "--vocab-size", "100", "--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4",
    "--seq-length", "16", "--make-vocab-size-divisible-by", "128", "--micro-batch-size", "2",
    "--tensor-model-parallel-size", "2", "--ddp-bucket-size", "5000",
]  # fmt: skip


def counted(monkeypatch, moved):
    """Add up in ``moved`` what every collective is given, by group: not what a trace says of it."""
    from commengine import Communicator

    for name in ("all_reduce", "reduce_scatter", "all_gather", "broadcast"):
        original = getattr(Communicator, name)

        def method(self, *tensors, original=original, **options):
            moved[self.name] += max(tensor.nbytes for tensor in tensors if hasattr(tensor, "nbytes"))
            return original(self, *tensors, **options)

        monkeypatch.setattr(Communicator, name, method)


def record(world, folder, *options):
    """Record one step, without a warm-up."""
    from bench import step

    step.main(world, ["--save", str(folder), "--steps", "1", "--warmup", "0", *TINY, *options])


@pytest.mark.mpi(min_size=2)
@pytest.mark.every_size
@pytest.mark.parametrize(
    "options",
    [
        ["--overlap-grad-reduce", "--async-tensor-model-parallel-allreduce"],
        ["--sequence-parallel", "--bf16", "--use-distributed-optimizer", "--micro-batch-size", "1"],
    ],
)
def test_replay_moves_exactly_the_recorded_bytes(options, mpi_world, folder, monkeypatch):
    from bench.step_study import replaying
    from commengine import Communicator

    with Communicator(mpi_world) as world:
        stepped, replayed = Counter(), Counter()
        with monkeypatch.context() as patch:
            counted(patch, stepped)
            record(world, folder, *options)
        what = recording.parse(recording.read(folder))
        assert what.size == world.size
        tensor = [Group("tensor", (first, first + 1)) for first in range(0, world.size, 2)]
        data = [Group("data", tuple(range(first, world.size, 2))) for first in (0, 1)]
        assert set(what.groups) == {*tensor, *data}

        with monkeypatch.context() as patch:
            counted(patch, replayed)
            rows = replaying.measure(world, what, warmup=0, rounds=1)
        recorded = Counter()
        for row in rows:
            assert row["replayed_bytes"] == row["bytes"] and row["isolated_s"] > 0 and row["in_step_s"] > 0
            recorded[row["group"]] += row["bytes"]
        assert recorded["tensor"] > 0 and recorded["data"] > 0
        # The step's collectives of the two groups all lie inside the trace, and the replay's are no others.
        assert all(replayed[name] == stepped[name] == recorded[name] for name in ("tensor", "data"))
        operations = {(row["group"], row["operation"]) for row in rows}
        if "--sequence-parallel" in options:
            assert {("tensor", "reduce_scatter"), ("tensor", "all_gather")} <= operations
            assert (("data", "reduce_scatter") in operations) == (world.size > 2)
        else:
            assert any(row["stream"] for row in rows)  # overlapped
        scaled = what.scaled(1) if world.size == 2 else what.scaled(2)
        assert set(scaled.groups) == ({tensor[0]} if world.size == 4 else set())


def event(operation, rank, **other):
    return {
        "operation": operation, "redop": None, "root": None, "dtype": "float32", "shape": [6, 2], "bytes": 48,
        "group": "all", "size": 3, "stream": None, "enqueue": 1.0 + rank, "start": 1.0 + rank, "end": 2.0 + rank,
        "wait_start": None, "wait_end": None, "peers": [], "buffers": [[48, False]],
    } | other  # fmt: skip


def write(folder, events, ranks=3):
    """A recording of ``ranks`` ranks, all with the group "all" and these events (a function of the rank)."""
    for rank in range(ranks):
        head = {"format": 2, "rank": rank, "groups": {"all": list(range(ranks))}}
        lines = [head, *events(rank)]
        (folder / f"rank-{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_scaled_keeps_what_the_first_ranks_did(tmp_path):
    def events(rank):
        yield event("all_reduce", rank, redop="sum")
        yield event("all_gather", rank, shape=[3, 4])
        yield event("broadcast", rank, root=2)
        yield event("gather", rank, root=1, bytes=144)
        if rank == 0:
            yield event("send", rank, root=1)
            yield event("send", rank, root=2)
        else:
            yield event("recv", rank, root=0)
        ring = [(rank + 1) % 3, (rank - 1) % 3]
        yield event("sendrecv", rank, root=ring[0], peers=ring, buffers=[[48, False], [48, False]])

    what = recording.parse(recording.read(write(tmp_path, events)))
    two = what.scaled(2)
    assert two.groups == (Group("all", (0, 1)),) and two.size == 2
    assert [(call.operation, call.shape, call.bytes, call.root) for call in two.calls[0]] == [
        ("all_reduce", (6, 2), 48, None),
        ("all_gather", (4, 4), 64, None),  # 3 rows become 4, for 2 must divide them
        ("broadcast", (6, 2), 48, 0),  # rank 2 is gone
        ("gather", (6, 2), 96, 1),
        ("send", (6, 2), 48, 1),
        ("send", (6, 2), 48, 1),  # of the sendrecv: rank 2, which it received from, is gone
    ]
    assert [(call.operation, call.root, call.bytes) for call in two.calls[1]][-2:] == [("recv", 0, 48)] * 2
    assert what.scaled(1).calls == ((),)
    assert what.scaled(3) == what


@pytest.mark.parametrize("other", [{"bytes": 47}, {"stream": "all/stream1"}, {"root": 1}])
def test_a_replay_that_differs_from_its_recording_is_an_error(other, tmp_path):
    from bench.step_study import replaying

    done = event("all_reduce", 0, redop="sum", shape=(6, 2))
    calls = recording.parse(recording.read(write(tmp_path, lambda rank: [done]))).calls[0]
    replaying.check(calls, [SimpleNamespace(**done)])
    with pytest.raises(UsageError, match=r"the replay is not what was recorded: .* became "):
        replaying.check(calls, [SimpleNamespace(**done | other)])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: shutil.rmtree(f), "not a recording: there is no rank-0.jsonl"),
        (lambda f: (f / "rank-1.jsonl").unlink(), "there are traces of 2 ranks, and none of rank 1"),
        (lambda f: (f / "rank-1.jsonl").write_text(""), "rank-1.jsonl: not a trace of one rank: the file is empty"),
        (lambda f: write(f, lambda r: [event("all_reduce", r, start=5.0, end=1.0)]), "its end 1.0 is before its start"),
        (lambda f: write(f, lambda r: [event("all_reduce", r, enqueue=9.0)]), "is before its enqueue 9.0"),
        (lambda f: (f / "rank-1.jsonl").write_text('{"format": 3}\n'), "format 3; this version reads 1 and 2"),
        (lambda f: (f / "rank-2.jsonl").unlink(), "group 'all' has rank 2, and there are traces of 2 ranks only"),
        (lambda f: write(f, lambda r: [event("all_reduce", r)] * (2 - (r == 1))), "ranks 0 and 1 .* 2 and 1 calls"),
        (lambda f: write(f, lambda r: [event("broadcast", r, root=r % 2)]), "ranks 0 and 1 of group 'all' disagree"),
        (lambda f: write(f, lambda r: [event("send", r, root=1)] * (r == 0)), "ranks 0 and 1 .* 1 and 0 calls"),
        (
            lambda f: write(f, lambda r: [event("sendrecv", r)]),
            "event 0: a sendrecv has two peers and two buffers; record a trace of format 1 again",
        ),
        (lambda f: write(f, lambda r: [event("sendrecv", r, peers=[0, 0])]), "event 0: a sendrecv has two peers"),
        (lambda f: write(f, lambda r: [event("all_reduce", r, buffers=[[48, r == 1]])]), "ranks 0 and 1 .* disagree"),
        (lambda f: write(f, lambda r: [event("exchange", r)]), "event 0: exchange cannot be replayed"),
        (lambda f: write(f, lambda r: [event("all_reduce", r, group="b")]), "group 'b' is not among all"),
        (lambda f: write(f, lambda r: [event("all_reduce", r, dtype="f4")]), "dtype 'f4' is none of torch's"),
        (lambda f: write(f, lambda r: [event("all_reduce", r, shape=[1.5])]), r"rank 0, event 0: shape\[0\]=1.5: "),
        (lambda f: write(f, lambda r: [event("all_reduce", r, stream="x")]), "rank 0, event 0: invalid literal"),
        (lambda f: write(f, lambda r: [{"operation": "all_reduce"}]), "rank 0, event 0: group None is not"),
    ],
)
def test_recordings_that_do_not_fit_are_named(damage, message, tmp_path):
    write(tmp_path, lambda rank: [event("all_reduce", rank, redop="sum")])
    damage(tmp_path)
    with pytest.raises(UsageError, match=message):
        recording.parse(recording.read(tmp_path))


@pytest.mark.mpi(min_size=2)
def test_windows_and_exchanges_are_replayed_as_they_were(mpi_world, folder):
    """What lay in a window, with the caller and on a stream, lies in one again; sendrecv has its partners."""
    from bench.step_study import replaying
    from commengine import Communicator, trace

    with Communicator(mpi_world) as world:
        size, rank = world.size, world.rank
        stream = world.new_stream()
        windows = [world.empty((1 << 14,)).zero_() for _ in range(2)]
        whole, part = torch.zeros(size << 14), torch.zeros(1 << 14)
        with trace(world) as log:
            world.all_reduce(windows[0])
            world.all_reduce(windows[0][:16])  # too small to be worth it
            world.all_reduce(part)
            world.all_reduce(windows[1], stream=stream).wait()
            world.all_gather(whole, windows[1])
            world.reduce_scatter(part[: (1 << 14) // size], windows[0])
            world.broadcast(windows[1], 1)
            sent, received = torch.zeros(3 + rank), torch.zeros(3 + (rank - 1) % size)
            world.sendrecv(sent, (rank + 1) % size, received, (rank - 1) % size)
        log.save(folder / f"rank-{rank}.jsonl")
        del windows
        world.barrier()
        what = recording.parse(recording.read(folder))
        rows = replaying.measure(world, what, warmup=0, rounds=1)
        flags = [True, False, False, True, True, True, True, False]
        assert [row["window"] for row in rows] == [row["replayed_in_window"] for row in rows] == flags
        assert [row["replayed_bytes"] for row in rows] == [event.bytes for event in log.events]
        assert rows[-1]["operation"] == "sendrecv"
        assert [call.peers for call in what.calls[rank]][-1] == ((rank + 1) % size, (rank - 1) % size)

        if rank == 0:  # the same, as a version before this one wrote it: without sendrecv, for it says not with whom
            for path in folder.glob("rank-*.jsonl"):
                head, *events = map(json.loads, path.read_text().splitlines())
                old = [{k: v for k, v in one.items() if k not in ("peers", "buffers")} for one in events[:-1]]
                path.write_text("".join(json.dumps(line) + "\n" for line in [head | {"format": 1}, *old]))
        world.barrier()
        rows = replaying.measure(world, recording.parse(recording.read(folder)), warmup=0, rounds=1)
        assert not any(row["window"] or row["replayed_in_window"] for row in rows) and len(rows) == 7


@pytest.mark.mpi(min_size=2)
def test_report_of_a_replay(mpi_world, folder, monkeypatch):
    from bench import replay
    from commengine import Communicator

    with Communicator(mpi_world) as world:
        if world.rank == 0:
            write(folder, lambda rank: [event("all_reduce", rank, redop="sum")] * 3, ranks=world.size)
        world.barrier()
        table, numbers = folder / "replay.md", folder / "replay.json"
        options = ["--rounds", "2", "--warmup", "1", "--output", str(table), "--json", str(numbers)]
        monkeypatch.setattr("sys.argv", ["replay", str(folder), *options])
        replay.main(world)
        text, ranks = table.read_text(), json.loads(numbers.read_text())["ranks"]
        assert "- command: `python -m bench.replay" in text and f"recorded on {world.size} ranks" in text
        # In the step each took a second; alone, far less.
        assert f"| all ({world.size}) | all_reduce | float32 | 48 | no | private | 3 | 3000.000 |" in text
        members = ", ".join(map(str, range(world.size)))
        assert f"| all | {members} | {world.size * 144} | {world.size * 144} |" in text
        assert len(ranks) == world.size and all(len(call["replays_s"]) == 2 for calls in ranks for call in calls)


@pytest.mark.mpi(min_size=2)
def test_a_step_recorded_as_a_chakra_trace_is_replayed(mpi_world, folder, monkeypatch):
    """The command writes it, finds out what it is, and reports what our own recording's replay reports."""
    pytest.importorskip("google.protobuf", reason="protobuf is not installed: pip install '.[chakra]'")
    from bench import replay
    from commengine import Communicator

    with Communicator(mpi_world) as world:
        found = {}
        for name in ("commengine", "chakra"):
            numbers = folder / f"{name}.json"
            record(world, folder / name, "--save-format", name, "--overlap-grad-reduce")
            replay.main(world, [str(folder / name), "--rounds", "1", "--warmup", "0", "--json", str(numbers)])
            world.barrier()
            read = json.loads(numbers.read_text())
            assert read["trace_format"] == name
            kept = ("operation", "group", "ranks", "dtype", "redop", "shape", "bytes", "replayed_bytes", "stream")
            found[name] = [[[call[field] for field in kept] for call in calls] for calls in read["ranks"]]
            assert all(call["in_step_s"] > 0 for calls in read["ranks"] for call in calls)
        assert found["chakra"] == found["commengine"]
        files = {file.name for file in (folder / "chakra").iterdir()}
        assert files == {"comm_groups.json", *(f"step.{rank}.et" for rank in range(world.size))}
        with pytest.raises(UsageError, match=r"holds a recording of .* ranks; give another folder, or --overwrite"):
            record(world, folder / "chakra")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, pytest.param(4, marks=pytest.mark.long)])
def test_another_number_of_ranks_is_an_error_of_the_command(tmp_path, ranks):
    """With more of them cores would be shared that the step had to itself."""
    write(tmp_path, lambda rank: [event("all_reduce", rank, redop="sum")])
    done = mpirun.run(ranks, "-m", "bench.replay", str(tmp_path), *["--scale"] * (ranks > 3))
    assert done.returncode == 2, done
    assert f"recorded on 3 ranks, and here are {ranks}: start 3, or fewer with --scale" in done.stderr


@pytest.mark.mpi(min_size=2)
def test_bad_options_are_the_same_error_on_every_rank(mpi_world, folder, monkeypatch):
    from bench import replay
    from commengine import Communicator

    with Communicator(mpi_world) as world:
        for argv, message in [
            ([str(folder)], "not a recording"),
            ([str(folder), "--num-layers", "2"], "unrecognized arguments: --num-layers 2"),
            ([], "the following arguments are required: TRACE"),
            ([str(folder), "--rounds", "x"], "argument --rounds: invalid int value: 'x'"),
            ([str(folder), "--json", "/no/where.json"], "--json /no/where.json: there is no folder /no"),
            ([str(folder), "--rounds", "0"], "--rounds 0: must be at least 1"),
            ([str(folder), "--groups", str(folder / "groups.json")], "not a recording"),
        ]:
            monkeypatch.setattr("sys.argv", ["replay", *argv])
            with pytest.raises(UsageError, match=message):
                replay.main(world)


#: the median step of bench.step --save at commit 21090a0 (format 2), and of its ancestor's bench.replay --record that
#: wrote format 1: a GPT of one layer, hidden 8, sequence 8, one sample, tensor-parallel over two ranks
OLD = {number: Path(__file__).with_name("recordings") / f"format-{number}" for number in (1, 2)}


@pytest.mark.parametrize("number", OLD)
def test_recordings_of_older_versions_are_read(number):
    what = recording.parse(recording.read(OLD[number]))
    assert what.groups[0] == Group("tensor", (0, 1)) and what.size == 2
    for calls in what.calls:
        sizes = Counter((call.operation, call.dtype, call.bytes) for call in calls if call.group == 0)
        # s b h activations: the embedding, two each way of the layer, and the output layer's backward. Then the loss's
        # maximum, and its two sums together, of s b numbers; and the square of the gradient's norm.
        assert sizes == {
            ("all_reduce", "float32", 256): 6, ("all_reduce", "float32", 32): 1, ("all_reduce", "float32", 64): 1,
            ("all_reduce", "float64", 8): 1,
        }  # fmt: skip
        assert all(call.start <= call.end and not any(call.windows) for call in calls)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("number", OLD)
def test_recordings_of_older_versions_are_replayed(number, mpi_world):
    from mpi4py import MPI

    from bench.step_study import replaying
    from commengine import Communicator

    two = mpi_world.Split(0 if mpi_world.rank < 2 else MPI.UNDEFINED)
    if two == MPI.COMM_NULL:
        return
    with Communicator(two) as world:
        rows = replaying.measure(world, recording.parse(recording.read(OLD[number])), warmup=0, rounds=1)
        assert [row["bytes"] for row in rows] == [row["replayed_bytes"] for row in rows] and len(rows) == 11
        assert sum(row["bytes"] for row in rows if row["group"] == "tensor") == 6 * 256 + 32 + 64 + 8
    two.Free()


@pytest.mark.mpi(min_size=2)
def test_a_recording_is_replaced_only_when_asked(mpi_world, folder):
    from commengine import Communicator

    with Communicator(mpi_world) as world:
        if world.rank == 0:
            write(folder, lambda rank: [event("all_reduce", rank, redop="sum")], ranks=7)
        world.barrier()
        with pytest.raises(UsageError, match=r"^--save .*: holds a recording of 7 ranks; give another .* --overwrite"):
            record(world, folder)
        assert len(list(folder.iterdir())) == 7
        world.barrier()
        record(world, folder, "--overwrite")
        world.barrier()
        assert recording.parse(recording.read(folder)).size == world.size == len(list(folder.iterdir()))


def test_a_trace_without_times_has_no_time_in_the_step():
    from bench import replay

    call = {
        "group": "tensor", "ranks": [0, 1], "operation": "all_reduce", "dtype": "float32", "bytes": 8, "stream": None,
        "window": False, "replayed_in_window": False, "isolated_s": 0.002, "replayed_bytes": 8,
    }  # fmt: skip
    without, all_, *_ = [*replay.tables([[call | {"in_step_s": 0.0}]] * 2)][2:]
    assert without.endswith("| 1 |  | 2.000 | - |") and all_.endswith("|  | 2.000 | - |")
    timed = [*replay.tables([[call | {"in_step_s": 0.003}]] * 2)][2]
    assert timed.endswith("| 1 | 3.000 | 2.000 | 1.50 |")


@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(2, 4)
def test_rows_that_ranks_send_unequally_are_replayed(mpi_world, folder):
    """Also on fewer ranks, whose rows are those for and from the ranks that are left."""
    from bench.step_study import replaying
    from commengine import Communicator, trace

    with Communicator(mpi_world) as world:
        n, me = world.size, world.rank
        counts = [[(rank + 3 * to) % 5 for to in range(n)] for rank in range(n)]
        received, window = [row[me] for row in counts], world.empty((20, 3))
        with trace(world) as log:
            world.exchange_rows(torch.empty(sum(received) + 1, 3), window[: sum(counts[me])], counts[me])
            stream = world.new_stream()
            x, y = torch.zeros(sum(counts[me]), 3), torch.empty(sum(received), 3)
            world.all_to_all_v(y, x, received, counts[me], stream=stream).wait()
            world.all_gather_v(torch.empty(sum(counts[0]), 3), torch.zeros(counts[0][me], 3), counts[0])
        log.save(folder / f"rank-{me}.jsonl")
        world.barrier()
        what = recording.parse(recording.read(folder))
        assert [call.rows for call in what.calls[me]] == [
            (tuple(received), tuple(counts[me])), (tuple(received), tuple(counts[me])), (tuple(counts[0]),),
        ]  # fmt: skip
        rows = replaying.measure(world, what, 1, 2)
        assert [row["replayed_bytes"] for row in rows] == [12 * sum(counts[me])] * 2 + [12 * sum(counts[0])]
        if n == 4:
            left = what.scaled(2)
            for rank in range(2):
                assert left.calls[rank][0].rows == (
                    (counts[0][rank], counts[1][rank]), tuple(counts[rank][:2]),
                )  # fmt: skip
                assert left.calls[rank][2].shape == (sum(counts[0][:2]), 3)
            replaying.measure(world, left, 0, 1)


def test_rows_of_another_number_are_refused(tmp_path):
    line = {
        "operation": "all_to_all_v", "redop": None, "root": None, "peers": [], "dtype": "float32", "shape": [4, 2],
        "bytes": 32, "buffers": [[32, False], [32, False]], "rows": [[1, 3], [2, 1]], "group": "world", "size": 2,
        "stream": None, "enqueue": 0.0, "start": 0.0, "end": 1.0, "wait_start": None, "wait_end": None,
    }  # fmt: skip
    for rank in range(2):
        head = {"format": 2, "rank": rank, "groups": {"world": [0, 1]}}
        (tmp_path / f"rank-{rank}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in (head, line)))
    with pytest.raises(UsageError, match=r"all_to_all_v of \[4, 2\] has rows \[\[1, 3\], \[2, 1\]\]"):
        recording.parse(recording.read(tmp_path))
