"""bench.collectives: its transports on real ranks, its command line, what it writes."""

import csv
import json
import time
from dataclasses import replace

import pytest
import torch

from bench.collective_study.measuring import overlap_percent
from bench.collective_study.results import measurements, read
from bench.collective_study.tables import readable, table
from bench.collectives import series, settings
from bench.command.values import parse_bytes
from bench.timing.clocks import Offset, synchronise
from bench.timing.sampling import FEWEST
from bench.transports.operations import DTYPES, IN_PLACE, OPERATIONS, REDOPS, REDUCING, SPLIT, CollectiveCall
from commengine import CollectiveError
from tests.support import mpirun

MEMORY = {"available": 1 << 33, "shared": 1 << 32}


# On real ranks ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def world(mpi_world):
    from commengine import Communicator

    with Communicator(mpi_world) as world:
        yield world


@pytest.fixture(scope="module", params=["engine", "mpi4py", "shared", "stream"])
def transport(request, world):
    from bench.transports.in_process import LOCAL

    if request.param == "shared" and world.size == 1:
        with pytest.raises(CollectiveError, match="two ranks or more"):
            LOCAL["shared"](world, 64)
        pytest.skip("nothing to share")
    opened = LOCAL[request.param](world, 1 << 18)
    yield opened
    opened.close()


@pytest.mark.mpi
def test_an_operation_that_a_transport_does_not_have_is_an_error(world, transport):
    """It does not become the call of another operation."""
    call = replace(
        CollectiveCall.of("all_to_all", torch.float32, "sum", 0, world.size, 64), operation="no_such_operation"
    )
    assert transport.refuses(call, False) == f"{transport.name} does not run no_such_operation"
    with pytest.raises(ValueError, match=f"{transport.name} does not run no_such_operation"):
        transport.bind(call, False)


@pytest.mark.mpi
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_transport_computes_what_is_expected(world, transport, operation):
    for name in ("float32", "bfloat16"):
        for redop in REDOPS if operation in REDUCING else ["none"]:
            for in_place in {False, operation in IN_PLACE}:
                for nbytes in (1, 70_000):
                    call = CollectiveCall.of(operation, DTYPES[name], redop, world.size - 1, world.size, nbytes)
                    reason = transport.refuses(call, in_place)
                    if operation == "send" and world.size == 1:
                        assert reason == "a message one way needs an even number of ranks"
                    elif transport.name != "mpi4py" or redop == "none" or (name == "float32" and redop != "avg"):
                        assert reason is None
                    else:
                        assert reason == (
                            "MPI has no avg" if redop == "avg" else f"MPI does not reduce {name} as torch does"
                        )
                    if reason is not None:
                        continue
                    bound = transport.bind(call, in_place)
                    poisoned = bound.wrong()
                    starts, seconds = bound.run(1)
                    assert starts.shape == seconds.shape == (1,) and seconds[0] > 0
                    assert bound.wrong() == 0, (name, redop, in_place, nbytes)
                    assert in_place or poisoned > 0 or not call.received(world.rank)
                    if not in_place:
                        bound.run(2)  # out of place the input is still there
                        assert bound.wrong() == 0


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_inputs_are_written_before_each_call_on_fresh_and_new_buffers(world, transport, operation):
    """So that also the third result in place is right, and that of new buffers lies in other memory than the second."""
    for buffers in ("same", "fresh", "new"):
        for in_place in {False, operation in IN_PLACE}:
            call = CollectiveCall.of(operation, torch.float32, "sum" if operation in REDUCING else "none", 0, 2, 70_000)
            transport.buffers = buffers
            if (reason := transport.refuses(call, in_place)) is not None:
                assert (transport.name, buffers) == ("shared", "new") and "is shared, and made once" in reason
                continue
            bound = transport.bind(call, in_place)
            bound.run(2)
            before = bound.input.data_ptr()
            starts, seconds = bound.run(3)
            assert (
                starts.shape == seconds.shape == (3,)
                and bool((seconds > 0).all())
                and bool((starts[1:] > starts[0]).all())
            )
            if in_place and buffers == "same" and operation in REDUCING:
                assert bound.wrong() > 0 or (world.rank > 0 and operation == "reduce")
            else:
                assert bound.wrong() == 0, (buffers, in_place)
            assert buffers == "new" or bound.input.data_ptr() == before
            bound.reset()
            assert bound.wrong() > 0 or in_place or not call.received(world.rank)
            bound.run(1)
            assert bound.wrong() == 0
    transport.buffers = "same"


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("by_clock", [False, True])
def test_a_broken_transport_shows(world, by_clock):
    from bench.collective_study.measuring import GroupSetup, measure_call
    from bench.timing.sampling import Stopping
    from bench.transports.in_process import Engine

    class Broken(Engine):
        """Forgets the first element of the last rank's part of a sum."""

        name = "broken"

        def _start(self, call, in_place):
            def start():
                recv = self._buffers.views(call, world.rank, in_place)[1]
                work = right()
                if world.rank == world.size - 1:
                    recv[0] -= 1
                return work

            right = super()._start(call, in_place)
            return start

    class Idle(Engine):
        """Does nothing."""

        name = "idle"
        in_place_only = ()  # no copy of the input either

        def _start(self, call, in_place):
            return lambda: None

    place = GroupSetup(world, world, "world", Stopping(seconds=0.01), by_clock=by_clock)
    call = CollectiveCall.of("all_reduce", torch.float32, "sum", 0, world.size, 4000)
    transports = [kind(world, 4096) for kind in (Broken, Idle, Engine)]
    rows, _ = measure_call(place, call, transports, [False, True], 0)
    assert bool(rows) == (world.rank == 0)
    if world.rank == 0:
        wrong = {(row.transport, row.in_place): row.wrong for row in rows}
        assert wrong["engine", False] == wrong["engine", True] == 0
        assert wrong["broken", False] == wrong["broken", True] == 1
        assert wrong["idle", False] == 1000 * world.size
        assert wrong["idle", True] > 500 * world.size


