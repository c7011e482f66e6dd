"""MLP and SwiGLU: the feed-forward block of columns, an activation and rows (paper, section 3, Figure 3a)."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commengine import Communicator

from .functions import differentiable, finished
from .linear import DEFAULT_INIT, ColumnParallelLinear, LinearOptions, RowParallelLinear
from .placement import Normal, require_one_of

#: The form of GELU: x * Phi(x) with the error function (BERT), or the approximation by tanh (GPT-2, Megatron-LM's GPT).
Gelu: TypeAlias = Literal["erf", "tanh"]

#: each form's name in torch
GELUS = {"erf": "none", "tanh": "tanh"}


class MLP(nn.Module):
    """Z = GeLU(X A) B with A split by columns and B by rows: GELU needs no communication between them.

    gelu: the form of GELU, "tanh" or "erf" (else ValueError), which differ by up to 4.7e-4; None for ReLU.
    bias: of both linear layers.
    options: sequence_parallel, overlap_stream, init and dtype, as in `ColumnParallelLinear`.
    output_init: initial values of B.

    forward: x [..., hidden_size], equal on all ranks -> the same. One all-reduce each way.
    With sequence_parallel: x [s / comm.size, ..., hidden_size], this rank's sequence shard -> the same.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        comm: Communicator,
        *,
        gelu: Gelu | None = "tanh",
        bias: bool = True,
        output_init: Normal = DEFAULT_INIT,
        **options: Unpack[LinearOptions],
    ) -> None:
        super().__init__()
        require_one_of((*GELUS, None), gelu=gelu)
        self.gelu = gelu
        self.up = ColumnParallelLinear(hidden_size, ffn_hidden_size, comm, bias, **options)
        options["init"] = output_init
        self.down = RowParallelLinear(ffn_hidden_size, hidden_size, comm, bias, **options)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(_activated(self.up(x), self.gelu))
        return result

    def part(self, x: Tensor) -> Tensor:
        """This rank's summand of Z: without f, g and biases. x: [..., hidden_size]."""
        return F.linear(_activated(F.linear(x, self.up.weight), self.gelu), self.down.weight)


def _activated(x: Tensor, gelu: Gelu | None) -> Tensor:
    return F.relu(x) if gelu is None else F.gelu(x, approximate=GELUS[gelu])


class SwiGLU(nn.Module):
    """Z = (SiLU(X G) * (X U)) B (Shazeer 2020): G and U are split by columns, B by rows.

    A rank holds the same columns of G and of U, so the product needs no communication. ``gate_up`` is one layer with
    the rows [gate; up], of ``ffn_hidden_size`` each; the gate goes through SiLU, or through the form ``gelu`` of GELU
    (GEGLU, of T5 1.1).
    bias, options, output_init, forward: as in `MLP`.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        comm: Communicator,
        *,
        gelu: Gelu | None = None,
        bias: bool = True,
        output_init: Normal = DEFAULT_INIT,
        **options: Unpack[LinearOptions],
    ) -> None:
        super().__init__()
        require_one_of((*GELUS, None), gelu=gelu)
        self.gelu = gelu
        self.gate_up = ColumnParallelLinear(hidden_size, 2 * ffn_hidden_size, comm, bias, blocks=2, **options)
        options["init"] = output_init
        self.down = RowParallelLinear(ffn_hidden_size, hidden_size, comm, bias, **options)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(self._gated(self.gate_up(x)))
        return result

    def part(self, x: Tensor) -> Tensor:
        """As `MLP.part`."""
        return F.linear(self._gated(F.linear(x, self.gate_up.weight)), self.down.weight)

    def _gated(self, both: Tensor) -> Tensor:
        if self.gelu is None:
            return _gated(both)
        gate, up = both.chunk(2, dim=-1)
        return F.gelu(gate, approximate=GELUS[self.gelu]) * up


def _gated(both: Tensor) -> Tensor:
    """SiLU(gate) * up, of [..., gate; up]."""
    if not torch.compiler.is_compiling():
        return _Gated.apply(both)  # type: ignore[no-untyped-call, no-any-return]
    return _plain_gated(both)  # the compiler itself decides what is kept


def _plain_gated(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate) * up


class _Gated(torch.autograd.Function):
    """`_gated` that keeps its input alone, where torch's operations would keep SiLU(gate), too.

    The backward writes into the two halves of the gradient, and has no other tensor.
    """

    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        ctx.save_for_backward(both)
        gate, up = both.chunk(2, dim=-1)
        return finished(F.silu(gate).mul_(up))

    @staticmethod
    @differentiable(lambda ctx: (lambda both: (_plain_gated(both),), ctx.saved_tensors))
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (both,) = ctx.saved_tensors
        gate, up = both.chunk(2, dim=-1)
        found = torch.empty_like(both)
        of_gate, of_up = found.chunk(2, dim=-1)
        torch.mul(grads[0], up, out=of_gate)
        torch.ops.aten.silu_backward.grad_input(of_gate, gate, grad_input=of_gate)
        torch.ops.aten.silu.out(gate, out=of_up)
        of_up.mul_(grads[0])
        return found
