"""KeyValueCache: keys and values of the tokens that went through a causal model, so that none goes through twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tplayers.host_copy import integers


class Seen(NamedTuple):
    """What the new tokens of a layer attend to, of this rank's heads.

    keys, values: [b, heads, n, d]. mask: bool, True where a new token sees a key: [s, n], or [b, 1, s, n]; None: every
    new token sees all keys, or with ``causal`` those up to its own.
    """

    keys: Tensor
    values: Tensor
    mask: Tensor | None
    causal: bool


class KeyValueCache:
    """The keys and values of ``batch`` rows of tokens, of the heads that this rank computes. It communicates nothing.

    A row's token at position i lies in slot i, so the rows may have different lengths. The host knows the lengths, and
    nothing waits for the device.

    layers, heads, head_size: of the model; ``heads`` are those of keys and values on this rank. capacity: the most
    tokens of a row. dtype, device: of the model's parameters.
    It has 2 * layers * batch * heads * capacity * head_size elements of ``dtype`` (`nbytes`).

    A forward pass of s new tokens in each row calls `begin` once and each layer's `LayerCache.extend`. Then `advance`
    says how many of the s tokens are real. The next pass overwrites the others, which no real token has seen, because
    they come after it. The passes keep no gradients (else ValueError).
    """

    def __init__(
        self, layers: int, batch: int, heads: int, head_size: int, capacity: int, *, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        # Zeros, because attention multiplies what it does not see by 0, and uninitialised memory may hold a NaN. A
        # token's heads lie together: a new token is then written at one place.
        self._stored = torch.zeros((2, layers, batch, capacity, heads, head_size), dtype=dtype, device=device)
        self.capacity = capacity
        self.lengths = [0] * batch
        self.layers = [LayerCache() for _ in range(layers)]

    @property
    def nbytes(self) -> int:
        """The bytes of the keys and values of this rank."""
        return self._stored.nbytes

    def clear(self) -> None:
        """Forget all tokens, and keep the memory."""
        self.lengths = [0] * len(self.lengths)

    def keep(self, rows: Sequence[int]) -> None:
        """Make the given rows, in this order, the rows of the cache. A row may stand there several times, or not."""
        self._stored = self._stored.index_select(2, integers(rows, self._stored.device))
        self.lengths = [self.lengths[row] for row in rows]

    def begin(self, s: int) -> Tensor | slice:
        """Prepare for ``s`` new tokens in each row, and return their positions: int64 [b, s], or a slice for all rows.

        ``positions`` are those of the last call. Raises ValueError where a row has no room for them.
        """
        self.positions = self._begin(s)
        return self.positions

    def _begin(self, s: int) -> Tensor | slice:
        longest = max(self.lengths) + s
        if longest > self.capacity:
            raise ValueError(f"the cache has room for {self.capacity} tokens in a row; {longest} are too many")
        first, device, stored = self.lengths[0], self._stored.device, self._stored.transpose(3, 4)
        if len(set(self.lengths)) == 1:
            mask = None
            if first and s > 1:
                mask = torch.ones((s, longest), dtype=torch.bool, device=device).tril(first)
            seen = stored[..., :longest, :] if first else None
            self._announce(stored[..., first:longest, :], None, seen, mask)
            return slice(first, longest)
        starts = integers(self.lengths, device)
        positions = starts[:, None] + torch.arange(s, dtype=torch.int64, device=device)
        slots = torch.arange(len(self.lengths), dtype=torch.int64, device=device)[:, None], positions
        mask = (torch.arange(longest, dtype=torch.int64, device=device) <= positions[..., None]).unsqueeze(1)
        self._announce(stored, slots, stored[..., :longest, :], mask)
        return positions

    def _announce(
        self, room: Tensor, slots: tuple[Tensor, Tensor] | None, seen: Tensor | None, mask: Tensor | None
    ) -> None:
        """Give each layer its part of what `LayerCache.extend` needs.

        It is done for all layers together, because it takes longer within a layer, where the core's caches are cold.

        room: [2, layers, b, heads, n, d], where new keys and values go. seen: the same, what the new tokens see.
        """
        for number, layer in enumerate(self.layers):
            layer.room, layer.slots = (room[0, number], room[1, number]), slots
            layer.seen = None if seen is None else Seen(seen[0, number], seen[1, number], mask, causal=False)

    def advance(self, counts: Sequence[int]) -> None:
        """Say how many of each row's new tokens are real; these come first."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]


class LayerCache:
    """One layer's part of a `KeyValueCache`."""

    #: [b, heads, n, d], to which new keys and values go; their rows and places there, or None if they fill it
    room: tuple[Tensor, Tensor]
    slots: tuple[Tensor, Tensor] | None
    #: what the new tokens see; None for each other
    seen: Seen | None

    def extend(self, k: Tensor, v: Tensor) -> Seen:
        """Store the keys and values [b, heads, s, d] of the tokens that `KeyValueCache.begin` announced.

        Returns all that these tokens attend to.
        """
        if k.requires_grad:
            raise ValueError("a key-value cache keeps no gradients; call the model within torch.no_grad()")
        keys, values = self.room
        if self.slots is None:
            keys.copy_(k)
            values.copy_(v)
        else:
            row, position = self.slots
            # Two indices around a slice: torch puts their shape first. Under autocast k and v have its dtype.
            keys[row, :, position] = k.transpose(1, 2).to(keys.dtype)
            values[row, :, position] = v.transpose(1, 2).to(values.dtype)
        return Seen(k, v, None, causal=True) if self.seen is None else self.seen
