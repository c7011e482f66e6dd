"""The time that one device computes: matrix products by their shape, and kernels that only move memory.

A GEMM of M x N x K is cut into output tiles, one at a time on each unit (SM), in waves. A last wave that is not full,
and a tile that hangs over the edge, cost as much as full ones (NVIDIA, Matrix Multiplication Background, section 3). A
tile reads its operands from the last cache, whose rate bounds small tiles. It starts with a read from memory and ends
with the write of its result, and multiplies nothing meanwhile, so a short K costs most. The traffic to memory is a
lower bound of the whole.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field

from bench.clusters.cluster import Device


@dataclass
class KernelTimes:
    """The device's seconds by part, for products and for kernels that only move memory; the kernels, and their FLOPs.

    flops: of the products alone.
    """

    multiply: dict[str, float] = field(default_factory=dict)
    move: dict[str, float] = field(default_factory=dict)
    kernels: float = 0
    flops: float = 0

    def add(self, part: str, kernels: float, *, multiply: float = 0.0, move: float = 0.0, flops: float = 0.0) -> None:
        """Add time to one part, and the FLOPs of its products."""
        self.multiply[part] = self.multiply.get(part, 0.0) + multiply
        self.move[part] = self.move.get(part, 0.0) + move
        self.kernels += kernels
        self.flops += flops

    def join(self, other: KernelTimes) -> None:
        """Add all times of another object."""
        for part in other.multiply:
            self.add(part, 0, multiply=other.multiply[part], move=other.move[part])
        self.kernels += other.kernels
        self.flops += other.flops

    def seconds(self, slowdown: float) -> dict[str, float]:
        """The seconds by part.

        slowdown: the factor by which kernels move memory more slowly than their description says.
        """
        return {part: self.multiply[part] + slowdown * self.move[part] for part in self.multiply}

    def total(self, slowdown: float) -> float:
        """The seconds of all parts."""
        return sum(self.seconds(slowdown).values())


@functools.lru_cache(maxsize=4096)
def gemm_seconds(device: Device, m: int, n: int, k: int, batch: int = 1) -> float:
    """The seconds of ``batch`` products [m, k] x [k, n], with the best of the device's tiles."""
    rate = device.peak_flops * device.gemm_efficiency
    size, bandwidth = device.element_bytes, device.memory_bandwidth * device.memory_efficiency
    bound = batch * (m * k + k * n + m * n) * size / bandwidth
    best = math.inf
    for rows, columns in device.tiles:
        count = batch * math.ceil(m / rows) * math.ceil(n / columns)
        waves = math.ceil(count / device.units)
        # The FLOP/s at which the cache can deliver a tile's operands.
        cached = device.cache_bandwidth * 2 * rows * columns / ((rows + columns) * size)
        multiply = 2 * rows * columns * k / (min(rate, cached) / device.units)
        write = rows * columns * size * min(count, device.units) / bandwidth
        best = min(best, waves * (device.latency + multiply + write))
    return device.gemm_start + max(best, bound)


def memory_seconds(device: Device, moved: float, efficiency: float | None = None) -> float:
    """The seconds of kernels that move so many bytes.

    efficiency: the share of the memory's bandwidth that they reach (default: the plain kernel's).
    """
    return moved / (device.memory_bandwidth * (efficiency or device.memory_efficiency))
