"""Whole tensors of our models from those of Hugging Face's, and back. Both are linear: they convert gradients, too."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from tplayers import TransformerConfig
from trainers.weights.hugging_face import hugging_face_tensors


def from_hugging_face(
    theirs: Mapping[str, Tensor], config: TransformerConfig, head: str | None = None
) -> dict[str, Tensor]:
    """Our global tensors; rows of vocabulary padding are 0."""
    found = {}
    for tensor in hugging_face_tensors(config, head):
        whole = torch.cat([theirs[name] for name in tensor.theirs])
        if tensor.vocabulary:
            padding = config.padded_vocab_size - config.vocab_size
            whole = F.pad(whole, (*(0, 0) * (whole.dim() - 1), 0, padding))
        found[tensor.ours] = whole.t() if tensor.transposed else whole
    return found


def to_hugging_face(
    ours: Mapping[str, Tensor], config: TransformerConfig, head: str | None = None
) -> dict[str, Tensor]:
    """Hugging Face's tensors, without vocabulary padding, contiguous, each tied one once."""
    found = {}
    for tensor in hugging_face_tensors(config, head):
        whole = ours[tensor.ours]
        whole = whole[: config.vocab_size] if tensor.vocabulary else whole
        whole = whole.t() if tensor.transposed else whole
        parts = whole.chunk(len(tensor.theirs))
        found |= {name: part.contiguous() for name, part in zip(tensor.theirs, parts, strict=True)}
    return found
