"""How the ranks share a model and its samples."""

from __future__ import annotations

from dataclasses import dataclass

from commengine.options.declared import option
from commengine.options.ranges import AtLeastOne, Layers

#: Megatron-LM's words for the ways to see a whole sequence, and those of `tplayers.ContextGroup`
METHODS = {"a2a": "ulysses", "p2p": "ring", "all_gather": "gather"}


@dataclass(frozen=True)
class ComputationOptions:
    """How a rank computes its part of a layer."""

    sequence_parallel: bool = option(False, "split norms, dropout and residuals over the tensor group by sequence")
    async_tensor_model_parallel_allreduce: bool | None = option(
        None, "reduce an input's gradient while the weight's is computed (default: on for devices, off on the host)"
    )
    compile: bool = option(False, "train with the model compiled by torch.compile; needs a C++ compiler")


@dataclass(frozen=True)
class StageOptions:
    """Pipeline stages (Narayanan et al. 2021, section 2.2)."""

    num_layers: Layers = option(12, "transformer layers", fixed=True)
    pipeline_model_parallel_size: AtLeastOne = option(
        1, "pipeline stages that the layers are cut into; the ranks of a stage are a tensor group and its replicas"
    )
    num_layers_per_virtual_pipeline_stage: AtLeastOne | None = option(
        None,
        "give each stage several stretches of so many layers, which interleave (default: one stretch, cut by cost)",
    )
    overlap_p2p_communication: bool | None = option(
        None,
        "messages between stages, and those of a context group, have threads of their own (default: no; on a "
        "device they need none)",
    )  # fmt: skip


@dataclass(frozen=True)
class ContextOptions:
    """Ranks that share each sequence."""

    context_parallel_size: AtLeastOne = option(
        1, "ranks that share each sequence: each has a part of its positions, in all layers"
    )
    cp_comm_type: str | None = option(
        None, "with --context-parallel-size: how attention sees the other parts: heads for positions by all-to-all "
        "(Ulysses), keys and values that travel around a ring, or that are gathered (default a2a)",
        choices=tuple(METHODS),
    )  # fmt: skip
