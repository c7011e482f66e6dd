"""The report of a roll call, from records."""

import pytest

import commengine
from commengine.rollcall import report


def record(rank, stack, **more):
    usual = {"host": "a", "process": 7, "state": "S", "still": 90.0, "busy": 1.0, "ended": "", "answers": ""}
    return {"rank": rank, "stack": stack, **usual, **more}


WAITS = [["x.py", 4, "f", "comm.Bcast(x, root=0)"]]


def test_the_report_of_many_ranks_has_a_group_for_each_place():
    """The rank whose call has another value is a group of its own, and ranks without a watcher are named."""
    other = [["x.py", 4, "f", "comm.Bcast(x, root=1)"]]
    records = [record(n, WAITS, still=60.0 + n / 10) for n in range(900) if n != 17] + [record(17, other)]
    found = report.text(records, 902, 60, "why").splitlines()
    assert found[0] == "rollcall: why: 902 ranks"
    assert found[1].startswith("  rank 17 (a, process 7) waits in Bcast, for 90 s")
    assert "  ranks 0-16, 18-899 (899) wait in Bcast, for 60 to 150 s" in found
    assert found[-1].startswith("  ranks 900-901 not seen")


@pytest.mark.parametrize("call", ["file.read()", "Path('fifo').open()", "it.accept()", "words.split()", "lock.post()"])
def test_of_two_ranks_the_odd_one_is_outside_of_mpi(call):
    """Files, sockets and strings have methods of names that MPI's have, too, with a capital."""
    reads = [["x.py", 9, "g", call]]
    for records in ([record(0, WAITS), record(1, reads, busy=0.0)], [record(1, WAITS), record(0, reads, busy=0.0)]):
        assert "waits, outside of MPI" in report.text(records, 2, 60, "why").splitlines()[1]


@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter", "exchange_rows"])
def test_a_rank_in_the_engine_waits_in_the_call_of_its_program(operation):
    files = [
        f"operations/{operation}.py",
        "calls/known_calls.py",
        "calls/known_calls.py",
        "communicator.py",
        "copies.py",
    ]
    within = [[f"{commengine.__path__[0]}/{file}", 1, "run", "run(*args)"] for file in files]
    waits = [*within, ["x.py", 4, "f", f"world.{operation}(x)"]]
    found = report.text([record(0, waits), record(1, [["x.py", 9, "g", "file.read()"]], busy=0.0)], 2, 60, "why")
    assert f"rank 0 (a, process 7) waits in {operation}" in found.splitlines()[3]


def test_of_two_ranks_the_odd_one_is_the_one_that_is_gone():
    reads = [["x.py", 9, "g", "file.read()"]]
    killed = [record(0, reads), record(1, WAITS, ended="is gone: killed, or left by os._exit")]
    assert "rank 1 (a, process 7) is gone" in report.text(killed, 2, 60, "why").splitlines()[1]


def test_ranks_that_are_gone_are_one_group_wherever_they_were():
    gone = {"ended": "is gone: killed, or left by os._exit"}
    records = [record(0, WAITS), record(1, WAITS, **gone), record(2, [["x.py", 9, "g", "read()"]], **gone)]
    found = report.text(records, 3, 60, "why").splitlines()
    assert len(found) == 4 and "  ranks 1-2 (2) are gone: killed, or left by os._exit" in found
