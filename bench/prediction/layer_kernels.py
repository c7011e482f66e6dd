"""The kernels of a layer that only move memory, one by one, and the bytes that the ends and the optimizer move."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kernel:
    """A kernel that only moves memory: bytes per element with 2-byte elements and 1-byte masks, forward and backward.

    over: "hidden", whole on each tensor rank (a sequence shard with sequence parallelism); "qkv", "queries", "rotated"
    (queries and keys) and "mlp", which a rank has 1 / t of; "scores", over a s / t for each token; or "rows", of each
    token's experts. backward: 0 if there is none. bias: there is no such kernel without biases.
    """

    over: str
    forward: float
    backward: float
    count: int = 1
    layernorm: bool = False
    bias: bool = False


# Each line: the bytes that the operations of the comment read and write, in order.
UNFUSED = (
    Kernel("hidden", 4, 6, count=2, layernorm=True),
    Kernel("hidden", 5, 5, count=2),  # dropout
    Kernel("hidden", 6, 6, count=2),  # residual; backward, the two gradients that meet
    Kernel("hidden", 4, 2, count=2),  # bias after the row-parallel product; backward, its sum
    Kernel("qkv", 4, 2, bias=True),  # bias of QKV
    Kernel("mlp", 4, 2, bias=True),  # bias of h -> 4h
    Kernel("qkv", 4, 8),  # heads made contiguous for the batched product; backward, and joined again
    Kernel("queries", 4, 4),  # context made contiguous
    Kernel("mlp", 4, 6),  # GELU, one kernel by torch.jit
    Kernel("scores", 4, 4),  # divided by sqrt(d)
    Kernel("scores", 4, 4),  # times the mask
    Kernel("scores", 4, 0),  # minus 10000 (1 - mask)
    Kernel("scores", 4, 6),  # softmax
    Kernel("scores", 5, 5),  # dropout
)
FUSED = (
    Kernel("hidden", 4, 6, count=2, layernorm=True),
    Kernel("hidden", 7, 11, count=2),  # bias + dropout + residual; backward, dropout and the two gradients that meet
    Kernel("qkv", 4, 2, bias=True),  # bias of QKV
    Kernel("mlp", 4, 6),  # bias + GELU
    Kernel("qkv", 0, 4),  # gradients of q, k, v joined
)
# Attention in single operations beside fused kernels: 2019's, and the mask's hash in int32 (tplayers/rng.py).
POSITION_MASK = (
    *(kernel for kernel in UNFUSED if kernel.over == "scores"),
    Kernel("scores", 97, 0),
    Kernel("qkv", 4, 4),  # heads made contiguous
    Kernel("queries", 4, 4),  # context made contiguous
)
# Beside the fused ones in Megatron-LM of 2021 (Narayanan et al. 2021, section 4.2): one kernel for scale, mask and
# softmax, and heads in a layout that only the context leaves.
SOFTMAX = (
    Kernel("scores", 4, 6),  # scale, mask, softmax
    Kernel("scores", 5, 5),  # dropout
    Kernel("queries", 4, 4),  # context made contiguous
)
# Of the Llama family: queries and keys rotated; SwiGLU, which reads its gate, too.
ROTATION = Kernel("rotated", 4, 4)
SWIGLU = Kernel("mlp", 6, 10)
# Of a mixture of experts: rows in the order of experts, and their weighted sum.
ROWS = Kernel("rows", 8, 12)
# Bytes a parameter. Unfused (fp16/fp16.py and loss_scaler.py of 2019): zeroed gradient 2, overflow check through fp32
# 10, fp32 copy 6, unscaling 8, norm 4, clipping 8, FusedAdam 28, fp16 copy 6. Fused: gradient read for the norm and
# for Adam 4, master weight and moments read and written 24, weight 2. Of 2021: as unfused, but for the check.
OPTIMIZER = {"unfused": 72.0, "fused": 30.0, "fused_softmax": 62.0}
OPTIMIZER_WAITED = 10.0 + 4.0
# Bytes a logit, forward and backward. Unfused: fp32 copy 6, maximum 4, subtraction 8, exp 8, sum 4, division 8;
# backward times the gradient 8, fp16 copy 6. Fused: maximum, then sum and gradient in place.
CROSS_ENTROPY = {"unfused": (38.0, 14.0), "fused": (6.0, 4.0), "fused_softmax": (38.0, 14.0)}


def of_layer(kind: str, eager_attention: bool, gated: bool, rotary: bool, experts: bool = False) -> tuple[Kernel, ...]:
    """The kernels of a layer. kind: `Device.kernels`. eager_attention: no fused kernel computes attention."""
    kernels: tuple[Kernel, ...] = UNFUSED if kind == "unfused" else FUSED
    if kind != "unfused" and eager_attention:
        kernels += SOFTMAX if kind == "fused_softmax" else POSITION_MASK
    if gated:
        kernels = tuple(SWIGLU if kernel.over == "mlp" and not kernel.bias else kernel for kernel in kernels)
    return (*kernels, *([ROTATION] if rotary else []), *([ROWS] if experts else []))
