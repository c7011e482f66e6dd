"""The formulas of collectives against runs of the algorithms on exact fractions."""

from collections import Counter
from fractions import Fraction

import pytest

from commengine import cost
from commengine.cost import Link, Machine
from tplayers import formulas
from tplayers.formulas import TransformerShape

GPT3 = TransformerShape(layers=96, hidden=12288, heads=96, seq=2048, vocab=51200)


class Run:
    """Ranks that hold slices as Counters of contributions; counts the steps and adds their largest messages."""

    def __init__(self, ranks):
        self.ranks, self.path, self.steps = ranks, Fraction(0), 0
        self.slices = [[Counter({rank: 1}) for _ in range(ranks)] for rank in range(ranks)]  # [rank][slice]

    def step(self, messages, reduce):
        """messages: (from, to, indices of slices), all at once."""
        self.steps += 1
        copies = [
            (to, index, self.slices[source][index].copy()) for source, to, indices in messages for index in indices
        ]
        self.path += max(Fraction(len(indices), self.ranks) for _, _, indices in messages)
        for to, index, value in copies:
            self.slices[to][index] = self.slices[to][index] + value if reduce else value

    def check(self, operation, algorithm, everywhere=True):
        whole = Counter(range(self.ranks))
        if everywhere:
            assert all(one == whole for slices in self.slices for one in slices)
        size = 1024.0
        found = cost.collective(operation, algorithm, size, self.ranks)
        assert found.steps == self.steps
        assert found.path_bytes == pytest.approx(float(self.path) * size)


def ring(run, reduce):
    p = run.ranks
    for step in range(p - 1):
        shift = 0 if reduce else 1
        run.step([(rank, (rank + 1) % p, [(rank + shift - step) % p]) for rank in range(p)], reduce)


@pytest.mark.parametrize("p", [2, 3, 4, 7, 8])
def test_ring_all_reduce_is_what_a_ring_does(p):
    run = Run(p)
    ring(run, reduce=True)
    assert all(run.slices[rank][(rank + 1) % p] == Counter(range(p)) for rank in range(p))
    run.check("reduce_scatter", "ring", everywhere=False)
    ring(run, reduce=False)
    run.check("all_reduce", "ring")


@pytest.mark.parametrize("p", [2, 4, 8, 16])
def test_recursive_halving_and_doubling_are_what_they_do(p):
    run, rounds = Run(p), p.bit_length() - 1
    for bit in reversed(range(rounds)):  # exchange the half that the partner keeps
        run.step(
            [(r, r ^ 1 << bit, [i for i in range(p) if i >> bit == (r ^ 1 << bit) >> bit]) for r in range(p)],
            reduce=True,
        )
    run.check("reduce_scatter", "recursive_halving", everywhere=False)
    for bit in range(rounds):
        run.step([(r, r ^ 1 << bit, [i for i in range(p) if i >> bit == r >> bit]) for r in range(p)], reduce=False)
    run.check("all_reduce", "recursive_halving")

    run = Run(p)
    for bit in range(rounds):
        run.step([(r, r ^ 1 << bit, range(p)) for r in range(p)], reduce=True)
    run.check("all_reduce", "recursive_doubling")


@pytest.mark.parametrize("p", [3, 6, 7, 12])
def test_recursive_doubling_folds_what_is_beyond_a_power_of_two(p):
    run, rounds = Run(p), p.bit_length() - 1
    power = 1 << rounds
    run.step([(power + i, i, range(p)) for i in range(p - power)], reduce=True)
    for bit in range(rounds):
        run.step([(r, r ^ 1 << bit, range(p)) for r in range(power)], reduce=True)
    run.step([(i, power + i, range(p)) for i in range(p - power)], reduce=False)
    run.check("all_reduce", "recursive_doubling")


@pytest.mark.parametrize("p", [2, 3, 4, 6, 8, 11])
def test_binomial_trees_are_what_they_do(p):
    rounds = (p - 1).bit_length()

    def children(bit):
        return [(r, r + (1 << bit)) for r in range(0, p, 2 << bit) if r + (1 << bit) < p]

    def below(rank, bit):
        return range(rank, min(p, rank + (1 << bit)))

    run = Run(p)
    for bit in range(rounds):
        run.step([(child, parent, range(p)) for parent, child in children(bit)], reduce=True)
    run.check("reduce", "tree", everywhere=False)
    for bit in reversed(range(rounds)):
        run.step([(parent, child, range(p)) for parent, child in children(bit)], reduce=False)
    run.check("all_reduce", "tree")

    run = Run(p)
    run.slices[0] = [Counter(range(p)) for _ in range(p)]
    for bit in reversed(range(rounds)):
        run.step([(parent, child, range(p)) for parent, child in children(bit)], reduce=False)
    run.check("broadcast", "tree")

    # A scatter halves what is sent at each level where p is a power of two; elsewhere the formula is Thakur's bound.
    run = Run(p)
    run.slices[0] = [Counter(range(p)) for _ in range(p)]
    for bit in reversed(range(rounds)):
        run.step([(parent, child, below(child, bit)) for parent, child in children(bit)], reduce=False)
    for step in range(p - 1):
        run.step([(rank, (rank + 1) % p, [(rank - step) % p]) for rank in range(p)], reduce=False)
    assert cost.collective("broadcast", "ring", p, p).steps == run.steps
    if p & (p - 1) == 0:
        run.check("broadcast", "ring")


