"""Recomputation of activations in the backward instead of keeping them (Korthikanti et al. 2022, section 5)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

from torch import Tensor
from torch.utils.checkpoint import checkpoint

#: What is kept for the backward. "full": the input of each transformer layer only. "selective": everything but the
#: inside of attention. None: everything.
Recompute: TypeAlias = Literal["full", "selective"] | None

RECOMPUTE = ("full", "selective", None)


def recomputed(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """Return ``function(*args)``, keep only ``args`` for the backward, and call ``function`` again there.

    The second call gives the same numbers without a saved random state, because dropout is a function of position
    (`rng`); torch's generators are neither read nor changed. Collectives inside ``function`` run again, up to the last
    tensor that the backward needs. Therefore every rank of their group must recompute the same.
    """
    result: Tensor = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
    return result
