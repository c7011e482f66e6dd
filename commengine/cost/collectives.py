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
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Link:
    """The costs of a message. alpha: seconds per message; beta: seconds per byte; gamma: seconds per byte reduced."""

    alpha: float
    beta: float
    gamma: float = 0.0

    def __post_init__(self) -> None:
        if not all(math.isfinite(x) and x >= 0 for x in (self.alpha, self.beta, self.gamma)):
            raise ValueError(f"{self}: alpha, beta and gamma must be finite numbers of seconds, 0 or more")


@dataclass(frozen=True)
class Machine:
    """A cluster: each node has ``ranks_per_node`` ranks, which share the node's ``nics_per_node`` network adapters.

    inside: the link from a rank to another rank of its node. between: the link from one adapter to an adapter of
    another node.
    """

    inside: Link
    between: Link
    ranks_per_node: int
    nics_per_node: int

    def __post_init__(self) -> None:
        if self.ranks_per_node < 1 or self.nics_per_node < 1:
            raise ValueError("a node has at least one rank and one network adapter")

    def between_for(self, sending: int) -> Link:
        """Return the link between nodes as each rank sees it when ``sending`` ranks of a node send at once."""
        return replace(self.between, beta=self.between.beta * max(1.0, sending / self.nics_per_node))


@dataclass(frozen=True)
class Cost:
    """An algorithm's cost in messages and bytes.

    steps: number of messages one after another on the critical path. path_bytes: their bytes. reduced_bytes: bytes
    reduced on the critical path.
    """

    steps: float
    path_bytes: float
    reduced_bytes: float

    def seconds(self, link: Link) -> float:
        """Return the time in seconds on a machine in which every pair of ranks is joined by ``link``."""
        return self.steps * link.alpha + self.path_bytes * link.beta + self.reduced_bytes * link.gamma


def _log2(ranks: int, operation: str) -> int:
    if ranks & (ranks - 1):
        raise ValueError(f"{operation} by recursive doubling or halving needs a power of two of ranks, not {ranks}")
    return ranks.bit_length() - 1


def _depth(ranks: int) -> int:
    """The depth of a binomial tree."""
    return math.ceil(math.log2(ranks))


def _doubling_all_reduce(n: float, p: int) -> Cost:
    """[T] section 4.5. Ranks beyond a power of two give their data to a neighbour first, and get the sum at the end."""
    rounds = p.bit_length() - 1
    if p == 1 << rounds:
        return Cost(rounds, n * rounds, n * rounds)
    return Cost(rounds + 2, n * (rounds + 2), n * (rounds + 1))


