"""Computing activations again in the backward instead of keeping them (Korthikanti et al. 2022, section 5)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

from torch import Tensor
from torch.utils.checkpoint import checkpoint

#: "full": keep the input of each transformer layer; "selective": all but the inside of attention; None: everything
Recompute: TypeAlias = Literal["full", "selective"] | None

RECOMPUTE = ("full", "selective")


def recomputed(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """``function(*args)``, of which the backward keeps ``args`` and nothing else, and calls ``function`` again.

    The replay is exact without saving a random state, because dropout is a function of position (`rng`); torch's
    generators are neither read nor changed. Collectives inside run again, up to the last tensor that the backward
    needs: every rank of their group must recompute alike.
    """
    result: Tensor = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
    return result


def require_known(recompute: str | None) -> None:
    """Raise ValueError unless ``recompute`` is a `Recompute`."""
    if recompute is not None and recompute not in RECOMPUTE:
        raise ValueError(f"recompute={recompute!r} must be None or one of {', '.join(RECOMPUTE)}")
