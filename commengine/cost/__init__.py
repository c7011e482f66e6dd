"""Predicted costs: formulas and fitted models of collectives, and the collectives of a transformer's training step.

    cost.collective("all_reduce", "ring", 50e6, 8).seconds(cost.Link(alpha=3.4e-6, beta=1 / 120e9))
    cost.bus_bandwidth("all_reduce", 50e6, 0.9e-3, 8)                      # bytes per second, as nccl-tests defines it
    cost.FittedModel.load("model.json").seconds("all_reduce", 50e6, 8)     # a model from bench.study --only fit

The package is pure arithmetic: it needs no ranks, no MPI and no tensors. Sizes are in bytes and may be fractions of a
byte; times are in seconds. The size of a collective is counted as in nccl-tests: the whole buffer of a rank
(all-reduce, broadcast, reduce, p2p, and the sent buffer of all-to-all), or the larger of its two buffers (all-gather:
the output; reduce-scatter: the input).
"""

from .collectives import ALGORITHMS as ALGORITHMS
from .collectives import OPERATIONS as OPERATIONS
from .collectives import Cost as Cost
from .collectives import Link as Link
from .collectives import Machine as Machine
from .collectives import bus_bandwidth as bus_bandwidth
from .collectives import bus_factor as bus_factor
from .collectives import collective as collective
from .context import context_collectives as context_collectives
from .context import copies_of_groups as copies_of_groups
from .experts import all_to_all_seconds as all_to_all_seconds
from .experts import busiest as busiest
from .experts import expert_collectives as expert_collectives
from .experts import gathered_seconds as gathered_seconds
from .experts import linear_crossover as linear_crossover
from .experts import link_crossover as link_crossover
from .experts import there_and_back_seconds as there_and_back_seconds
from .experts import uneven_all_to_all as uneven_all_to_all
from .fitted import FittedModel as FittedModel
from .fitted import Segment as Segment
from .generation import generation_collectives as generation_collectives
from .generation import key_value_bytes as key_value_bytes
from .memory import KeptTensors as KeptTensors
from .memory import activation_bytes as activation_bytes
from .memory import layer_activation_bytes as layer_activation_bytes
from .memory import parameter_bytes as parameter_bytes
from .memory import training_bytes as training_bytes
from .pipeline import Action as Action
from .pipeline import bubble as bubble
from .pipeline import cut_layers as cut_layers
from .pipeline import kept_microbatches as kept_microbatches
from .pipeline import needed as needed
from .pipeline import output_layers as output_layers
from .pipeline import stage_messages as stage_messages
from .pipeline import stages as stages
from .pipeline import timeline as timeline
from .step import Collective as Collective
from .step import data_parallel_collectives as data_parallel_collectives
from .step import key_value_collectives as key_value_collectives
from .step import loss_collectives as loss_collectives
from .step import scalar_collectives as scalar_collectives
from .step import sequence_parallel_collectives as sequence_parallel_collectives
from .step import tensor_parallel_collectives as tensor_parallel_collectives
from .transformer import StageShape as StageShape
from .transformer import TransformerShape as TransformerShape
from .transformer import active_parameters as active_parameters
from .transformer import expert_parameters as expert_parameters
from .transformer import model_flops as model_flops
from .transformer import parameter_sizes as parameter_sizes
from .transformer import parameters as parameters
