"""The contest of mechanisms: each pair differs in its mechanism alone, and a slow link shows."""

import json
from types import SimpleNamespace

import pytest

from bench.contest import mechanisms
from bench.contest.parts.pairs import PAIRS, StepPair, refused
from bench.timing.starting import neighbours
from tests.bench.contest.stand_ins import rows_of
from tests.support.lab.hosts import emulated_hosts, why_not


@pytest.mark.slow
@pytest.mark.mpi(min_size=2)
def test_pairs_have_equal_losses_on_one_node(mpi_world, monkeypatch):
    from bench.contest.parts import pairs
    from commengine import Communicator

    monkeypatch.setattr(pairs, "POINTS", 16)
    monkeypatch.setattr(pairs, "WIDTH", 4)
    with Communicator(mpi_world, device="cpu") as world:
        nodes = neighbours(world.mpi)
        assert nodes == [list(range(world.size))] * world.size
        assert "two nodes" in refused("two_levels", nodes)
        for name in set(PAIRS) - {"two_levels"}:
            assert refused(name, nodes) is None
        with PAIRS["halo_overlap"](world) as pair:
            case = mechanisms.compared(world, pair, 2)
        assert not case.errors and {name: len(values) for name, values in case.seconds.items()} == {
            "with": 2, "without": 2,
        }  # fmt: skip
        assert case.numbers["losses"]["with"][0] != case.numbers["losses"]["with"][-1]  # it trains


def test_two_levels_need_nodes_of_as_many_ranks_two_or_more():
    pairs, alone = [[0, 1], [0, 1], [2, 3], [2, 3]], [[0], [1]]
    assert refused("two_levels", pairs) is None
    for nodes in (alone, [[0, 1], [0, 1], [2]], [[0], [1, 2], [1, 2]]):
        assert "as many ranks on each, two or more" in refused("two_levels", nodes)


@pytest.mark.mpi(min_size=2)
def test_other_losses_are_an_error_on_every_rank(mpi_world):
    from commengine import Communicator

    with Communicator(mpi_world, device="cpu") as world:
        pair = StepPair(lambda: 1.0, lambda: 1.0 + 0.1 * (world.rank == 1), [0.0, 0.0, 0.5, 0.7])
        case = mechanisms.compared(world, pair, 2)
    assert case.errors == ["the losses with and without a mechanism differ"]
    assert case.facts == {"with": {"hidden": "60%"}} and rows_of(case)[0].endswith("| time over with | hidden |")


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.mpi(min_size=2)
def test_steps_on_a_slow_link_last_as_long_as_their_gradients_take(mpi_world, monkeypatch):
    from dataclasses import replace

    from bench.contest.parts import pairs
    from commengine import Communicator

    rate = 4e6  # bytes a second
    small = replace(pairs.GPT, num_layers=2, hidden_size=32, num_attention_heads=2, seq_length=16, vocab_size=256,
                    make_vocab_size_divisible_by=1)  # fmt: skip
    monkeypatch.setattr(pairs, "GPT", small)
    monkeypatch.setattr(pairs, "BUCKET", 10_000)
    parameters = 2 * (12 * 32**2 + 13 * 32) + 32 * (256 + 16 + 2)
    with Communicator(mpi_world, device="cpu") as world:
        given = SimpleNamespace(mechanisms=["bucket_overlap"], rate=rate, rounds=3, seed=0)
        own, slow = mechanisms.CONTEST.measure(given, world)
    assert (own.labels["link"], slow.labels["link"]) == ("own", "0.004 GB/s")
    assert not own.errors and not slow.errors
    assert min(slow.seconds["without"]) >= 4 * parameters / rate  # fp32, nothing beside it
    assert all(0 <= share <= 1 for case in (own, slow) for share in case.numbers["hidden"])
    assert len(slow.numbers["hidden"]) == 3 and max(slow.numbers["hidden"]) > 0


@pytest.mark.mpi
def test_one_rank_has_nothing_to_do(mpi_world):
    from mpi4py import MPI

    from commengine import Communicator

    with Communicator(MPI.COMM_SELF, device="cpu") as single:
        given = SimpleNamespace(mechanisms=list(PAIRS), rate=None, rounds=1, seed=0)
        assert mechanisms.CONTEST.measure(given, single) == []
    notes = mechanisms.CONTEST.notes(given, [])
    assert notes[0] == "- nodes: 1"
    assert notes[1:] == [f"- not measured: {name}: needs two ranks or more" for name in PAIRS]


@pytest.mark.slow
@pytest.mark.skipif(why_not() is not None, reason=f"no emulated hosts: {why_not()}")
@pytest.mark.long
def test_a_slow_link_shows_in_the_steps(tmp_path):
    """The gradients, 16 MB, go over a link of 25 MB/s."""
    path = tmp_path / "r.json"
    with emulated_hosts(2, delay_us=1000, rate_mbit=200) as hosts:
        words = ("--mechanisms", "two_levels", "--rounds", "2", "--json", str(path))
        done = hosts.run("-m", "bench.contest", "mechanisms", *words, timeout=100, ranks_each=2)
    assert done.returncode == 0, done.stderr
    result = json.loads(path.read_text())
    (case,) = result["cases"]
    assert result["ranks"] == 4 and not case["errors"]
    assert [len(row["seconds"]) for row in case["rows"]] == [2, 2]
    assert min(second for row in case["rows"] for second in row["seconds"]) > 0.3
