"""Alpha-beta-gamma formulas of collectives, and bandwidths as nccl-tests defines them.

A message of n bytes takes alpha + n beta seconds, and reducing n bytes takes n gamma. A rank can send and receive at
the same time, one message each (Thakur, Rabenseifner & Gropp 2005, section 3). Sources of the formulas:

    [T] Thakur, Rabenseifner & Gropp, Optimization of Collective Communication Operations in MPICH, IJHPCA 19(1), 2005
    [P] Patarasuk & Yuan, Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations, JPDC 69(2), 2009
    [C] Chan, Heimlich, Purkayastha & van de Geijn, Collective Communication: Theory, Practice, and Experience, 2007
    [N] NVIDIA nccl-tests, doc/PERFORMANCE.md
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from commengine.operations import FORMULAS

#: the operations that have formulas; "p2p" is one message from a rank to another
OPERATIONS = FORMULAS


@dataclass(frozen=True)
class Link:
    """The costs of a message. alpha: seconds per message; beta: seconds per byte; gamma: seconds per byte reduced."""

    alpha: float
    beta: float
    gamma: float = 0.0

    def __post_init__(self) -> None:
        if not all(math.isfinite(x) and x >= 0 for x in (self.alpha, self.beta, self.gamma)):
            raise ValueError(f"{self}: alpha, beta and gamma must be finite numbers of seconds, 0 or more")

    def shared(self, ranks: float) -> Link:
        """Return the link as each of ``ranks`` ranks sees it when all of them send at once. It is never faster."""
        return Link(self.alpha, self.beta * max(1.0, ranks), self.gamma)


@dataclass(frozen=True)
class Cost:
    """An algorithm's cost in messages and bytes.

    steps: number of messages one after another on the critical path. path_bytes: their bytes. reduced_bytes: bytes
    reduced on the critical path. sent_bytes: bytes sent by the rank that sends most. total_bytes: bytes sent by all
    ranks.
    """

    steps: float
    path_bytes: float
    reduced_bytes: float
    sent_bytes: float
    total_bytes: float

    def seconds(self, link: Link) -> float:
        """Return the time in seconds on a machine in which every pair of ranks is joined by ``link``."""
        return self.steps * link.alpha + self.path_bytes * link.beta + self.reduced_bytes * link.gamma


def _even(steps: float, sent: float, reduced: float, ranks: int) -> Cost:
    """Return the cost of an algorithm in which every rank sends the same number of bytes."""
    return Cost(steps, sent, reduced, sent, ranks * sent)


def _log2(ranks: int, operation: str) -> int:
    if ranks & (ranks - 1):
        raise ValueError(f"{operation} by recursive doubling or halving needs a power of two of ranks, not {ranks}")
    return ranks.bit_length() - 1


def _ring_all_reduce(n: float, p: int) -> Cost:
    """[P]; [T] section 4.5: a ring reduce-scatter and a ring all-gather."""
    return _even(2 * (p - 1), 2 * n * (p - 1) / p, n * (p - 1) / p, p)


def _doubling_all_reduce(n: float, p: int) -> Cost:
    """[T] section 4.5. Ranks beyond a power of two give their data to a neighbour first, and get the sum at the end."""
    rounds = p.bit_length() - 1
    extra = p - (1 << rounds)
    steps, total = rounds, n * rounds * (1 << rounds)
    if not extra:
        return Cost(steps, n * rounds, n * rounds, n * rounds, total)
    return Cost(steps + 2, n * (rounds + 2), n * (rounds + 1), n * (rounds + 1), total + 2 * n * extra)


def _halving_all_reduce(n: float, p: int) -> Cost:
    """[T] section 4.5, Rabenseifner: recursive halving reduce-scatter, recursive doubling all-gather."""
    return _even(2 * _log2(p, "all_reduce"), 2 * n * (p - 1) / p, n * (p - 1) / p, p)


def _tree_all_reduce(n: float, p: int) -> Cost:
    """[C], short vectors: a binomial reduce to one rank and a binomial broadcast from it."""
    depth = math.ceil(math.log2(p))
    # The root sends in the broadcast only; of the others, the busiest sends its partial sum and depth - 1 copies.
    return Cost(2 * depth, 2 * n * depth, n * depth, n * depth, 2 * n * (p - 1))


def _direct_all_reduce(n: float, p: int) -> Cost:
    """Every rank sends slice i to rank i, which sends the sum to all ranks.

    There are two latencies, because p - 1 messages travel at once.
    """
    return _even(2, 2 * n * (p - 1) / p, n * (p - 1) / p, p)


def _ring_reduce_scatter(n: float, p: int) -> Cost:
    """[C], bucket algorithm; [P]."""
    return _even(p - 1, n * (p - 1) / p, n * (p - 1) / p, p)


def _halving_reduce_scatter(n: float, p: int) -> Cost:
    """[T] section 4.4: recursive halving."""
    return _even(_log2(p, "reduce_scatter"), n * (p - 1) / p, n * (p - 1) / p, p)


def _tree_reduce_scatter(n: float, p: int) -> Cost:
    """[C], short vectors: a binomial reduce and a binomial scatter."""
    depth = math.ceil(math.log2(p))
    sent = n + n / p * (_largest_subtree(p) - 1)  # its partial sum, and the parts that it passes on to its subtree
    return Cost(2 * depth, n * depth + n * (p - 1) / p, n * depth, sent, n * (p - 1) + _scattered(n, p))


def _direct_reduce_scatter(n: float, p: int) -> Cost:
    """Every rank sends slice i to rank i at once: pairwise exchange ([T] section 4.4) with its latencies overlapped."""
    return _even(1, n * (p - 1) / p, n * (p - 1) / p, p)


def _ring_all_gather(n: float, p: int) -> Cost:
    """[T] section 4.1; [C], bucket algorithm."""
    return _even(p - 1, n * (p - 1) / p, 0, p)


def _doubling_all_gather(n: float, p: int) -> Cost:
    """[T] section 4.1: recursive doubling."""
    return _even(_log2(p, "all_gather"), n * (p - 1) / p, 0, p)


def _tree_all_gather(n: float, p: int) -> Cost:
    """[C], short vectors: a binomial gather and a binomial broadcast."""
    depth = math.ceil(math.log2(p))
    return Cost(2 * depth, n * (p - 1) / p + n * depth, 0, n * depth, n * (p - 1) + _scattered(n, p))


def _direct_all_gather(n: float, p: int) -> Cost:
    """Every rank sends its slice to all ranks at once."""
    return _even(1, n * (p - 1) / p, 0, p)


def _tree_broadcast(n: float, p: int) -> Cost:
    """[T] section 4.2; [C], minimum spanning tree."""
    depth = math.ceil(math.log2(p))
    return Cost(depth, n * depth, 0, n * depth, n * (p - 1))


def _ring_broadcast(n: float, p: int) -> Cost:
    """[T] section 4.2, van de Geijn: a binomial scatter and a ring all-gather."""
    depth = math.ceil(math.log2(p))
    sent = 2 * n * (p - 1) / p  # the root
    return Cost(depth + p - 1, sent, 0, sent, n * (p - 1) + _scattered(n, p))


def _direct_broadcast(n: float, p: int) -> Cost:
    """The root sends to all ranks at once."""
    return Cost(1, n * (p - 1), 0, n * (p - 1), n * (p - 1))


def _tree_reduce(n: float, p: int) -> Cost:
    """[T] section 4.5; [C], minimum spanning tree."""
    depth = math.ceil(math.log2(p))
    return Cost(depth, n * depth, n * depth, n, n * (p - 1))


def _ring_reduce(n: float, p: int) -> Cost:
    """[T] section 4.5, Rabenseifner, with a ring: a ring reduce-scatter and a binomial gather."""
    depth = math.ceil(math.log2(p))
    sent = n * (p - 1) / p + n / p * _largest_subtree(p)
    return Cost(depth + p - 1, 2 * n * (p - 1) / p, n * (p - 1) / p, sent, n * (p - 1) + _scattered(n, p))


def _direct_reduce(n: float, p: int) -> Cost:
    """All ranks send to the root at once. The root receives and reduces the messages one after another."""
    return Cost(1, n * (p - 1), n * (p - 1), n, n * (p - 1))


def _ring_all_to_all(n: float, p: int) -> Cost:
    """[T] section 4.3: pairwise exchange, one partner after another."""
    return _even(p - 1, n * (p - 1) / p, 0, p)


def _doubling_all_to_all(n: float, p: int) -> Cost:
    """[T] section 4.3: Bruck's algorithm, half of the buffer in each of lg p steps."""
    rounds = _log2(p, "all_to_all")
    return _even(rounds, n / 2 * rounds, 0, p)


