"""How long one device computes: matrix products by shape, and kernels that only move memory.

A GEMM of M x N x K is cut into output tiles, one a unit (SM) at a time, in waves; a last wave that is not full and a
tile that hangs over the edge cost as much as a full one (NVIDIA, Matrix Multiplication Background, section 3). A tile
reads its operands from the last cache, which bounds small tiles; it starts with a read from memory and ends with the
write of its result, in which nothing is multiplied: short K costs most. All of it is bounded by the traffic to memory
below.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, replace

from bench.clusters.cluster import Device


@dataclass(frozen=True)
class Parts:
    """Which parts of the model are on; bench.predict --ablation turns them off one by one."""

    gemm_shape: bool = True
    attention_traffic: bool = True
    elementwise: bool = True
    host: bool = True
    recompute: bool = True
    optimizer: bool = True
    tensor_communication: bool = True
    data_communication: bool = True

    def without(self, name: str) -> Parts:
        """All but one."""
        return replace(self, **{name: False})


@dataclass
class KernelTimes:
    """Device seconds by part, products and kernels that only move memory apart, and the number of kernels."""

    multiply: dict[str, float] = field(default_factory=dict)
    move: dict[str, float] = field(default_factory=dict)
    kernels: float = 0

    def add(self, part: str, kernels: float, *, multiply: float = 0.0, move: float = 0.0) -> None:
        """More of one part."""
        self.multiply[part] = self.multiply.get(part, 0.0) + multiply
        self.move[part] = self.move.get(part, 0.0) + move
        self.kernels += kernels

    def join(self, other: KernelTimes) -> None:
        """All that the other does, too."""
        for part in other.multiply:
            self.add(part, 0, multiply=other.multiply[part], move=other.move[part])
        self.kernels += other.kernels

    def seconds(self, slowdown: float) -> dict[str, float]:
        """By part; ``slowdown``: how much slower kernels move memory than their description says."""
        return {part: self.multiply[part] + slowdown * self.move[part] for part in self.multiply}

    def total(self, slowdown: float) -> float:
        """All parts."""
        return sum(self.seconds(slowdown).values())


def gemm_seconds(device: Device, m: int, n: int, k: int, batch: int = 1, *, by_shape: bool = True) -> float:
    """The time of ``batch`` products [m, k] x [k, n], with the best of the device's tiles.

    by_shape=False: at the rate of the largest GEMMs, whatever the shape.
    """
    rate = device.peak_flops * device.gemm_efficiency
    if not by_shape:
        return 2 * batch * m * n * k / rate
    return _tiled(device, rate, m, n, k, batch)


@functools.lru_cache(maxsize=4096)
def _tiled(device: Device, rate: float, m: int, n: int, k: int, batch: int) -> float:
    size, bandwidth = device.element_bytes, device.memory_bandwidth * device.memory_efficiency
    bound = batch * (m * k + k * n + m * n) * size / bandwidth
    best = math.inf
    for rows, columns in device.tiles:
        count = batch * math.ceil(m / rows) * math.ceil(n / columns)
        waves = math.ceil(count / device.units)
        # FLOPs a byte from the cache, at which a tile's operands can be multiplied.
        cached = device.cache_bandwidth * 2 * rows * columns / ((rows + columns) * size)
        multiply = 2 * rows * columns * k / (min(rate, cached) / device.units)
        write = rows * columns * size * min(count, device.units) / bandwidth
        best = min(best, waves * (device.latency + multiply + write))
    return max(best, bound)


def memory_seconds(device: Device, moved: float, efficiency: float | None = None) -> float:
    """The time of kernels that move so many bytes, at a fraction of the memory's bandwidth (default: the plain one)."""
    return moved / (device.memory_bandwidth * (efficiency or device.memory_efficiency))