def test_hand_counted_rest():
    """Thakur, Rabenseifner & Gropp 2005, sections 4.1 to 4.5, on 4 ranks and 400 bytes: (steps, bytes on the path)."""
    expected = {
        ("all_gather", "ring"): (3, 300), ("all_gather", "recursive_doubling"): (2, 300),
        ("all_gather", "direct"): (1, 300), ("all_gather", "tree"): (4, 300 + 800),
        ("all_to_all", "ring"): (3, 300), ("all_to_all", "recursive_doubling"): (2, 400),
        ("all_to_all", "direct"): (1, 300),
        ("reduce_scatter", "direct"): (1, 300), ("reduce_scatter", "tree"): (4, 800 + 300),
        ("all_reduce", "direct"): (2, 600), ("reduce", "ring"): (5, 600), ("reduce", "direct"): (1, 1200),
        ("broadcast", "direct"): (1, 1200), ("p2p", "direct"): (1, 400),
    }  # fmt: skip
    for (operation, algorithm), (steps, sent) in expected.items():
        found = cost.collective(operation, algorithm, 400, 4)
        assert (found.steps, found.path_bytes) == (steps, sent), (operation, algorithm)
        assert found.seconds(Link(1.0, 0.0)) == steps and found.seconds(Link(0.0, 1.0)) == sent


def test_ring_is_optimal_in_bytes_and_doubling_in_steps():
    """Patarasuk & Yuan 2009: no all-reduce sends less than 2 (p - 1) / p n. Recursive doubling takes fewest steps."""
    for p in (2, 4, 8, 64):
        costs = {name: cost.collective("all_reduce", name, 1e6, p) for name in cost.ALGORITHMS["all_reduce"]}
        assert all(one.path_bytes >= costs["ring"].path_bytes - 1e-6 for one in costs.values())
        assert costs["ring"].path_bytes == pytest.approx(2 * (p - 1) / p * 1e6)
        assert min(one.steps for name, one in costs.items() if name != "direct") == costs["recursive_doubling"].steps
    link = Link(alpha=2e-6, beta=1e-10)
    tree, halving = (lambda size, name=name: cost.collective("all_reduce", name, size, 8).seconds(link)
                     for name in ("recursive_doubling", "recursive_halving"))  # fmt: skip
    assert tree(8) < halving(8) and tree(1e8) > halving(1e8)


def test_bandwidths_are_those_of_nccl_tests():
    """doc/PERFORMANCE.md, summary; size 100 in 2 seconds on 4 ranks."""
    factors = {
        "all_reduce": 1.5,
        "reduce_scatter": 0.75,
        "all_gather": 0.75,
        "all_to_all": 0.75,
        "broadcast": 1,
        "reduce": 1,
    }
    for operation, factor in factors.items():
        assert cost.bus_bandwidth(operation, 100, 2.0, 4) == 50 * factor
    # The bus bandwidth of a ring without latency is the link's.
    for operation in ("all_reduce", "reduce_scatter", "all_gather"):
        took = cost.collective(operation, "ring", 1e6, 6).seconds(Link(0, 1 / 7e9))
        assert cost.bus_bandwidth(operation, 1e6, took, 6) == pytest.approx(7e9)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cost.collective("allreduce", "ring", 1, 2), "no operation 'allreduce': there are all_reduce"),
        (lambda: cost.collective("broadcast", "recursive_doubling", 1, 2), "there are ring, tree, direct"),
        (lambda: cost.collective("all_gather", "recursive_doubling", 1, 6), "power of two of ranks, not 6"),
        (lambda: cost.collective("all_reduce", "ring", -1, 2), "0 or more, not -1"),
        (lambda: cost.collective("all_reduce", "ring", 1, 0), "at least one rank, not 0"),
        (lambda: cost.bus_bandwidth("reduce", 1, 0.0, 2), "time above 0"),
        (lambda: Link(-1, 0), "0 or more"),
        (
            lambda: formulas.activation_bytes(GPT3, 1, 1, formulas.KeptTensors(recompute="some")),
            "one of none, selective, full",
        ),
        (lambda: TransformerShape(1, 10, 3, 1, 1), "heads=3 does not divide hidden=10"),
        (lambda: TransformerShape(1, 10, 2, 1, 1, "xlnet"), "model='xlnet': one of gpt, bert, t5"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_ranks_that_send_at_once_share_the_adapters():
    """32 nodes of 16 ranks and 8 adapters of 12 GB/s: between nodes all that counts is what leaves a node."""
    machine = Machine(Link(0, 1 / 120e9), Link(0, 1 / 12e9), ranks_per_node=16, nics_per_node=8)
    slice_ = cost.collective("all_reduce", "ring", 1.6e9 / 16, 32).seconds(machine.between_for(16))
    assert slice_ == pytest.approx(2 * 31 / 32 * 1.6e9 / (8 * 12e9))
    # 8 groups of 2 that run at once load the adapters as one group of 16 with 8 times the data.
    crowded = cost.collective("all_reduce", "ring", 1.6e9 / 2, 32).seconds(machine.between_for(16))
    assert crowded == pytest.approx(8 * slice_)
    # More adapters than senders do not make one sender faster.
    assert machine.between_for(1).beta == pytest.approx(1 / 12e9)
    with pytest.raises(ValueError, match="at least one rank"):
        Machine(machine.inside, machine.between, 0, 1)
