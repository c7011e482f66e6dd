"""Layers on fields [batch, channels, space...] that are split in space over a Cartesian grid of ranks."""

from .conv import FieldConv, FieldConvTranspose
from .layer import replicated
from .norm import FieldBatchNorm, FieldGroupNorm, FieldLayerNorm
from .pool import FieldAvgPool, FieldMaxPool
from .spectral import SpectralConv
from .upsample import FieldUpsample

__all__ = [
    "FieldAvgPool",
    "FieldBatchNorm",
    "FieldConv",
    "FieldConvTranspose",
    "FieldGroupNorm",
    "FieldLayerNorm",
    "FieldMaxPool",
    "FieldUpsample",
    "SpectralConv",
    "replicated",
]
