"""ContextConfig: the settings of runs whose ranks share sequences."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from commengine import ProcessGrid
from commengine.grid import divisors
from commengine.options.declared import given, option, require
from commengine.options.ranges import AtLeastOne
from tplayers import ContextGroup, ContextMethod, TransformerConfig

from .stages import StagesConfig

#: Megatron-LM's words for the ways to see a whole sequence, and those of `tplayers.ContextGroup`
METHODS: dict[str, ContextMethod] = {"a2a": "ulysses", "p2p": "ring", "all_gather": "gather"}


@dataclass(frozen=True)
class ContextConfig(StagesConfig):
    """A training run of a transformer in which several ranks may have parts of each sequence.

    causal: whether a position sees the earlier ones only.
    """

    causal: ClassVar[bool]

    context_parallel_size: AtLeastOne = option(
        1, "ranks that share each sequence: each has a part of its positions, in all layers"
    )
    cp_comm_type: str | None = option(
        None, "with --context-parallel-size: how attention sees the other parts: heads for positions by all-to-all "
        "(Ulysses), keys and values that travel around a ring, or that are gathered (default a2a)",
        choices=tuple(METHODS),
    )  # fmt: skip

    @property
    def context_ranks(self) -> int:
        """See `JobConfig.context_ranks`."""
        return self.context_parallel_size

    @property
    def context_method(self) -> ContextMethod:
        """The method of `tplayers.ContextGroup`."""
        return METHODS[self.cp_comm_type or "a2a"]

    def validate(self, ranks: int) -> None:
        """Raise UsageError, naming the option and what is valid, unless this run is possible on ``ranks`` ranks."""
        super().validate(ranks)
        size, named = self.context_parallel_size, given(self, "context_parallel_size")
        if size == 1:
            needs = "needs a --context-parallel-size above 1"
            require(self.cp_comm_type is None, f"{given(self, 'cp_comm_type')}: {needs}")
            return
        require(
            not self.overlap_p2p_communication
            or self.pipeline_model_parallel_size > 1
            or self.context_method != "ulysses",
            "--overlap-p2p-communication: needs a --pipeline-model-parallel-size above 1, or a --cp-comm-type of p2p "
            "or all_gather",
        )
        require(
            not self.compile, f"{named}: excludes --compile, because a graph has no messages; leave one of them out"
        )
        require(
            self.canonical_shards is None or self.context_method == "ulysses",
            f"{given(self, 'cp_comm_type')}: excludes --deterministic, because a row of scores is added up over blocks "
            "of keys from all ranks; --cp-comm-type a2a has whole rows",
        )
        require(
            self.attention_dropout_mask == "position"
            or self.attention_dropout == 0
            or self.context_method == "ulysses",
            f"{given(self, 'attention_dropout_mask')}: excludes {given(self, 'cp_comm_type')}: a kernel sees some "
            "keys only; valid: --attention-dropout-mask position, or --cp-comm-type a2a",
        )

    def require_context(self, model: TransformerConfig, length: int) -> None:
        """Raise UsageError unless sequences of ``length``, and for an all-to-all the heads of ``model``, can be cut."""
        size, tensor = self.context_parallel_size, self.tensor_model_parallel_size
        if size == 1:
            return
        named = given(self, "context_parallel_size")
        # Under a causal mask a rank has an early and a late part, so that all ranks compute equally much.
        parts = 2 if self.causal and self.context_method != "ulysses" else 1
        multiple = size * math.lcm(parts, tensor if self.sequence_parallel else 1)
        said = f"{named} and --cp-comm-type {self.cp_comm_type}" if parts == 2 else named
        said += f" and {given(self, 'tensor_model_parallel_size')}" if self.sequence_parallel else ""
        require(
            length % multiple == 0,
            f"{given(self, 'seq_length')}: must be a multiple of {multiple} with {said}, such as "
            f"{max(length // multiple, 1) * multiple}",
        )
        heads = model.head_split(tensor).local_heads
        require(
            self.context_method != "ulysses" or heads % size == 0,
            f"{named}: does not divide the {heads} attention heads of a rank, as --cp-comm-type a2a needs; "
            f"{divisors(heads)} do, and --cp-comm-type p2p takes any number",
        )

    def context_group(self, grid: ProcessGrid) -> ContextGroup | None:
        """The group of this rank; None if it has sequences for itself. Collective over ``grid.context``."""
        if self.context_parallel_size == 1:
            return None
        threaded = bool(self.overlap_p2p_communication)
        return ContextGroup(grid.context, self.context_method, causal=self.causal, threaded=threaded)
