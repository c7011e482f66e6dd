"""TiedWeight: a weight that the embedding and the output layer share, and the sum of its two gradients.

The stages at a pipeline's ends each have a copy. The gradient of a copy comes from one use, so the two are added up
before they are cut into shares (ZeRO-1), which lie at other places on the two stages. Both copies then get the same
update.

A run with the same bits at every layout adds up the gradients of each use apart, over all samples and replicas, and
then the two sums, also where one rank has both uses.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from commengine import Communicator


class TiedWeight:
    """A tied weight on a stage at one of a pipeline's ends, or on a rank that is both.

    name: of the parameter. ends: a Communicator of the two stages; None if this rank is both. twin: a parameter that
    has the weight's memory, and its place in the output layer; None if autograd adds up both uses. counted: the norm
    of the whole gradient counts this copy.
    """

    def __init__(self, name: str, *, ends: Communicator | None, twin: nn.Parameter | None, counted: bool) -> None:
        self.name, self.ends, self.twin, self.counted = name, ends, twin, counted

    def add(self, gradient: Tensor) -> None:
        """Add the other stage's ``gradient`` to this one, in place. Collective over the two stages."""
        if self.ends is not None:
            self.ends.all_reduce(gradient)

    def follow(self, parameter: nn.Parameter) -> None:
        """Let the twin have the memory of ``parameter``, the weight, which an optimizer may have moved."""
        if self.twin is not None:
            self.twin.data = parameter.data

    def close(self) -> None:
        """Free the group of the two stages. Collective over them."""
        if self.ends is not None:
            self.ends.close()


def tied_weight(model: Any, pipeline: Communicator, *, apart: bool) -> TiedWeight | None:
    """The tied weight of ``model``; None where none needs more than autograd does. Collective over ``pipeline``.

    apart: the gradients of both uses are added up apart (`tplayers.use_canonical_shards` has been called).
    """
    name, part = getattr(model, "tied", None), getattr(model, "part", None)
    if name is None or part is None:
        return None
    if pipeline.size > 1:
        at_end = part.first or part.last
        ends = pipeline.split(0 if at_end else None, name="ends")
        return TiedWeight(name, ends=ends, twin=None, counted=part.first) if at_end else None
    if not apart:
        return None
    twin = nn.Parameter(model.get_parameter(name).detach())
    vars(model.output_layer)["twin"] = twin  # not a parameter of the layer, of which there would be two
    return TiedWeight(name, ends=None, twin=twin, counted=True)
