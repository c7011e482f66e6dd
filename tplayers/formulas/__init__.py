"""The formulas of a transformer: its size, memory and products, and the collectives of its steps.

    formulas.parameters(shape)
    formulas.training_bytes(shape, batch=4, tensor=8, data=2)

The room is pure arithmetic: it needs no ranks, no MPI and no tensors. Sizes are in bytes and may be fractions of a
byte. `commengine.cost` says what a collective costs.
"""

from .context import context_collectives as context_collectives
from .context import copies_of_groups as copies_of_groups
from .experts import expert_collectives as expert_collectives
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
from .step_model import StepLayout as StepLayout
from .step_model import StepModel as StepModel
from .step_model import equal_buckets as equal_buckets
from .transformer import StageShape as StageShape
from .transformer import TransformerShape as TransformerShape
from .transformer import active_parameters as active_parameters
from .transformer import expert_parameters as expert_parameters
from .transformer import model_flops as model_flops
from .transformer import parameter_sizes as parameter_sizes
from .transformer import parameters as parameters
