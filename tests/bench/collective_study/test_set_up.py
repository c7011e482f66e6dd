"""bench.collectives --only set-up: its stand-in gives what MPI gives, and no call gets more than a few words a rank."""

import json
from array import array

import pytest

from bench.collective_study.set_up import OneOfMany, main, measured
from commengine import Communicator, UsageError
from commengine.shared_memory.nodes import nodes_of


def test_no_call_gets_more_than_two_words_a_rank():
    found = measured([64, 4096], calls=1)
    assert len(found) == 2 * len({one["call"] for one in found})
    for one in found:
        assert one["received"] <= 512 + 16 * one["ranks"], one
        assert one["sent"] <= 1024, one
    # Those that do not need something of each rank get as much on any number of ranks.
    by = {(one["call"], one["ranks"]): one["received"] for one in found}
    grows = {call for call, ranks in by if by[call, 64] != by[call, 4096]}
    assert grows == {"each_number", "nodes of a group"}


@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(2)
def test_the_stand_in_is_mpi_where_all_ranks_give_the_same(mpi_world):
    """The two reductions and the gather, beside those of MPI."""
    from mpi4py import MPI

    stand_in = OneOfMany(mpi_world.size)
    for numbers in ((3, -5), (2**40,)):
        both = [array("q", numbers), array("q", numbers)]
        for comm, values in zip((mpi_world, stand_in), both, strict=True):
            comm.Allreduce(MPI.IN_PLACE, (values, MPI.INT64_T), MPI.MIN)
        every = [array("q", bytes(8 * len(numbers) * mpi_world.size)) for _ in range(2)]
        for comm, target in zip((mpi_world, stand_in), every, strict=True):
            comm.Allgather((array("q", numbers), MPI.INT64_T), (target, MPI.INT64_T))
        assert both[0] == both[1] and every[0] == every[1]
    assert stand_in.allreduce(7, MPI.MIN) == mpi_world.allreduce(7, MPI.MIN)


def test_nodes_are_told_by_their_first_ranks():
    assert nodes_of([0, 1, 0, 1, 4]) == [[0, 2], [1, 3], [4]]


@pytest.fixture
def alone():
    from mpi4py import MPI

    return MPI.COMM_SELF


def test_the_command_writes_its_table(alone, tmp_path, capsys):
    with Communicator(alone) as world:
        main(world, ["--ranks", "64", "128", "--output", str(tmp_path / "s.md"), "--json", str(tmp_path / "s.json")])
    out = capsys.readouterr().out
    assert out == (tmp_path / "s.md").read_text() and "| Communicator.compare |" in out and "bytes at 128" in out
    rows = json.loads((tmp_path / "s.json").read_text())["rows"]
    assert {one["ranks"] for one in rows} == {64, 128} and min(one["seconds"] for one in rows) > 0


@pytest.mark.parametrize("wrong", ["65", "96", "32"])
def test_other_sizes_are_named(alone, wrong):
    with (
        Communicator(alone) as world,
        pytest.raises(UsageError, match=f"--ranks {wrong}: must be a power of two of at least 64"),
    ):
        main(world, ["--ranks", wrong])