@pytest.mark.mpi
def test_clocks_that_are_apart_are_found_out(world):
    def clock():
        return time.perf_counter() - 7.5 * world.rank  # one machine: the real clocks are the same

    for rank, offset in enumerate(synchronise(world.mpi, clock=clock)):
        assert abs(offset.seconds - 7.5 * rank) <= offset.uncertainty + 1e-9
        assert (offset.uncertainty > 0) == (rank > 0)


# Anywhere -----------------------------------------------------------------------------------------------------


def test_an_offset_is_what_all_round_trips_allow():
    """The way there was quickest in the third trip, the way back in the second."""
    trips = [(0.0, 5.9, 2.0), (10.0, 15.06, 10.1), (20.0, 25.0, 21.0)]
    offset = Offset.estimate(trips)
    assert offset.seconds == pytest.approx(-4.98)
    assert offset.uncertainty == pytest.approx(0.02)


def test_overlap_is_osus_formula():
    assert overlap_percent(10, 10, 10) == 100
    assert overlap_percent(10, 10, 20) == 0
    assert overlap_percent(10, 12, 17) == 50
    assert overlap_percent(10, 10, 25) == 0
    assert overlap_percent(10, 10, 9) == 100


def test_sizes_in_human_units():
    assert [parse_bytes(text) for text in ("1", "64M", "64MB", "64 MiB", "1.5k", "2g")] == [
        1, 64 << 20, 64 << 20, 64 << 20, 1536, 2 << 30,
    ]  # fmt: skip


def test_sizes_are_rounded_up_and_none_is_measured_twice():
    chosen = settings(["--max-bytes", "100", "--operations", "all_reduce", "all_gather"], 4, MEMORY)
    first, second = series(chosen, 4)
    assert [call.nbytes for call in first] == [4, 8, 16, 32, 64, 100]  # the largest, too
    assert [call.nbytes for call in second] == [16, 32, 64, 112]


def test_defaults_fit_into_the_memory():
    chosen = settings([], 4, MEMORY)
    assert chosen.operations == list(OPERATIONS)
    assert chosen.transports == ["engine", "mpi4py", "shared", "stream"]
    assert 2 * 4 * max(chosen.sizes) <= MEMORY["available"] // 8
    assert json.loads(json.dumps(vars(chosen))) == vars(chosen)  # it goes to the other ranks as JSON


def test_options_come_from_a_file_too(tmp_path):
    (tmp_path / "c.yaml").write_text("operations: [broadcast, reduce]\nmax-bytes: 1K\nin-place: false\n")
    chosen = settings(["--config", str(tmp_path / "c.yaml"), "--step-factor", "4"], 2, MEMORY)
    assert chosen.operations == ["broadcast", "reduce"]
    assert chosen.sizes == [1, 4, 16, 64, 256, 1024]
    assert chosen.variants == [False]


