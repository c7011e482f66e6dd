"""The transports that answer one question each, on real ranks, and the column of their times over another's."""

import json

import pytest

from bench.collective_study.results import measurement_of, measurements
from bench.collective_study.tables import compare, table
from tests.support import mpirun

ALL = ["shared", "engine", "beside-windows", "mpi4py", "in-fp32", "mpix-bfloat16", "memory"]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter", "all_gather", "broadcast"])
def test_every_transport_is_measured_and_right(tmp_path, operation):
    """From 1 byte on, each in the dtypes that it has."""
    done = mpirun.run(
        2, "-m", "bench.collectives", "--operations", operation, "--transports", *ALL, "--dtypes", "float32",
        "bfloat16", "--no-out-of-place", "--over", "shared", "--max-bytes", "32K", "--step-factor", "1024",
        "--time-limit", "0.01", "--json", str(tmp_path / "r.json"), timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done
    result = json.loads((tmp_path / "r.json").read_text())
    assert not any(row["wrong"] for row in result["rows"]) and " over\n" in done.stdout
    found = {dtype: {row["transport"] for row in result["rows"] if row["dtype"] == dtype} for dtype in
             ("float32", "bfloat16")}  # fmt: skip
    bound = {"memory"} if operation == "all_reduce" else set()
    assert found["float32"] == {"shared", "engine", "beside-windows", "mpi4py"} | bound
    assert {"shared", "engine", "beside-windows"} <= found["bfloat16"]
    assert ("in-fp32" in found["bfloat16"]) == (operation in ("all_reduce", "reduce_scatter"))
    shared = [row for row in map(measurement_of, result["rows"]) if row.transport == "shared"]
    # On a busy machine some rows are of another state, or have few calls; these have no ratio.
    assert all(row.over == 1.0 or row.why_not for row in shared)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("operation", ["send", "sendrecv"])
def test_a_message_is_right_while_an_all_reduce_runs(mpi_world, operation, monkeypatch):
    """The all-reduce begins before the message, and is over after it: nothing of it reaches another measurement."""
    import torch

    from bench.transports.operations import CollectiveCall
    from bench.transports.variants import UnderAllReduce
    from commengine import Communicator

    seen = []
    with Communicator(mpi_world) as world:
        transport = UnderAllReduce(world, 1 << 20)
        bound = transport.bind(CollectiveCall.of(operation, torch.float32, "sum", 0, world.size, 1 << 20), False)
        invoke = bound.invoke
        bound.invoke = lambda: (seen.append(transport._running is not None), invoke())
        bound.run(3)
        assert seen == [True] * 3 and transport._running is None
        assert bound.wrong() == 0 and transport._reduced.nbytes == UnderAllReduce.LEAST
        transport.close()


def row(transport, seconds, state=None, dtype="float32"):
    return {
        "operation": "all_reduce", "dtype": dtype, "redop": "sum", "in_place": True, "bytes": 8, "state": state,
        "ranks": 2, "transport": transport, "seconds": {"p50": seconds},
    }  # fmt: skip


def test_a_time_is_compared_with_that_of_the_same_call_in_the_same_state():
    rows = [row("engine", 3.0, "state 1"), row("mpi4py", 2.0, "state 1"), row("mpi4py", 8.0, "state 2")]
    rows += [row("engine", 4.0, "state 2"), row("engine", 1.0, "state 1", "bfloat16")]
    rows = measurements(rows)
    assert [one.over for one in compare(rows, "mpi4py")] == [1.5, 1.0, 1.0, 0.5, None]
    assert compare(rows, None) == rows


def test_a_row_without_a_ratio_has_a_dash():
    times = dict.fromkeys(("p50", "p95", "p99", "min", "max"), 1e-06)
    more = {"seconds": times, "ci": [1e-6, 1e-6], "group": "world", "count": 2, "root": -1, "wrong": 0,
            "algbw": 1e9, "busbw": 1e9, "converged": True, "iterations": 20}  # fmt: skip
    rows = measurements([row("engine", 0.0) | more | {"over": 1.25}, row("memory", 0.0) | more])
    heads, _, first, second = table(rows).splitlines()[1:]
    assert heads.endswith(" over") and first.endswith(" 1.25") and second.endswith(" -")
