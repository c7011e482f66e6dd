"""KeyValueCache: keys and values of the tokens that went through a causal model, so that none goes through twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tplayers.host_copy import to_device


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

    layers, heads, head_size: of the model; ``heads`` of this rank. capacity: the most tokens of a row.
    It has 2 * layers * batch * heads * capacity * head_size elements of ``dtype`` (`nbytes`).

    A forward pass of s new tokens in each row calls `begin` once and each layer's `LayerCache.extend`. Then `advance`
    says how many of the s tokens are real. The next pass overwrites the others, which no real token has seen, because
    they come after it. The passes keep no gradients (else ValueError).
    """

    def __init__(
        self, layers: int, batch: int, heads: int, head_size: int, capacity: int, *, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        # Zeros, because attention multiplies what it does not see by 0, and uninitialised memory may hold a NaN.
        self._stored = torch.zeros((2, layers, batch, heads, capacity, head_size), dtype=dtype, device=device)
        self.capacity = capacity
        self.lengths = [0] * batch
        self.layers = [LayerCache(self, number) for number in range(layers)]
        self._first = 0
        self._slots: tuple[Tensor, Tensor] | None = None
        self._mask: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of the keys and values of this rank."""
        return self._stored.nbytes

    def clear(self) -> None:
        """Forget all tokens, and keep the memory."""
        self.lengths = [0] * len(self.lengths)

    def keep(self, rows: Sequence[int]) -> None:
        """Make the given rows, in this order, the rows of the cache. A row may stand there several times, or not."""
        self._stored = self._stored.index_select(2, to_device(torch.tensor(rows), self._stored.device))
        self.lengths = [self.lengths[row] for row in rows]

    def begin(self, s: int) -> Tensor | slice:
        """Prepare for ``s`` new tokens in each row, and return their positions: int64 [b, s], or a slice for all rows.

        Raises ValueError where a row has no room for them.
        """
        longest = max(self.lengths) + s
        if longest > self.capacity:
            raise ValueError(f"the cache has room for {self.capacity} tokens in a row; {longest} are too many")
        self._first, self._slots, self._mask = self.lengths[0], None, None
        device = self._stored.device
        if len(set(self.lengths)) == 1:
            if self._first and s > 1:
                self._mask = torch.ones((s, longest), dtype=torch.bool, device=device).tril(self._first)
            return slice(self._first, longest)
        starts = to_device(torch.tensor(self.lengths), device)
        positions = starts[:, None] + torch.arange(s, device=device)
        self._slots = torch.arange(len(self.lengths), device=device)[:, None], positions
        self._mask = (torch.arange(longest, device=device) <= positions[..., None]).unsqueeze(1)
        return positions

    def advance(self, counts: Sequence[int]) -> None:
        """Say how many of each row's new tokens are real; these come first."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def extend(self, layer: int, k: Tensor, v: Tensor) -> Seen:
        """Store the keys and values [b, heads, s, d] of the tokens that `begin` announced, and return all they see."""
        if k.requires_grad:
            raise ValueError("a key-value cache keeps no gradients; call the model within torch.no_grad()")
        keys, values = self._stored[0, layer], self._stored[1, layer]
        s = k.shape[2]
        if self._slots is not None:
            row, position = self._slots
            keys[row, :, position] = k.transpose(1, 2)  # two indices around a slice: torch puts their shape first
            values[row, :, position] = v.transpose(1, 2)
            assert self._mask is not None
            end = self._mask.shape[-1]
            return Seen(keys[:, :, :end], values[:, :, :end], self._mask, causal=False)
        end = self._first + s
        keys[:, :, self._first : end] = k
        values[:, :, self._first : end] = v
        if not self._first:
            return Seen(k, v, None, causal=True)
        return Seen(keys[:, :, :end], values[:, :, :end], self._mask, causal=False)


class LayerCache:
    """One layer's part of a `KeyValueCache`."""

    def __init__(self, cache: KeyValueCache, layer: int) -> None:
        self._cache, self._layer = cache, layer

    def extend(self, k: Tensor, v: Tensor) -> Seen:
        """Store the keys and values [b, heads, s, d] of new tokens; return what these tokens attend to."""
        return self._cache.extend(self._layer, k, v)