#: The formulas: by operation and algorithm, of the size n and the ranks p. In an algorithm named "direct" all messages
#: of a rank travel at once, so their latencies count once.
ALGORITHMS: dict[str, dict[str, Callable[[float, int], Cost]]] = {
    "all_reduce": {
        # [P]; [T] section 4.5: a ring reduce-scatter and a ring all-gather
        "ring": lambda n, p: Cost(2 * (p - 1), 2 * n * (p - 1) / p, n * (p - 1) / p),
        "recursive_doubling": _doubling_all_reduce,
        # [T] section 4.5, Rabenseifner: recursive halving reduce-scatter, recursive doubling all-gather
        "recursive_halving": lambda n, p: Cost(2 * _log2(p, "all_reduce"), 2 * n * (p - 1) / p, n * (p - 1) / p),
        # [C], short vectors: a binomial reduce to one rank and a binomial broadcast from it
        "tree": lambda n, p: Cost(2 * _depth(p), 2 * n * _depth(p), n * _depth(p)),
        # every rank sends slice i to rank i, which sends the sum to all ranks
        "direct": lambda n, p: Cost(2, 2 * n * (p - 1) / p, n * (p - 1) / p),
    },
    "reduce_scatter": {
        # [C], bucket algorithm; [P]
        "ring": lambda n, p: Cost(p - 1, n * (p - 1) / p, n * (p - 1) / p),
        # [T] section 4.4
        "recursive_halving": lambda n, p: Cost(_log2(p, "reduce_scatter"), n * (p - 1) / p, n * (p - 1) / p),
        # [C], short vectors: a binomial reduce and a binomial scatter
        "tree": lambda n, p: Cost(2 * _depth(p), n * _depth(p) + n * (p - 1) / p, n * _depth(p)),
        # every rank sends slice i to rank i: pairwise exchange ([T] section 4.4)
        "direct": lambda n, p: Cost(1, n * (p - 1) / p, n * (p - 1) / p),
    },
    "all_gather": {
        # [T] section 4.1; [C], bucket algorithm
        "ring": lambda n, p: Cost(p - 1, n * (p - 1) / p, 0),
        # [T] section 4.1
        "recursive_doubling": lambda n, p: Cost(_log2(p, "all_gather"), n * (p - 1) / p, 0),
        # [C], short vectors: a binomial gather and a binomial broadcast
        "tree": lambda n, p: Cost(2 * _depth(p), n * (p - 1) / p + n * _depth(p), 0),
        "direct": lambda n, p: Cost(1, n * (p - 1) / p, 0),
    },
    "broadcast": {
        # [T] section 4.2, van de Geijn: a binomial scatter and a ring all-gather
        "ring": lambda n, p: Cost(_depth(p) + p - 1, 2 * n * (p - 1) / p, 0),
        # [T] section 4.2; [C], minimum spanning tree
        "tree": lambda n, p: Cost(_depth(p), n * _depth(p), 0),
        "direct": lambda n, p: Cost(1, n * (p - 1), 0),
    },
    "reduce": {
        # [T] section 4.5, Rabenseifner, with a ring: a ring reduce-scatter and a binomial gather
        "ring": lambda n, p: Cost(_depth(p) + p - 1, 2 * n * (p - 1) / p, n * (p - 1) / p),
        # [T] section 4.5; [C], minimum spanning tree
        "tree": lambda n, p: Cost(_depth(p), n * _depth(p), n * _depth(p)),
        # the root receives and reduces the messages one after another
        "direct": lambda n, p: Cost(1, n * (p - 1), n * (p - 1)),
    },
    "all_to_all": {
        # [T] section 4.3: pairwise exchange, one partner after another
        "ring": lambda n, p: Cost(p - 1, n * (p - 1) / p, 0),
        # [T] section 4.3: Bruck's algorithm, half of the buffer in each of lg p steps
        "recursive_doubling": lambda n, p: Cost(_log2(p, "all_to_all"), n / 2 * _log2(p, "all_to_all"), 0),
        "direct": lambda n, p: Cost(1, n * (p - 1) / p, 0),
    },
    "p2p": {"direct": lambda n, p: Cost(1, n, 0)},
}

#: the operations that have formulas; "p2p" is one message from a rank to another
OPERATIONS = tuple(ALGORITHMS)


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
        return Cost(0, 0, 0)
    return table[algorithm](size, ranks)


def bus_factor(operation: str, ranks: int) -> float:
    """Return the factor from algorithm bandwidth to bus bandwidth [N]."""
    _check(operation, 0, ranks)
    if operation in ("broadcast", "reduce", "p2p"):
        return 1.0
    return (2 if operation == "all_reduce" else 1) * (ranks - 1) / ranks


def bus_bandwidth(operation: str, size: float, seconds: float, ranks: int) -> float:
    """Return the bus bandwidth in bytes per second. It compares with the hardware's for any number of ranks [N].

    It is ``size`` over the time, multiplied by `bus_factor`. Raises ValueError for a time that is not above 0.
    """
    if not seconds > 0:
        raise ValueError(f"a bandwidth needs a time above 0, not {seconds}")
    return size / seconds * bus_factor(operation, ranks)


def _check(operation: str, size: float, ranks: int) -> None:
    if operation not in OPERATIONS:
        raise ValueError(f"no operation {operation!r}: there are {', '.join(OPERATIONS)}")
    if not size >= 0 or not math.isfinite(size):
        raise ValueError(f"{operation}: a size is a number of bytes, 0 or more, not {size}")
    if ranks < 1:
        raise ValueError(f"{operation}: at least one rank, not {ranks}")