def _direct_all_to_all(n: float, p: int) -> Cost:
    """Every rank sends to all ranks at once."""
    return _even(1, n * (p - 1) / p, 0, p)


def _direct_p2p(n: float, p: int) -> Cost:
    """One message, alpha + n beta, between two of the ranks."""
    return Cost(1, n, 0, n, n)


def _scattered(n: float, p: int) -> float:
    """Return the bytes of a binomial scatter or gather of n bytes: a slice crosses an edge for each bit of its rank."""
    return n / p * sum(rank.bit_count() for rank in range(p))


def _largest_subtree(p: int) -> int:
    """Return the size of the largest subtree of a binomial tree's root. A parent is a rank without its lowest bit."""
    return max(min(rank & -rank, p - rank) for rank in range(1, p))


ALGORITHMS: dict[str, dict[str, Callable[[float, int], Cost]]] = {
    "all_reduce": {
        "ring": _ring_all_reduce,
        "recursive_doubling": _doubling_all_reduce,
        "recursive_halving": _halving_all_reduce,
        "tree": _tree_all_reduce,
        "direct": _direct_all_reduce,
    },
    "reduce_scatter": {
        "ring": _ring_reduce_scatter,
        "recursive_halving": _halving_reduce_scatter,
        "tree": _tree_reduce_scatter,
        "direct": _direct_reduce_scatter,
    },
    "all_gather": {
        "ring": _ring_all_gather,
        "recursive_doubling": _doubling_all_gather,
        "tree": _tree_all_gather,
        "direct": _direct_all_gather,
    },
    "broadcast": {"ring": _ring_broadcast, "tree": _tree_broadcast, "direct": _direct_broadcast},
    "reduce": {"ring": _ring_reduce, "tree": _tree_reduce, "direct": _direct_reduce},
    "all_to_all": {
        "ring": _ring_all_to_all,
        "recursive_doubling": _doubling_all_to_all,
        "direct": _direct_all_to_all,
    },
    "p2p": {"direct": _direct_p2p},
}