@pytest.mark.parametrize(
    "argv, message",
    [
        (
            ["--operations", "allreduce"],
            "--operations: invalid choice: 'allreduce' (choose from",
        ),
        (["--transports", "engine", "ucx"], "--transports: invalid choice: 'ucx' (choose from"),
        (["--dtypes", "fp32"], "--dtypes: invalid choice: 'fp32' (choose from"),
        (["--skew", "nosuch"], "--skew nosuch: nosuch: there is no such file; valid: uniform, zipf, hot, or a file"),
        (["--over", "gloo"], "--over gloo: is none of the transports; valid: engine, mpi4py, shared, stream"),
        (["--redop", "avg", "--dtypes", "int8"], "--redop avg with --dtypes int8: op='avg' needs a floating-point"),
        (
            ["--max-bytes", "12Q"],
            "--max-bytes: '12Q' is not a size; valid: bytes, or a number with a unit, such as 32K",
        ),
        (["--max-bytes", "1T"], "--max-bytes 1T: 8 buffers of that size; at most"),
        (["--min-bytes", "2K", "--max-bytes", "1K"], "--min-bytes 2048 and --max-bytes 1024"),
        (["--step-factor", "1"], "--step-factor 1.0: must be a number above 1"),
        (["--tensor-model-parallel-size", "3"], "--tensor-model-parallel-size 3: tensor=3 does not divide"),
        (["--group", "pipeline"], "--group: invalid choice: 'pipeline'"),
        (["--no-in-place", "--no-out-of-place"], "leave nothing to measure"),
        (["--confidence", "0"], "--confidence 0.0: must be a number above 0"),
        (["--time-limit", "nan"], "--time-limit nan: must be a number above 0"),
        (["--overlap", "--transports", "engine"], "--overlap measures the transport stream"),
        (["--json", "/no/where.json"], "--json /no/where.json: there is no folder /no"),
        (["--plot", "x.txt"], "--plot x.txt: the name ends in .png"),
        (["--json", "x.out", "--csv", "./x.out"], "--csv ./x.out: is the file of --json, too"),
        (["--rounds", "3"], "unrecognized arguments: --rounds 3"),
    ],
)
def test_bad_options_are_named(argv, message):
    with pytest.raises(ValueError) as raised:
        settings(argv, 4, MEMORY)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def bench(ranks, *options):
    return mpirun.run(ranks, "-m", "bench.collectives", *map(str, options), timeout=100)


@pytest.mark.slow
def test_bad_input_ends_every_rank_with_one_line():
    done = bench(2, "--over", "gloo")
    assert done.returncode == 2
    lines = done.stderr.split("\n")
    assert lines[0] == (
        "python -m bench.collectives: error: --over gloo: is none of the transports; "
        "valid: engine, mpi4py, shared, stream"
    )
    assert not [line for line in lines if "Traceback" in line or "error: " in line][1:]
    assert done.stdout == ""


KEYS = {
    "operation": str, "transport": str, "group": str, "ranks": int, "dtype": str, "redop": str, "root": int,
    "in_place": bool, "bytes": int, "count": int, "iterations": int, "seconds": dict, "ci": list, "algbw": float,
    "busbw": float, "wrong": int, "start_skew": dict, "converged": bool, "late": int,
}  # fmt: skip


def check(result, group, ranks):
    """The schema that bench.study --only fit reads, and what must hold in every row."""
    assert result["format"] == 1
    assert {"command", "date", "hardware", "versions", "rows", "skipped"} <= set(result)
    for row in result["rows"]:
        few = row["iterations"] < FEWEST
        assert {name: type(row[name]) for name in KEYS} == KEYS | ({"ci": type(None)} if few else {})
        assert (row["group"], row["ranks"], row["wrong"]) == (group, ranks, 0)
        seconds, (low, high) = row["seconds"], row["ci"] or [row["seconds"]["p50"]] * 2
        assert 0 < seconds["min"] <= low <= seconds["p50"] <= high <= seconds["max"]
        assert seconds["p50"] <= seconds["p95"] <= seconds["p99"] <= seconds["max"]
        assert row["algbw"] == pytest.approx(row["bytes"] / seconds["p50"])
        assert 0 <= row["start_skew"]["p50"] <= row["start_skew"]["max"]


@pytest.mark.slow
def test_a_command_that_a_signal_ends_keeps_what_it_measured(tmp_path):
    """A rank is killed once some rows are there; bench.study --only fit reads them and what they are."""
    path, kill = tmp_path / "r.json", tmp_path / "kill.py"
    kill.write_text(KILL)
    done = mpirun.run(
        2, str(kill), str(path), "--operations", "all_reduce", "--transports", "engine", "mpi4py", "--time-limit",
        "0.02", "--max-bytes", "1M", "--no-in-place", "--json", str(path), timeout=100,
    )  # fmt: skip
    assert done.returncode != 0
    result = json.loads(path.read_text())
    assert result["complete"] is False and 4 <= len(result["rows"]) < 42
    check(result, "world", 2)
    series, about = read(path)
    assert about["complete"] is False and len(series) >= 2


