"""Layers on fields [batch, channels, space...] that are split in space over a Cartesian grid of ranks."""

from .layer import replicated as replicated