def collective(operation: str, algorithm: str, size: float, ranks: int) -> Cost:
    """Return the cost of one collective of ``size`` bytes (see the package) among ``ranks``; zero for one rank.

    operation: one of OPERATIONS; algorithm: one of ``ALGORITHMS[operation]``. Raises ValueError for anything else, and
    for recursive algorithms on a number of ranks that is not a power of two. The exception is all_reduce by
    recursive_doubling, which takes any number of ranks.
    """
    _check(operation, size, ranks)
    table = ALGORITHMS[operation]
    if algorithm not in table:
        raise ValueError(f"{operation} has no algorithm {algorithm!r}: there are {', '.join(table)}")
    if ranks == 1:
        return Cost(0, 0, 0, 0, 0)
    return table[algorithm](size, ranks)


def best_algorithm(operation: str, size: float, ranks: int, link: Link) -> tuple[str, float]:
    """Return the algorithm whose formula gives the shortest time on ``link``, and that time in seconds.

    The algorithm ``direct`` is considered for p2p only. Its formula assumes a fully connected network whose latencies
    overlap, and alpha and beta cannot tell whether that holds.
    """
    _check(operation, size, ranks)
    found: dict[str, float] = {}
    for name in ALGORITHMS[operation]:
        recursive = name.startswith("recursive") and (operation, name) != ("all_reduce", "recursive_doubling")
        if (name == "direct" and operation != "p2p") or (recursive and ranks & (ranks - 1)):
            continue
        found[name] = collective(operation, name, size, ranks).seconds(link)
    fastest = min(found, key=lambda name: found[name])
    return fastest, found[fastest]


def bus_factor(operation: str, ranks: int) -> float:
    """Return the factor from algorithm bandwidth to bus bandwidth [N]."""
    _check(operation, 0, ranks)
    if operation == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if operation in ("reduce_scatter", "all_gather", "all_to_all"):
        return (ranks - 1) / ranks
    if operation in ("broadcast", "reduce", "p2p"):
        return 1.0
    raise ValueError(f"{operation} has no bus factor")


def algorithm_bandwidth(size: float, seconds: float) -> float:
    """Return the algorithm bandwidth in bytes per second: ``size`` over time [N]."""
    if not seconds > 0:
        raise ValueError(f"a bandwidth needs a time above 0, not {seconds}")
    return size / seconds


def bus_bandwidth(operation: str, size: float, seconds: float, ranks: int) -> float:
    """Return the bus bandwidth in bytes per second. It compares with the hardware's for any number of ranks [N]."""
    return algorithm_bandwidth(size, seconds) * bus_factor(operation, ranks)


def seconds_at_bus_bandwidth(operation: str, size: float, bandwidth: float, ranks: int) -> float:
    """Return the time in seconds of a collective that reaches ``bandwidth``, a bus bandwidth in bytes per second."""
    if not bandwidth > 0:
        raise ValueError(f"a bus bandwidth is above 0, not {bandwidth}")
    return size * bus_factor(operation, ranks) / bandwidth


def _check(operation: str, size: float, ranks: int) -> None:
    if operation not in OPERATIONS:
        raise ValueError(f"no operation {operation!r}: there are {', '.join(OPERATIONS)}")
    if not size >= 0 or not math.isfinite(size):
        raise ValueError(f"{operation}: a size is a number of bytes, 0 or more, not {size}")
    if ranks < 1:
        raise ValueError(f"{operation}: at least one rank, not {ranks}")
