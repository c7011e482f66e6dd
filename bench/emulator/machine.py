"""A cluster whose properties are drawn: nothing but the emulator may read them."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Wire:
    """A link. alpha: seconds of a message without bytes. beta: seconds of a byte.

    No `commengine.cost.Link`, whose import is torch's, too: the network process would start seconds later.
    """

    alpha: float
    beta: float


@dataclass(frozen=True)
class EmulatedMachine:
    """Nodes of ranks, and what their work and their messages take, in seconds of the emulated cluster.

    flops, memory_rate: of a device, for its largest matrix products and for plain kernels, in 1/s. half_flops: the
    FLOPs of a product that reaches half of this rate. launch: of a kernel. speed: by rank, the factor on the times of
    its kernels. noise: the relative deviation of a kernel's time. inside, between: a link inside a node, and between
    the adapters of two nodes; slow: by node, the factor on its adapter's beta. contention: the relative time that a
    message takes longer if it had to wait for its adapter. jitter: the relative deviation of alpha. short: messages of
    fewer bytes go along trees instead of rings. two_levels: long all-reduces between nodes are reduced inside each node
    first.
    """

    name: str
    nodes: int
    ranks_per_node: int
    flops: float
    half_flops: float
    memory_rate: float
    launch: float
    speed: tuple[float, ...]
    noise: float
    inside: Wire
    between: Wire
    slow: tuple[float, ...]
    contention: float
    jitter: float
    short: int
    two_levels: bool = False

    @property
    def ranks(self) -> int:
        """The ranks of all nodes."""
        return self.nodes * self.ranks_per_node

    def node(self, rank: int) -> int:
        """The node of a rank."""
        return rank // self.ranks_per_node

    @staticmethod
    def drawn(seed: int, nodes: int, ranks_per_node: int) -> EmulatedMachine:
        """The machine of a seed. Devices and links are between those of a workstation and of a DGX."""
        draw = random.Random(seed)

        def between(low: float, high: float) -> float:
            """A number between two, evenly in its logarithm."""
            return float(low * (high / low) ** draw.random())

        ranks = nodes * ranks_per_node
        return EmulatedMachine(
            name=f"drawn-{seed}",
            nodes=nodes,
            ranks_per_node=ranks_per_node,
            flops=between(5e12, 50e12),
            half_flops=between(2e7, 2e8),
            memory_rate=between(200e9, 1000e9),
            launch=between(2e-6, 8e-6),
            speed=tuple(draw.gauss(1.0, 0.02) for _ in range(ranks)),
            noise=between(0.005, 0.03),
            inside=Wire(between(3e-6, 15e-6), 1 / between(10e9, 80e9)),
            between=Wire(between(10e-6, 60e-6), 1 / between(2e9, 12e9)),
            slow=tuple(between(1.0, 1.3) for _ in range(nodes)),
            contention=between(0.02, 0.15),
            jitter=between(0.02, 0.2),
            short=int(between(8e3, 64e3)),
        )

    def varied(self, slower: float = 1.0, two_levels: bool = False) -> EmulatedMachine:
        """The same machine with another network between its nodes: ``slower`` times in alpha and beta."""
        between = Wire(slower * self.between.alpha, slower * self.between.beta)
        return replace(self, between=between, two_levels=two_levels)

    def part(self, nodes: int) -> EmulatedMachine:
        """The first nodes alone, as a job gets them."""
        ranks = nodes * self.ranks_per_node
        return replace(self, nodes=nodes, speed=self.speed[:ranks], slow=self.slow[:nodes])

    def save(self, path: Path) -> None:
        """Write the machine as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1))

    @staticmethod
    def load(path: Path) -> EmulatedMachine:
        """The machine in a file."""
        data: dict[str, Any] = json.loads(path.read_text())
        data |= {name: Wire(**data[name]) for name in ("inside", "between")}
        fields: dict[str, Any] = {name: tuple(one) if isinstance(one, list) else one for name, one in data.items()}
        return EmulatedMachine(**fields)
