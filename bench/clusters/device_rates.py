"""The rates of a device that decide a prediction: of matrix products, of passes over memory, and of LayerNorm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

#: (call, rounds) -> the seconds of the call
Timer = Callable[[Callable[[], object], int], float]


@dataclass(frozen=True)
class DeviceRates:
    """Measured rates.

    products: FLOP/s of matrix products, beside the time in which each begins and ends. product_start: that time, in
    seconds. plain: bytes a second of an addition. layernorm: forward and backward, as a share of ``plain``. attention:
    forward and backward, as a share of ``products``. dispatch: seconds of the least operation.
    """

    products: float
    product_start: float
    plain: float
    layernorm: tuple[float, float]
    attention: tuple[float, float]
    dispatch: float

    def section(self) -> dict[str, Any]:
        """The rates in the units of a machine's file, and for all else a device that does nothing beside them."""
        return {
            "peak_tflops": round(self.products / 1e12, 4), "gemm_start_us": round(1e6 * self.product_start, 2),
            "gemm_efficiency": 1.0, "units": 1, "tiles": [[16, 16]], "memory_gb_per_s": round(self.plain / 1e9, 2),
            "memory_efficiency": 1.0, "layernorm_efficiency": list(self.layernorm),
            "attention_efficiency": list(self.attention), "latency_us": 0, "launch_us": 0, "dispatch_us": 0,
            "random_state_us": 0, "element_bytes": 4, "kernels": "fused",
        }  # fmt: skip


def measure_rates(seconds: Timer) -> DeviceRates:
    """Measure torch's current device in fp32."""
    wide, tiny = torch.randn(8 << 20), torch.zeros(1)
    other, out = torch.randn_like(wide), torch.empty_like(wide)
    plain = 12 * wide.numel() / seconds(lambda: torch.add(wide, other, out=out), 15)
    products, start = _products(seconds)
    rows = torch.randn(1 << 13, 1024, requires_grad=True)
    forward, backward = _both(seconds, lambda: F.layer_norm(rows, (1024,)), rows)
    layernorm = (8 * rows.numel() / forward / plain, 12 * rows.numel() / backward / plain)
    heads = torch.randn(1, 16, 512, 64, requires_grad=True)
    forward, backward = _both(
        seconds, lambda: F.scaled_dot_product_attention(heads, heads, heads, is_causal=True), heads
    )
    flops = 2 * 16 * 512 * 512 * 64  # both products, the half below the diagonal
    attention = (flops / forward / products, 2.5 * flops / backward / products)
    dispatch = seconds(lambda: [tiny.add_(1) for _ in range(1000)], 15) / 1000
    return DeviceRates(products, start, plain, _shares(layernorm), _shares(attention), dispatch)


def _products(seconds: Timer) -> tuple[float, float]:
    """The FLOP/s and the start of products, from those of 1024 and of 256 rows and columns."""
    times = {}
    for size in (256, 1024):
        one, out = torch.randn(size, size), torch.empty(size, size)
        times[size] = seconds(partial(torch.mm, one, one, out=out), 101 if size == 256 else 15)
    rate = 2 * (1024**3 - 256**3) / (times[1024] - times[256])
    if times[256] < 2 * 256**3 / rate:  # the small product is the faster one
        return 2 * 1024**3 / times[1024], 0.0
    return rate, times[256] - 2 * 256**3 / rate


def _both(seconds: Timer, run: Callable[[], Tensor], leaf: Tensor) -> tuple[float, float]:
    """The seconds of a function, and of its backward."""
    forward = seconds(run, 15)
    result = run()
    gradient = torch.randn_like(result)
    return forward, seconds(lambda: torch.autograd.grad(result, leaf, gradient, retain_graph=True), 15)


def _shares(pair: tuple[float, float]) -> tuple[float, float]:
    return min(pair[0], 1.0), min(pair[1], 1.0)
