"""Parallel layers and models over commengine. They read no files and no arguments, and have no global state."""

from .attention.key_value_cache import KeyValueCache
from .attention.rotary import RopeScaling
from .attention.self_attention import DropoutMask, SelfAttention
from .block import NormPlacement, TransformerBlock
from .canonical.shards import CanonicalShards, use_canonical_shards
from .cross_entropy import class_cross_entropy, vocab_parallel_cross_entropy
from .embedding import VocabParallelEmbedding
from .fields import (
    FieldAvgPool,
    FieldBatchNorm,
    FieldConv,
    FieldConvTranspose,
    FieldGroupNorm,
    FieldLayerNorm,
    FieldMaxPool,
    FieldUpsample,
    SpectralConv,
)
from .generation.generate import generate
from .generation.sampling import Sampling
from .generation.vocab_argmax import vocab_parallel_argmax
from .linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from .mlp import MLP, Gelu, SwiGLU
from .models.bert import BERT, BERTConfig
from .models.bert_tasks import BERTMultipleChoice, BERTSequenceClassifier, BERTSpans
from .models.config import PositionEmbedding, TransformerConfig
from .models.fno import FNO
from .models.gpt import GPT, GPTConfig
from .models.transformer import Transformer
from .models.unet import UNet
from .movement.halo import halo_accumulate, halo_exchange, plan_halo, shift, start_halo_exchange
from .movement.operators import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    gather,
    reduce_scatter,
    repartition,
    scatter,
    sum_reduce,
)
from .movement.plan import TransferPlan, halo_plan, repartition_plan
from .movement.transfer import StartedTransfer, start_transfer, transfer, transfer_adjoint
from .norm import LayerNorm, Normalization, ParallelLayerNorm, RMSNorm
from .placement import (
    Constant,
    Normal,
    Placement,
    add_parameter,
    all_reduce_together,
    initialize,
    placements,
    require_divisible,
    sum_partial_gradients,
)
from .recompute import Recompute
from .regions import (
    copy_to_tensor_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_parallel_region,
    reduce_from_tensor_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_tensor_parallel_region,
)
from .rng import Randomness, dropout

__all__ = [
    "BERT",
    "FNO",
    "GPT",
    "MLP",
    "BERTConfig",
    "BERTMultipleChoice",
    "BERTSequenceClassifier",
    "BERTSpans",
    "CanonicalShards",
    "ColumnParallelLinear",
    "Constant",
    "DropoutMask",
    "FieldAvgPool",
    "FieldBatchNorm",
    "FieldConv",
    "FieldConvTranspose",
    "FieldGroupNorm",
    "FieldLayerNorm",
    "FieldMaxPool",
    "FieldUpsample",
    "GPTConfig",
    "Gelu",
    "KeyValueCache",
    "LayerNorm",
    "NormPlacement",
    "Normal",
    "Normalization",
    "ParallelLayerNorm",
    "Placement",
    "PositionEmbedding",
    "RMSNorm",
    "Randomness",
    "Recompute",
    "ReplicatedLinear",
    "RopeScaling",
    "RowParallelLinear",
    "Sampling",
    "SelfAttention",
    "SpectralConv",
    "StartedTransfer",
    "SwiGLU",
    "TransferPlan",
    "Transformer",
    "TransformerBlock",
    "TransformerConfig",
    "UNet",
    "VocabParallelEmbedding",
    "add_parameter",
    "all_gather",
    "all_reduce",
    "all_reduce_together",
    "all_to_all",
    "broadcast",
    "class_cross_entropy",
    "copy_to_tensor_parallel_region",
    "dropout",
    "gather",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_parallel_region",
    "generate",
    "halo_accumulate",
    "halo_exchange",
    "halo_plan",
    "initialize",
    "placements",
    "plan_halo",
    "reduce_from_tensor_parallel_region",
    "reduce_scatter",
    "reduce_scatter_to_sequence_parallel_region",
    "repartition",
    "repartition_plan",
    "require_divisible",
    "scatter",
    "scatter_to_tensor_parallel_region",
    "shift",
    "start_halo_exchange",
    "start_transfer",
    "sum_partial_gradients",
    "sum_reduce",
    "transfer",
    "transfer_adjoint",
    "use_canonical_shards",
    "vocab_parallel_argmax",
    "vocab_parallel_cross_entropy",
]
