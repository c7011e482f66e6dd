"""MLP: the feed-forward block of columns, GELU and rows (paper, section 3, Figure 3a)."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commengine import Communicator, Stream

from .linear import DEFAULT_INIT, ColumnParallelLinear, RowParallelLinear
from .placement import Normal

#: The form of GELU: x * Phi(x) with the error function (BERT), or the approximation by tanh (GPT-2, Megatron-LM's GPT).
Gelu: TypeAlias = Literal["erf", "tanh"]

#: each form's name in torch
GELUS = {"erf": "none", "tanh": "tanh"}


class MLP(nn.Module):
    """Z = GeLU(X A) B with A split by columns and B by rows: GELU needs no communication between them.

    gelu: the form of GELU, "tanh" or "erf" (else ValueError). They differ by up to 4.7e-4.
    sequence_parallel, overlap_stream: as in the two linear layers (`ColumnParallelLinear`, `RowParallelLinear`).

    forward: x [..., hidden_size], equal on all ranks -> the same. One all-reduce each way.
    With sequence_parallel: x [s / comm.size, ..., hidden_size], this rank's sequence shard -> the same.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        comm: Communicator,
        *,
        gelu: Gelu = "tanh",
        sequence_parallel: bool = False,
        overlap_stream: Stream | None = None,
        init: Normal = DEFAULT_INIT,
        output_init: Normal = DEFAULT_INIT,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        require_gelu(gelu)
        self.gelu = gelu
        self.up = ColumnParallelLinear(
            hidden_size, ffn_hidden_size, comm,
            sequence_parallel=sequence_parallel, overlap_stream=overlap_stream, init=init, dtype=dtype,
        )  # fmt: skip
        self.down = RowParallelLinear(
            ffn_hidden_size, hidden_size, comm, sequence_parallel=sequence_parallel, init=output_init, dtype=dtype
        )

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(F.gelu(self.up(x), approximate=GELUS[self.gelu]))
        return result


def require_gelu(gelu: str) -> None:
    """Raise ValueError unless ``gelu`` is a `Gelu`."""
    if gelu not in GELUS:
        raise ValueError(f"gelu={gelu!r} must be one of {', '.join(GELUS)}")