#: rank 1 is killed when the file of rank 0 has two sizes
KILL = """
import json, os, sys, threading, time
from pathlib import Path
from bench import collectives
from bench.command.start import run_on_ranks
from commengine.startup.tasks import task_number
path = Path(sys.argv.pop(1))
def watch():
    while not path.exists() or len(json.loads(path.read_text())["rows"]) < 4:
        time.sleep(0.01)
    os.kill(os.getpid(), 9)
if task_number() == 1:
    threading.Thread(target=watch, daemon=True).start()
run_on_ranks("bench.collectives", collectives.main, collectives.parser)
"""


def measured(result):
    return {(row["operation"], row["transport"], row["in_place"], row["bytes"]) for row in result["rows"]}


@pytest.mark.slow
def test_all_operations_and_transports_on_two_ranks(tmp_path):
    files = {name: tmp_path / f"r.{name}" for name in ("json", "csv", "md")}
    done = bench(
        2, "--min-bytes", "40K", "--max-bytes", "40K", "--time-limit", 0.002, "--warmup", 1,
        "--transports", "engine", "mpi4py", "shared", "stream", "gloo", "nccl", "--json", files["json"], "--csv",
        files["csv"], "--output", files["md"],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(files["json"].read_text())
    check(result, "world", 2)
    assert result["start"] == "barrier" and not any(row["late"] for row in result["rows"])
    expected = {
        (operation, transport, in_place, size)
        for operation in OPERATIONS
        for transport in ("engine", "mpi4py", "shared", "stream", "gloo")
        for in_place in {False, operation in IN_PLACE}
        for size in ([40960] if operation != "barrier" else [0])
    }
    assert measured(result) == expected
    if not torch.cuda.is_available():
        assert result["skipped"] == [{"transport": "nccl", "reason": "needs a CUDA device, and torch sees none"}]
    for row in result["rows"]:
        assert row["busbw"] == pytest.approx(row["algbw"] * (0.5 if row["operation"] in SPLIT else 1.0))  # (n - 1) / n
    lines = list(csv.DictReader(files["csv"].open()))
    assert len(lines) == len(result["rows"])
    assert [float(line["seconds_p50"]) for line in lines] == [row["seconds"]["p50"] for row in result["rows"]]
    shown = [line.split() for line in done.stdout.splitlines() if line.strip() and not line.startswith("#")]
    assert len(shown) >= len(result["rows"])  # a table is printed before it is known which states are disturbances
    assert "# 0 wrong elements" in done.stdout
    written = files["md"].read_text().splitlines()
    assert "- command: `python -m bench.collectives --min-bytes 40K" in files["md"].read_text()
    tables = written[written.index("```") + 1 : -1]
    assert all(block in done.stdout for block in "\n".join(tables).split("\n\n"))
    if "# again, because the states" not in done.stdout:  # then tables are printed twice, and written once
        assert list(filter(None, tables)) == list(filter(None, done.stdout.splitlines()))
    # nccl-tests' columns in their order, behind a column "state" where the machine showed more than one
    assert " ".join(["size", "count", "type", "redop", "root", "time", "algbw", "busbw", "#wrong"]) in " ".join(
        done.stdout.split()
    )


@pytest.mark.slow
@pytest.mark.long
def test_groups_of_a_grid_side_by_side_with_overlap(tmp_path):
    done = bench(
        4, "--min-bytes", 64, "--max-bytes", 64, "--time-limit", 0.002, "--warmup", 1, "--operations", "all_reduce",
        "broadcast", "--transports", "stream", "gloo", "--overlap", "--tensor-model-parallel-size", 2, "--group",
        "data", "--dtypes", "bfloat16", "--redop", "sum", "max", "--json", tmp_path / "r.json", "--plot",
        tmp_path / "r.png",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "r.json").read_text())
    check(result, "data", 2)
    assert len(result["rows"]) == (2 + 1) * 2 * 2
    for row in result["rows"]:
        assert ("overlap" in row) == (row["transport"] == "stream")
        assert row["root"] == (0 if row["operation"] == "broadcast" else -1)
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    streamed = [row["overlap"] for row in result["rows"] if "overlap" in row]
    assert all(0 <= one["percent"] <= 100 and one["overall"] > 0 < one["compute"] for one in streamed)
    assert "pure comm" in table(measurements(result["rows"]))


@pytest.mark.parametrize(("low", "high"), [(1.5, 1.9), (0.02, 5), (3, 70_000), (101.2, 101.9)])
def test_ticks_of_a_logarithmic_axis_have_different_labels(low, high):
    from matplotlib.figure import Figure

    figure = Figure()
    axes = figure.subplots()
    axes.plot([1 << 10, 1 << 20], [low, high])
    axes.set(xscale="log", yscale="log")
    readable(axes)
    figure.canvas.draw()
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert len(labels) > 1 and len(set(labels)) == len(labels)
    assert [float(label.replace(",", "")) for label in labels] == pytest.approx(list(axes.get_yticks()))
