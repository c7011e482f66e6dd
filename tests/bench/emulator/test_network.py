"""The emulated network takes the times that its links say, without a clock."""

from dataclasses import replace

import pytest

from bench.emulator.machine import EmulatedMachine, Wire
from bench.emulator.network import Network
from bench.emulator.schedules import schedule

ALPHA, BETA = 1e-5, 1e-9
PLAIN = replace(
    EmulatedMachine.drawn(0, 2, 4), inside=Wire(ALPHA, BETA), between=Wire(10 * ALPHA, 10 * BETA), slow=(1.0, 1.0),
    contention=0.0, jitter=0.0, short=0,
)  # fmt: skip


def times(machine, *collectives):
    """(group's members, operation, bytes, arrivals) -> the time at which each member of each group is through."""
    network, found = Network(machine), [{} for _ in collectives]
    for number, (members, operation, nbytes, arrivals) in enumerate(collectives):
        for rank, arrival in zip(members, arrivals, strict=True):
            network.join(number, 0, members, rank, operation, nbytes, arrival, found[number].__setitem__)
    network.run(float("inf"))
    assert all(len(one) == len(members) for one, (members, *_) in zip(found, collectives, strict=True))
    return found


def test_a_message_takes_alpha_and_its_bytes():
    (found,) = times(PLAIN, ((0, 1), "all_gather", 2e6, (0, 0)))
    assert found[0] == found[1] == pytest.approx(ALPHA + 1e6 * BETA)


@pytest.mark.parametrize("members", [2, 3, 4])
def test_a_ring_takes_the_steps_of_the_formula(members):
    (found,) = times(PLAIN, (tuple(range(members)), "all_reduce", 1e6, [0] * members))
    expected = 2 * (members - 1) * (ALPHA + 1e6 * BETA / members)
    assert list(found.values()) == pytest.approx([expected] * members)


@pytest.mark.parametrize("members", [2, 3, 4])
def test_an_all_to_all_and_a_hop_around_a_ring_take_their_messages(members):
    ranks, together = tuple(range(members)), [0] * members
    every, hop = (times(PLAIN, (ranks, operation, 1e6, together))[0] for operation in ("all_to_all", "sendrecv"))
    assert list(every.values()) == pytest.approx([(members - 1) * (ALPHA + 1e6 * BETA / members)] * members)
    assert list(hop.values()) == pytest.approx([ALPHA + 1e6 * BETA] * members)


@pytest.mark.parametrize(("members", "steps"), [(2, 1), (4, 2)])
def test_a_short_all_reduce_takes_the_steps_of_a_tree(members, steps):
    machine = replace(PLAIN, short=10**6)
    (found,) = times(machine, (tuple(range(members)), "all_reduce", 1000, [0] * members))
    assert max(found.values()) == pytest.approx(steps * (ALPHA + 1000 * BETA))


def test_a_ring_through_two_nodes_is_as_slow_as_its_slowest_link():
    """Seven parts pass the adapter one after another, while the other links deliver the next one early."""
    (found,) = times(PLAIN, (tuple(range(8)), "all_gather", 8e6, [0] * 8))
    assert max(found.values()) == pytest.approx(7 * 1e6 * 10 * BETA + 10 * ALPHA)


def test_two_groups_share_an_adapter():
    alone, *_ = times(PLAIN, ((0, 4), "all_reduce", 1e7, (0, 0)))
    both = times(PLAIN, ((0, 4), "all_reduce", 1e7, (0, 0)), ((1, 5), "all_reduce", 1e7, (0, 0)))
    assert max(max(one.values()) for one in both) == pytest.approx(2 * max(alone.values()), rel=0.01)
    crowded = replace(PLAIN, contention=0.1)
    more = times(crowded, ((0, 4), "all_reduce", 1e7, (0, 0)), ((1, 5), "all_reduce", 1e7, (0, 0)))
    assert max(max(one.values()) for one in more) > 1.05 * max(max(one.values()) for one in both)


def test_groups_inside_a_node_do_not_disturb_each_other():
    alone, *_ = times(PLAIN, ((0, 1), "all_reduce", 1e7, (0, 0)))
    both = times(PLAIN, ((0, 1), "all_reduce", 1e7, (0, 0)), ((2, 3), "all_reduce", 1e7, (0, 0)))
    assert max(both[0].values()) == max(both[1].values()) == max(alone.values())


def test_two_threads_at_one_time_have_an_order():
    """A rank's main thread comes before its stream, whichever of them the network hears first."""
    times = []
    for order in ((0, 1), (1, 0)):
        network, found = Network(PLAIN), [{}, {}]
        for actor in order:
            for rank in (0, 1):
                done, nbytes = found[actor].__setitem__, 1e6 * (1 + actor)
                network.join(actor, 0, (0, 1), rank, "all_reduce", nbytes, 1.0, done, actor)
        network.run(float("inf"))
        times.append(found)
    assert times[0] == times[1] and max(times[0][0].values()) < max(times[0][1].values())


def test_all_ranks_wait_for_the_last():
    (found,) = times(PLAIN, ((0, 1, 2, 3), "all_reduce", 1e6, (0, 0, 5e-3, 0)))
    (together,) = times(PLAIN, ((0, 1, 2, 3), "all_reduce", 1e6, (0, 0, 0, 0)))
    assert min(found.values()) > 5e-3 and max(found.values()) <= 5e-3 + max(together.values()) + 1e-12


@pytest.mark.parametrize(
    "operation", ["barrier", "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "sendrecv"]
)
@pytest.mark.parametrize("members", [1, 2, 3, 5, 8])
def test_every_message_that_is_sent_is_waited_for(operation, members):
    steps = schedule(operation, 1e6, members, 0)
    sent = sorted((me, to) for me, mine in enumerate(steps) for step in mine for to, _ in step.send)
    awaited = sorted((of, me) for me, mine in enumerate(steps) for step in mine for of in step.receive)
    assert sent == awaited and len(steps) == members
    if members > 1:
        ranks = tuple(range(members))
        machine = replace(PLAIN, nodes=1, ranks_per_node=members)
        (found,) = times(machine, (ranks, operation, 1e6, [0] * members))
        assert max(found.values()) > 0


def test_other_operations_are_refused():
    with pytest.raises(ValueError, match="the emulator does not run broadcast"):
        schedule("broadcast", 1e6, 2, 0)


def test_a_machine_is_drawn_by_its_seed_and_kept_in_a_file(tmp_path):
    machine = EmulatedMachine.drawn(3, 2, 4)
    assert machine == EmulatedMachine.drawn(3, 2, 4) != EmulatedMachine.drawn(4, 2, 4)
    machine.save(tmp_path / "machine.json")
    assert EmulatedMachine.load(tmp_path / "machine.json") == machine
    assert [machine.node(rank) for rank in (0, 3, 4, 7)] == [0, 0, 1, 1]
