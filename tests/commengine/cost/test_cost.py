"""commengine.cost against simulated algorithms, published formulas, and the worked examples of the seed texts."""

import json
from collections import Counter
from fractions import Fraction
from itertools import pairwise

import pytest

from commengine import cost
from commengine.cost import Link, Machine, TransformerShape

MIB = 2**20
GPT3 = TransformerShape(layers=96, hidden=12288, heads=96, seq=2048, vocab=51200)
PAPER = {
    1.2: TransformerShape(40, 1536, 16, 1024, 51200),
    2.5: TransformerShape(54, 1920, 20, 1024, 51200),
    4.2: TransformerShape(64, 2304, 24, 1024, 51200),
    8.3: TransformerShape(72, 3072, 32, 1024, 51200),
}


# ---- collectives, against runs of the algorithms on exact fractions -------------------------------------------


class Run:
    """Ranks that hold slices as Counters of contributions; counts what is sent, and each step's largest message."""

    def __init__(self, ranks):
        self.ranks, self.sent, self.path, self.steps = ranks, Counter(), Fraction(0), 0
        self.slices = [[Counter({rank: 1}) for _ in range(ranks)] for rank in range(ranks)]  # [rank][slice]

    def step(self, messages, reduce):
        """messages: (from, to, indices of slices), all at once."""
        self.steps += 1
        copies = [
            (to, index, self.slices[source][index].copy()) for source, to, indices in messages for index in indices
        ]
        for source, _, indices in messages:
            self.sent[source] += Fraction(len(indices), self.ranks)
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
        assert found.sent_bytes == pytest.approx(float(max(self.sent.values())) * size)
        assert found.total_bytes == pytest.approx(float(sum(self.sent.values())) * size)


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
    found = cost.collective("broadcast", "ring", p, p)
    assert found.steps == run.steps and found.total_bytes == sum(run.sent.values()) * p
    assert found.sent_bytes == max(run.sent.values()) * p
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
    assert cost.best_algorithm("all_reduce", 8, 8, link)[0] == "recursive_doubling"
    assert cost.best_algorithm("all_reduce", 1e8, 8, link)[0] == "recursive_halving"
    assert cost.best_algorithm("all_reduce", 1e9, 6, link)[0] == "ring"


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
        assert cost.seconds_at_bus_bandwidth(operation, 100, 50 * factor, 4) == pytest.approx(2.0)
    # The bus bandwidth of a ring without latency is the link's.
    for operation in ("all_reduce", "reduce_scatter", "all_gather"):
        took = cost.collective(operation, "ring", 1e6, 6).seconds(Link(0, 1 / 7e9))
        assert cost.bus_bandwidth(operation, 1e6, took, 6) == pytest.approx(7e9)


