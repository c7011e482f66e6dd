"""ExpertsConfig: the settings of runs of a model with a mixture of experts in its layers."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Annotated

from commengine.grid import divisors
from commengine.options.declared import given, option, require
from commengine.options.ranges import AtLeastOne, Experts, Width, between
from trainers.config import TrainConfig


@dataclass(frozen=True)
class ExpertsConfig(TrainConfig):
    """A training run of a model of which the layers may have experts in place of a feed-forward block."""

    expert_model_parallel_size: AtLeastOne = option(
        1, "data-parallel ranks that share the experts of each layer; tokens travel to the rank of their expert"
    )
    num_experts: Experts | None = option(None, "experts of each layer, in place of its feed-forward block", fixed=True)
    moe_router_topk: Experts = option(2, "experts of each token", fixed=True)
    moe_ffn_hidden_size: Width | None = option(None, "width of an expert (default ffn-hidden-size)", fixed=True)
    moe_router_pre_softmax: bool = option(
        False, "weight an expert by its probability among all experts, not among those of the token", fixed=True
    )
    moe_shared_expert_intermediate_size: Width | None = option(
        None, "width of an expert that all tokens have, too (default none)", fixed=True
    )
    moe_shared_expert_gate: bool = option(False, "the shared expert's result has a gate", fixed=True)
    moe_aux_loss_coeff: Annotated[float, between(0, 1e6)] = option(
        0.0, "coefficient of the loss that balances the experts within each sequence"
    )
    moe_z_loss_coeff: Annotated[float, between(0, 1e6)] = option(
        0.0, "coefficient of the loss that keeps the router's logits small"
    )

    @property
    def expert_ranks(self) -> int:
        """See `JobConfig.expert_ranks`."""
        return self.expert_model_parallel_size

    def validate(self, ranks: int) -> None:
        """Raise UsageError, naming the option and what is valid, unless this run is possible on ``ranks`` ranks."""
        super().validate(ranks)
        size = given(self, "expert_model_parallel_size")
        if self.num_experts is None:
            require(self.expert_ranks == 1, f"{size}: needs --num-experts")
            of_experts = [item for item in fields(self) if item.name.startswith("moe_")]
            more = [item.name for item in of_experts if getattr(self, item.name) != item.default]
            require(not more, f"{given(self, more[0]) if more else ''}: needs --num-experts")
            return
        experts, k = given(self, "num_experts"), given(self, "moe_router_topk")
        require(self.moe_router_topk <= self.num_experts, f"{k}: must not exceed {experts}")
        require(
            not self.moe_shared_expert_gate or self.moe_shared_expert_intermediate_size is not None,
            "--moe-shared-expert-gate: needs --moe-shared-expert-intermediate-size",
        )
        data = ranks // self.replica_size
        require(
            self.num_experts % self.expert_ranks == 0 == data % self.expert_ranks,
            f"{size}: does not divide {experts} and the {data} data-parallel ranks; "
            f"{divisors(math.gcd(self.num_experts, data))} do",
        )
        require(not self.compile, f"--compile: excludes {experts}")
