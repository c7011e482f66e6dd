"""Predicted costs of collectives: formulas and fitted models. `tplayers.formulas` has those of a transformer's step.

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
from .experts import all_to_all_seconds as all_to_all_seconds
from .experts import busiest as busiest
from .experts import gathered_seconds as gathered_seconds
from .experts import linear_crossover as linear_crossover
from .experts import link_crossover as link_crossover
from .experts import there_and_back_seconds as there_and_back_seconds
from .experts import uneven_all_to_all as uneven_all_to_all
from .fitted import FittedModel as FittedModel
from .fitted import Segment as Segment
