"""The state that a rank keeps of a trainer's optimizer."""

from collections.abc import Iterator

from torch import Tensor

from trainers.training.optimizer import Optimizer


def local_state(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """(Kind, tensor): "master", which is what AdamW updates, and the moments, each stretch apart."""
    for owner in optimizer._owners:
        for one in owner.updated:
            yield from (("master", one.values), *one.moments.items())