def test_hierarchical_all_reduce():
    """32 nodes of 16 ranks and 8 adapters of 12 GB/s: between nodes all that counts is what leaves a node."""
    machine = Machine(Link(0, 1 / 120e9), Link(0, 1 / 12e9), ranks_per_node=16, nics_per_node=8)
    inside, between, after = cost.hierarchical_all_reduce(1.6e9, 16, 32, machine)
    assert inside.seconds == after.seconds == pytest.approx(15 / 16 * 1.6e9 / 120e9)
    assert between.seconds == pytest.approx(2 * 31 / 32 * 1.6e9 / (8 * 12e9))
    # 8 groups of 2 that run at once load the adapters as one group of 16 with 8 times the data.
    _, crowded, _ = cost.hierarchical_all_reduce(1.6e9, 2, 32, machine, groups_per_node=8)
    assert crowded.seconds == pytest.approx(8 * between.seconds)
    # More adapters than senders do not make one sender faster.
    _, lone, _ = cost.hierarchical_all_reduce(1.6e9, 1, 2, machine)
    assert lone.seconds == pytest.approx(1.6e9 / 12e9)
    only = cost.hierarchical_all_reduce(1e6, 8, 1, machine)
    ring = cost.collective("all_reduce", "ring", 1e6, 8).seconds(machine.inside)
    assert sum(phase.seconds for phase in only) == pytest.approx(ring)
    with pytest.raises(ValueError, match="do not fit nodes of 16"):
        cost.hierarchical_all_reduce(1, 4, 2, machine, groups_per_node=5)


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
        (lambda: cost.activation_bytes(GPT3, 1, recompute="some"), "one of none, selective, full"),
        (lambda: TransformerShape(1, 10, 3, 1, 1), "heads=3 does not divide hidden=10"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# ---- fitted models ----------------------------------------------------------------------------------------------


def segments(*rows):
    keys = ("ranks", "from_bytes", "alpha", "beta")
    return {"format": 1, "collectives": {"all_reduce": [dict(zip(keys, row, strict=True)) for row in rows]}}


def test_fitted_model_is_piecewise(tmp_path):
    data = segments((4, 1000, 5e-6, 1e-9), (2, 0, 1e-6, 1e-9), (4, 0, 2e-6, 4e-9))
    data["how"] = "measured somewhere"
    data["collectives"]["all_reduce"][0]["alpha_interval"] = [4e-6, 6e-6]
    path = tmp_path / "model.json"
    path.write_text(json.dumps(data))
    model = cost.FittedModel.load(path)
    assert model.seconds("all_reduce", 999, 4) == pytest.approx(2e-6 + 999 * 4e-9)
    assert model.seconds("all_reduce", 1000, 4) == pytest.approx(5e-6 + 1000e-9)
    assert model.seconds("all_reduce", 1000, 2) == pytest.approx(1e-6 + 1000e-9)
    assert model.seconds("all_reduce", 1000, 1) == 0
    # 8 ranks, from 4: a ring's steps, and the same bus bandwidth.
    assert model.seconds("all_reduce", 1e6, 8) == pytest.approx(5e-6 * 7 / 3 + 1e-3 * (7 / 4) / (6 / 4))
    assert cost.FittedModel.from_json(model.to_json()) == model


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], 'object with "collectives"'),
        ({"format": 2, "collectives": {}}, "format 2, this version reads 1"),
        ({"collectives": {"allreduce": []}}, "'allreduce': operations are all_reduce"),
        ({"collectives": {"reduce": []}}, "at least one"),
        ({"collectives": {"reduce": [{"ranks": 2}]}}, "has ranks, from_bytes, alpha and beta"),
        (segments((2, 0, -1, 0)), "0 or more"),
        (segments((2, 0, float("nan"), 0)), "0 or more"),
        (segments((1, 0, 0, 0)), "2 ranks or more"),
        (segments((2, 8, 0, 0)), "start at 0 bytes"),
        (segments((2, 0, 0, 0), (2, 0, 1, 0)), "different sizes"),
    ],
)
def test_damaged_model_is_named(data, message, tmp_path):
    (tmp_path / "model.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match=f"model.json: .*{message}"):
        cost.FittedModel.load(tmp_path / "model.json")


def test_model_not_fitted_to_an_operation_says_so():
    with pytest.raises(ValueError, match="not fitted to broadcast: it has all_reduce"):
        cost.FittedModel.from_json(segments((2, 0, 0, 0))).seconds("broadcast", 1, 2)


# ---- seeds: the paper ---------------------------------------------------------------------------------------


def test_paper_table_1():
    for billions, shape in PAPER.items():
        assert round(cost.parameters(shape) / 1e9, 1) == billions
        assert shape.hidden // shape.heads == 96
    assert 50257 <= 51200 == -(-50257 // (128 * 8)) * 128 * 8  # the smallest multiple of 1024


def test_paper_section_3_communication():
    """Two all-reduces forward and two backward a layer, whatever t; b s numbers for the loss instead of b s v."""
    for tensor in (2, 4, 8):
        run = cost.tensor_parallel_collectives(PAPER[8.3], 8, tensor)
        assert [(one.operation, one.count) for one in run[:2]] == [("all_reduce", 2 * 72)] * 2
        assert {one.size for one in run} == {8 * 1024 * 3072 * 2}
    scalars = cost.loss_collectives(PAPER[8.3], 8, 8)
    logits = cost.loss_collectives(PAPER[8.3], 8, 8, parallel=False)
    elements = scalars[0].size / 4
    assert elements == 8 * 1024 and logits[0].size / 2 / elements == 51200
    recomputed = cost.tensor_parallel_collectives(PAPER[8.3], 8, 8, recompute="full")
    assert sum(one.count for one in recomputed) == 6 * 72 + 2


def test_paper_headline_numbers():
    single = 39e12
    assert round(15.1e15 / 512 / single, 2) == 0.76
    assert round(single / 0.30) == 130e12  # "30% of the theoretical peak"
    # Which FLOPs the paper counts: with recomputation, the 15.1 PFLOP/s are Table 2's 2.10 days an epoch within 10%.
    step = 2.10 * 86400 / 68507
    shape = TransformerShape(72, 3072, 24, 1024, 51200)
    assert cost.model_flops(shape, 512, "full") / step == pytest.approx(15.1e15, rel=0.10)
    assert cost.model_flops(shape, 512) / step < 0.7 * 15.1e15


# ---- seeds: megatron-lm-explained ---------------------------------------------------------------------------


def test_explained_memory_wall():
    assert cost.parameter_bytes(8.3e9) == pytest.approx(133e9, rel=0.01)  # "about 133 GB", "four times" a V100's 32 GB
    assert cost.parameter_bytes(8.3e9) / 32e9 == pytest.approx(4, abs=0.2)
    assert cost.parameter_bytes(8.3e9) - 4 * 8.3e9 == pytest.approx(100e9, rel=0.01)  # optimizer and master copy alone
    assert cost.parameter_bytes(2e9) == 32e9  # "past roughly 2 billion parameters it crosses the ceiling"
    for billions, gpus in ((1.2, 1), (2.5, 2), (4.2, 4), (8.3, 8)):
        fits = next(t for t in (1, 2, 4, 8) if cost.parameter_bytes(billions * 1e9) / t <= 32e9)
        assert fits == gpus


def test_explained_shapes():
    """3072 x 12288 in columns of 1536, QKV of 3072 x 9216, 3 of 24 heads of 128, at t = 8."""
    assert (12288 // 8, 24 // 8, 3072 // 24, 3072 // 8) == (1536, 3, 128, 384)
    TransformerShape(72, 3072, 24, 1024, 51200).require_tensor_parallel(8)
    assert cost.layer_parameters(3072) == 3072 * (9216 + 3072 + 2 * 12288) + 9216 + 3072 + 12288 + 3072 + 4 * 3072


# ---- seeds: gptlite-tensor-parallelism ----------------------------------------------------------------------


def test_gptlite_reduce_scatter_and_all_gather_are_an_all_reduce():
    """Twice the collectives, as it says; the same bytes; and what is kept between blocks shrinks by t."""
    whole = cost.tensor_parallel_collectives(GPT3, 1, 8)
    split = cost.tensor_parallel_collectives(GPT3, 1, 8, sequence_parallel=True)
    layers = [one for one in split if "again" not in one.why]
    counts = [sum(one.count for one in run if one.count > 3) for run in (whole, layers)]
    assert counts[1] == 2 * counts[0]
    volumes = [cost.total_bytes_sent(one for one in run if one.count > 3) for run in (whole, layers)]
    assert volumes[0] == pytest.approx(volumes[1])
    kept = [cost.layer_activation_bytes(GPT3, 1, 8, sequence_parallel=sequence) for sequence in (False, True)]
    sbh = 2048 * 12288
    assert kept[0] - kept[1] == 10 * sbh * 7 / 8


# ---- seeds: tensor-parallelism-note -------------------------------------------------------------------------


def test_note_sizes():
    up = 12288 * 49152
    assert 2 * up == pytest.approx(1.2e9, rel=0.01)  # "in fp16 that single matrix is 1.2 GB"
    assert cost.parameter_bytes(up) == pytest.approx(9.6e9, rel=0.01)  # "with gradients and Adam states it is 9.6 GB"
    # "Stack 96 layers and you have ~900 GB of just-the-MLPs": that is the up-projections; an MLP has a second matrix.
    assert 96 * cost.parameter_bytes(up) == pytest.approx(900e9, rel=0.04)
    assert 96 * cost.parameter_bytes(2 * up) == pytest.approx(1.86e12, rel=0.01)
    assert 49152 // 8 == 6144 and 96 // 8 == 12
    # "12288 / 8 = 1536 features per head": 1536 are a GPU's, of 12 heads; a head has 128.
    assert 12288 // 8 == 1536 == 12 * (12288 // 96) and 12288 // 96 == 128


def test_note_communication():
    run = cost.tensor_parallel_collectives(GPT3, 1, 8)
    layers = [one for one in run if one.count > 2]
    size = layers[0].size
    assert size == pytest.approx(50e6, rel=0.01)  # "50 MB per all-reduce"
    reduced = sum(one.count * one.size for one in layers)
    assert reduced == pytest.approx(19.2e9, rel=0.01)  # "96 layers: 19.2 GB per step", 200 MB a layer
    assert reduced / 300e9 == pytest.approx(64e-3, rel=0.01)  # "at 300 GB/s NVLink: ~64 ms"
    assert reduced / 300e9 / 0.5 == pytest.approx(0.13, abs=0.005)
    # "sent" is what is reduced: a ring of 8 sends 2 * 7 / 8 times as much, and takes 113 ms at that rate.
    assert cost.total_bytes_sent(layers) / reduced == pytest.approx(1.75)
    assert cost.total_bytes_sent(layers) / 300e9 == pytest.approx(113e-3, rel=0.01)
    # "50 MB / 25 GB/s = 2 ms (vs 0.17 ms over NVLink)" is right, "per step: 200 ms" is not: there are 384 of them.
    assert size / 25e9 == pytest.approx(2e-3, rel=0.01) and size / 300e9 == pytest.approx(0.17e-3, rel=0.02)
    assert sum(one.count for one in layers) == 384
    assert reduced / 25e9 == pytest.approx(0.77, rel=0.01)
    assert reduced / 25e9 / 0.2 == pytest.approx(3.9, abs=0.1)


# ---- seeds: tensor-parallelism-from-linearity ---------------------------------------------------------------

EXERCISE = TransformerShape(layers=80, hidden=4096, heads=32, seq=2048, vocab=32000)
BATCH, P = 4, 8


def test_linearity_exercise_volume():
    """Exercise 2: b = 4, s = 2048, d = 4096, fp16, P = 8. Our copy of the text lacks its formulas, not its numbers."""
    run = cost.tensor_parallel_collectives(EXERCISE, BATCH, P)
    assert sum(one.count for one in run[:2]) == 4 * 80  # "4 AllReduce per layer total"
    assert run[0].size == 64 * MIB
    # "Per AllReduce 112 MB", by a ring; "224 MB" for the two of a layer's forward: MiB, as it counts.
    sent = cost.collective("all_reduce", "ring", run[0].size, P).sent_bytes
    assert sent == 112 * MIB
    assert cost.total_bytes_sent(run[:1]) / EXERCISE.layers == 224 * MIB


def test_linearity_exercise_ratio():
    first, second = 4 * BATCH * 2048 * 4096**2, 2 * BATCH * 2048**2 * 4096
    assert first == pytest.approx(5.50e11, rel=0.001) and second == pytest.approx(1.37e11, rel=0.005)
    # Its own two terms over 8 GPUs at 989 TFLOP/s take 86.9 us, not the 42.9 of its table (about the sparse peak's).
    assert (first + second) / P / 989e12 == pytest.approx(86.9e-6, rel=0.001)
    assert (first + second) / P / (2 * 989e12) == pytest.approx(43.4e-6, rel=0.001)
    claimed = 2.24e8 / 900e9
    assert claimed == pytest.approx(249e-6, rel=0.001)  # "249 us", of 224 MB; its 224 are MiB: 261 us
    assert round(42.9e-6 / claimed, 2) == 0.17  # "R 0.17"
    # The terms are a sixth and a half of a layer's products: 24 b s d^2 + 4 b s^2 d.
    layer = cost.model_flops(EXERCISE, BATCH) / 3 - 2 * BATCH * 2048 * 4096 * 32000
    assert layer / 80 == pytest.approx(6 * first + 2 * second)
    # Put right, a layer computes 451 us and sends 261: compute-bound, not "3x more time communicating".
    compute = layer / 80 / P / 989e12
    sending = cost.seconds_at_bus_bandwidth("all_reduce", 2 * 64 * MIB, 900e9, P)
    assert (compute, sending) == (pytest.approx(451e-6, rel=0.01), pytest.approx(261e-6, rel=0.01))
    # "TP = 4 doubles R, TP = 2 (R 0.68)": compute does, but a ring sends less too, so R grows by 7/3 and by 7.
    for tensor, times in ((4, 7 / 3), (2, 7)):
        shrunk = cost.seconds_at_bus_bandwidth("all_reduce", 2 * 64 * MIB, 900e9, tensor)
        assert (P / tensor) / (shrunk / sending) == pytest.approx(times)


def test_linearity_ratio_of_an_h100():
    """The text: "For P = 8: R = 0.23 - communication-bound!", d = 8192, 989 TFLOP/s, 900 GB/s, s << d."""
    shape = TransformerShape(layers=1, hidden=8192, heads=64, seq=16, vocab=1)
    flops = cost.model_flops(shape, 1) / 3
    assert flops == pytest.approx(24 * 16 * 8192**2, rel=0.001)
    sending = 8 * 16 * 8192 / 900e9  # "for large P": two all-reduces of 2 b s d bytes, each sent twice
    by_ring = cost.seconds_at_bus_bandwidth("all_reduce", 2 * 2 * 16 * 8192, 900e9, 8)
    assert by_ring / sending == pytest.approx(7 / 8)
    # Its 0.23 is a sixth of a layer's products, at the sparse peak as in the exercise; of all, at the dense peak, 2.8.
    assert flops / 6 / 8 / (2 * 989e12) / sending == pytest.approx(0.23, abs=0.005)
    assert flops / 8 / 989e12 / sending == pytest.approx(2.8, abs=0.005)


def test_linearity_layernorm_statistics():
    statistics, activation = 8 * BATCH * 2048, 4 * BATCH * 2048 * 4096
    assert statistics == 64 * 2**10  # "64 KB": two fp32 sums a token
    # "8bsd = 128 MB": 128 MiB are 4bsd (fp32), 8bsd would be 256; the ratio, "2000x", is of the former.
    assert activation == 128 * MIB and 8 * BATCH * 2048 * 4096 == 256 * MIB
    assert activation / statistics == 2048


def test_linearity_head_constraints():
    with pytest.raises(ValueError, match="tensor-parallel size 6 does not divide heads=32"):
        EXERCISE.require_tensor_parallel(6)
    for tensor in (1, 2, 4, 8, 16, 32):
        EXERCISE.require_tensor_parallel(tensor)
    assert divmod(32, 6) == (5, 2)  # "some GPUs would have 5 heads, others 6"; padded to 36: "12.5% overhead"
    padded = TransformerShape(layers=80, hidden=36 * 128, heads=36, seq=2048, vocab=32004)
    padded.require_tensor_parallel(6)
    assert padded.heads / 32 - 1 == 0.125
    valid = [t for t in range(1, 97) if 96 % t == 0]
    assert [t for t in valid if t != 96] == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48]  # its list for GPT-3 leaves out 96


# ---- a step, part by part ----------------------------------------------------------------------------------


def test_parts_of_a_step():
    """What is recomputed, what a joined loss saves, and what bucketing leaves as it is."""
    layers = GPT3.layers
    for sequence in (False, True):
        run = cost.tensor_parallel_collectives(GPT3, 1, 8, recompute="full", sequence_parallel=sequence)
        again, forward = (
            sorted((one.operation, one.count, one.size) for one in run if (one.part, one.phase) == ("layers", phase))
            for phase in ("recompute", "forward")
        )
        assert again == forward
        early = cost.tensor_parallel_collectives(
            GPT3, 1, 8, recompute="full", sequence_parallel=sequence, stops_early=True
        )
        reduced = [one.count for one in early if one.phase == "recompute" and one.operation != "all_gather"]
        assert reduced == [layers]
        assert sum(one.count for one in run) - sum(one.count for one in early) == layers
    assert cost.tensor_parallel_collectives(GPT3, 1, 8, stops_early=True) == cost.tensor_parallel_collectives(
        GPT3, 1, 8
    )

    apart, together = (cost.loss_collectives(GPT3, 1, 8, together=joined) for joined in (False, True))
    assert cost.total_bytes_sent(apart) == cost.total_bytes_sent(together)
    assert [sum(one.count for one in run) for run in (apart, together)] == [3, 2]

    whole = cost.data_parallel_collectives(6e6, 4, zero1=True)
    parts = cost.data_parallel_collectives(6e6, 4, zero1=True, buckets=[1e6, 3e6, 2e6])
    assert cost.total_bytes_sent(parts) == cost.total_bytes_sent(whole) and len(parts) == 6
    assert {one.part for one in parts} == {"gradients", "optimizer"}

    assert cost.sequence_parallel_collectives(100, 1) == cost.sequence_parallel_collectives(0, 8) == []
    assert cost.sequence_parallel_collectives(100, 8)[0].size == 400
    for tensor, data in ((1, 1), (1, 2), (2, 1), (2, 2)):
        found = cost.scalar_collectives(tensor, data, zero1=True, fp16=True)
        assert len(found) == 2 * (tensor > 1) + 4 * (data > 1)


def test_parameter_by_parameter():
    for shape in (*PAPER.values(), GPT3):
        for tensor in (1, 2, 8):
            sizes = cost.parameter_sizes(shape, tensor)
            assert sum(size for _, size in sizes) == cost.parameters(shape, tensor)
            assert len(sizes) == 4 + 12 * shape.layers
    layer = {name: size for name, size in cost.parameter_sizes(GPT3, mlp=100) if name.startswith("layers.0.")}
    assert sum(layer.values()) == cost.layer_parameters(GPT3.hidden, 100)
    positions = dict(cost.parameter_sizes(GPT3, 8, positions=5))["position_embedding"]
    assert positions == 5 * GPT3.hidden


# ---- memory and volumes of the literature ------------------------------------------------------------------


def test_activation_memory_of_korthikanti():
    """2022, Table 2, sections 4 and 5: 5 a s / h is 80 for GPT-3, 64 for MT-NLG; without it 70% and 65% are saved."""
    sbh = 2048 * 12288
    assert cost.layer_activation_bytes(GPT3, 1) == sbh * (34 + 80)
    assert cost.layer_activation_bytes(GPT3, 1, 8) == sbh * (10 + 24 / 8 + 80 / 8)
    assert cost.layer_activation_bytes(GPT3, 1, 8, sequence_parallel=True) == sbh / 8 * (34 + 80)
    assert cost.layer_activation_bytes(GPT3, 1, 8, recompute="full") == 2 * sbh
    nlg = TransformerShape(105, 20480, 128, 2048, 51200)
    for shape, saved in ((GPT3, 0.70), (nlg, 0.65)):
        both = [
            cost.layer_activation_bytes(shape, 1, 8, recompute=how, sequence_parallel=True)
            for how in ("none", "selective")
        ]
        assert 1 - both[1] / both[0] == pytest.approx(saved, abs=0.005)
    assert cost.activation_bytes(GPT3, 1) == 96 * sbh * 114 + 5 * sbh + 4 * 2048 * 51200
    ends = 5 * sbh + 4 * 2048 * 51200
    assert cost.activation_bytes(GPT3, 1, recompute="full") == 96 * 2 * sbh + ends + 114 * sbh
    assert cost.activation_bytes(GPT3, 1, recompute="selective") == 96 * 34 * sbh + ends + 80 * sbh
    assert cost.activation_bytes(GPT3, 1, fused_attention=True) == 96 * 34 * sbh + ends


def test_flops_of_narayanan():
    """2021: 96 B s l h^2 (1 + s / 6h + V / 16lh) with recomputation; 72 of 96 without, but for the logits."""
    h, layers = 12288, 96
    expected = 96 * 1536 * 2048 * layers * h**2 * (1 + 2048 / (6 * h) + 51200 / (16 * layers * h))
    assert cost.model_flops(GPT3, 1536, "full") == pytest.approx(expected)
    without = 72 * 1536 * 2048 * layers * h**2 * (1 + 2048 / (6 * h) + 51200 / (12 * layers * h))
    assert cost.model_flops(GPT3, 1536) == pytest.approx(without)
    amounts = [cost.model_flops(GPT3, 1, how) for how in ("none", "selective", "full")]
    assert all(a < b for a, b in pairwise(amounts))


def test_gradients_and_zero_1():
    """Rajbhandari et al. 2020, section 7: ZeRO-1 moves what data parallelism moves, and keeps 4 + 12 / d bytes."""
    plain = cost.data_parallel_collectives(1e9, 64)
    zero = cost.data_parallel_collectives(1e9, 64, zero1=True)
    assert (
        cost.total_bytes_sent(plain) == pytest.approx(cost.total_bytes_sent(zero)) == pytest.approx(2 * 63 / 64 * 2e9)
    )
    assert cost.parameter_bytes(7.5e9) == 120e9  # its Figure 1: 7.5 billion parameters
    assert cost.parameter_bytes(7.5e9, zero1_ranks=64) == pytest.approx(31.4e9, rel=0.002)
    assert cost.data_parallel_collectives(1e9, 1) == []
