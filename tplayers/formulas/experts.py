"""The collectives of layers with experts, whose rows travel to the ranks of their experts and back."""

from __future__ import annotations

from commengine.cost.experts import COUNT_BYTES

from .step import Collective
from .transformer import TransformerShape, require_recompute


def expert_collectives(
    shape: TransformerShape, batch: int, expert: int, *, element_bytes: float = 2, recompute: str = "none"
) -> list[Collective]:
    """Return the collectives of one micro-batch over an expert group of ``expert`` ranks, if tokens go evenly.

    Of each layer: an all-to-all of the counts of rows of all experts, and two of k b s h elements, there and back; the
    backward has two, too. If the layer is recomputed in full, the forward's run again. shape: with the positions of a
    rank's sequences, all those of its tensor group.
    """
    require_recompute(recompute)
    if not shape.experts or expert == 1:
        return []
    passes = ["forward", "backward", *(["recompute"] if recompute == "full" else [])]

    def one(size: float, phase: str, why: str) -> Collective:
        return Collective("all_to_all", size, expert, shape.layers, why, "layers", phase)

    rows = shape.of_token * batch * shape.seq * shape.hidden * element_bytes
    counts = [one(COUNT_BYTES * shape.experts, phase, "rows of each expert") for phase in passes if phase != "backward"]
    ways = ("rows to their experts", "and their results back")
    return [*counts, *(one(rows, phase, why) for phase in passes for why in ways)]
