"""Generating text with a tensor-parallel model: the collectives of one token, and the bytes of its key-value cache.

    [M] Shoeybi et al., Megatron-LM, 2019: section 3, Figure 4 (the forward of a layer)

A forward pass of one token in each of b rows has the collectives of training's forward at s = 1 [M]. The next token is
then chosen from the ranks' parts of the logits, which needs a few numbers for each row instead of its v logits.
"""

from __future__ import annotations

from dataclasses import replace

from .step import Collective, key_value_collectives
from .transformer import TransformerShape

#: bytes of a rank's best score and its token; of a logit; of a bin of a histogram
PAIR, LOGIT, MASS = 16, 4, 8
#: the histograms that find the threshold of top-p, one for each byte of a float32, and their bins
HISTOGRAMS, BINS = 4, 256


def generation_collectives(
    shape: TransformerShape, batch: int, tensor: int, *, element_bytes: float = 4, top_k: int = 0, top_p: float = 1.0
) -> list[Collective]:
    """Return the collectives of one token of each of ``batch`` rows, whose earlier tokens are in the cache.

    tensor: the size of the tensor group. element_bytes: of an activation. top_k, top_p: of the sampling; 0 and 1 for no
    such filter, and for greedy decoding. ``shape.seq`` does not matter.
    """
    if tensor == 1:
        return []
    hidden = batch * shape.hidden * element_bytes

    def one(operation: str, size: float, count: int, part: str, why: str) -> Collective:
        return Collective(operation, size, tensor, count, why, part, "forward")

    found = [
        one("all_reduce", hidden, 1, "embedding", "embedding's g [M]"),
        one("all_reduce", hidden, 2 * shape.layers, "layers", "g, after attention and MLP [M]"),
    ]
    shared = key_value_collectives(replace(shape, seq=1), batch, tensor, element_bytes=element_bytes)
    found += [one for one in shared if one.phase == "forward"]
    if 0 < top_k < shape.vocab:
        size = min(top_k, shape.vocab // tensor) * tensor * batch * LOGIT
        found.append(one("all_gather", size, 1, "token", "top-k: each rank's largest logits"))
    if top_p < 1:
        found.append(one("all_reduce", batch * LOGIT, 1, "token", "top-p: the largest logit"))
        found.append(one("all_reduce", batch * BINS * MASS, HISTOGRAMS, "token", "top-p: probability by score"))
    found.append(one("all_gather", batch * PAIR * tensor, 1, "token", "each rank's best score and its token"))
    return found


def key_value_bytes(
    shape: TransformerShape, batch: int, tokens: int, tensor: int = 1, *, element_bytes: float = 4
) -> float:
    """Return the bytes of one rank's keys and values for ``batch`` rows of ``tokens`` tokens: 2 L b n h / t elements.

    With fewer heads of keys and values they are fewer by as much; ranks that share such a head hold all of it. Raises
    ValueError unless ``tensor`` divides the heads.
    """
    if shape.heads % tensor:
        raise ValueError(f"tensor-parallel size {tensor} does not divide heads={shape.heads}")
    return 2 * shape.layers * batch * tokens * shape.keys * shape.sharing(tensor) / tensor * element_bytes
