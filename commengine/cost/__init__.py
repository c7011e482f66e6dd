"""Predicted costs: formulas and fitted models of collectives, and the collectives of a transformer's training step.

    cost.collective("all_reduce", "ring", 50e6, 8).seconds(cost.Link(alpha=3.4e-6, beta=1 / 120e9))
    cost.bus_bandwidth("all_reduce", 50e6, 0.9e-3, 8)                      # bytes per second, as nccl-tests defines it
    cost.FittedModel.load("model.json").seconds("all_reduce", 50e6, 8)     # a model from bench.fit

The package is pure arithmetic: it needs no ranks, no MPI and no tensors. Sizes are in bytes and may be fractions of a
byte; times are in seconds. The size of a collective is counted as in nccl-tests: the whole buffer of a rank
(all-reduce, broadcast, reduce, p2p, and the sent buffer of all-to-all), or the larger of its two buffers (all-gather:
the output; reduce-scatter: the input).
"""

from .collectives import (
    ALGORITHMS,
    OPERATIONS,
    Cost,
    Link,
    algorithm_bandwidth,
    best_algorithm,
    bus_bandwidth,
    bus_factor,
    collective,
    seconds_at_bus_bandwidth,
)
from .fitted import FittedModel, Segment
from .generation import generation_collectives, key_value_bytes
from .halo import BlockHalo, block_halo, halo_exchange_cost, least_halo_grid, repartition_cost
from .hierarchy import Machine, Phase, hierarchical_all_reduce
from .memory import (
    KeptTensors,
    activation_bytes,
    layer_activation_bytes,
    parameter_bytes,
    training_bytes,
)
from .step import (
    Collective,
    data_parallel_collectives,
    key_value_collectives,
    loss_collectives,
    scalar_collectives,
    sequence_parallel_collectives,
    tensor_parallel_collectives,
    total_bytes_sent,
)
from .transformer import (
    TransformerShape,
    layer_parameters,
    model_flops,
    parameter_sizes,
    parameters,
)

__all__ = [
    "ALGORITHMS",
    "OPERATIONS",
    "BlockHalo",
    "Collective",
    "Cost",
    "FittedModel",
    "KeptTensors",
    "Link",
    "Machine",
    "Phase",
    "Segment",
    "TransformerShape",
    "activation_bytes",
    "algorithm_bandwidth",
    "best_algorithm",
    "block_halo",
    "bus_bandwidth",
    "bus_factor",
    "collective",
    "data_parallel_collectives",
    "generation_collectives",
    "halo_exchange_cost",
    "hierarchical_all_reduce",
    "key_value_bytes",
    "key_value_collectives",
    "layer_activation_bytes",
    "layer_parameters",
    "least_halo_grid",
    "loss_collectives",
    "model_flops",
    "parameter_bytes",
    "parameter_sizes",
    "parameters",
    "repartition_cost",
    "scalar_collectives",
    "seconds_at_bus_bandwidth",
    "sequence_parallel_collectives",
    "tensor_parallel_collectives",
    "total_bytes_sent",
    "training_bytes",
]
