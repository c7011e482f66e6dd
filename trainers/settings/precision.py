"""The dtypes of a run, and how gradients are reduced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from commengine.options.declared import option
from commengine.options.ranges import AtLeastOne, ValidRange

_FP32 = ValidRange(
    lambda scale: 2.0**-126 <= scale <= 2.0**127, "must be positive, from 2**-126 to 2**127 (1.2e-38 to 1.7e38: fp32)"
)
LossScale = Annotated[float, _FP32]


@dataclass(frozen=True)
class PrecisionOptions:
    """Half precision, and the scale of the fp16 loss."""

    bf16: bool = option(False, "parameters and activations in bfloat16, with fp32 masters and gradient sums")
    fp16: bool = option(
        False, "the same in float16, with a scaled loss; a step whose gradient overflows is skipped, and neither the "
        "learning rate nor AdamW counts it"
    )  # fmt: skip
    loss_scale: LossScale | None = option(None, "a constant scale of the fp16 loss (default: a dynamic scale)")
    initial_loss_scale: LossScale = option(2.0**16, "first dynamic scale of the fp16 loss")
    loss_scale_window: AtLeastOne = option(1000, "steps in a row without overflow after which the scale doubles")
    hysteresis: AtLeastOne = option(
        2, "number of overflows at which the scale halves; the overflows before only skip their step"
    )
    min_loss_scale: LossScale | None = option(
        None, "smallest dynamic scale; an overflow there ends the run (default 1, or initial-loss-scale if less)"
    )


@dataclass(frozen=True)
class ReductionOptions:
    """The reduction of gradients over the replicas."""

    grad_reduce_in_fp32: bool = option(
        False, "reduce the gradients of half-precision parameters in fp32 (default: in the parameters' dtype)"
    )
    use_distributed_optimizer: bool = option(
        False, "shard masters and AdamW's moments over the data x context ranks (ZeRO-1)"
    )
    overlap_grad_reduce: bool | None = option(
        None, "reduce a bucket while backward runs (default: on for devices, off on the host)"
    )
    ddp_bucket_size: AtLeastOne | None = option(
        None,
        "elements of a gradient bucket (default: 4 million on the host; on devices 40 million, or 1 million for each "
        "data-parallel rank if that is more)",
    )  # fmt: skip
