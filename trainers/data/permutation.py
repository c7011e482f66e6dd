"""The order in which a run reads the samples of a source: each once in an epoch, each epoch in an order of its own."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

from .samples import PERMUTATION, philox

#: the most samples whose order is held, in 4 bytes each. The order of more is computed sample by sample (`_Bijection`)
HELD = 1 << 20

#: of the Feistel network: four make a strong pseudorandom permutation if the round function is random (Luby & Rackoff
#: 1988), and two more cost 0.4 us
ROUNDS = 6


class EpochPermutation:
    """The sample index for global sample number n: every index once per epoch, each epoch in its own order.

    Epoch ``e = n // size`` is permuted by (seed, e). The index is a pure function of n. At most 4 MB are held, whatever
    the size. Numbers are best read in rising order, because each epoch is prepared when one of its numbers comes.
    """

    def __init__(self, size: int, seed: int) -> None:
        self.size, self.seed = size, seed
        self._epoch = -1
        self._order: npt.NDArray[np.uint32] | _Bijection = np.empty(0, dtype=np.uint32)

    def __getitem__(self, n: int) -> int:
        """The index, 0 <= index < size, of global sample number n >= 0; n has no upper bound."""
        epoch, place = divmod(int(n), self.size)
        if epoch != self._epoch:
            self._order, self._epoch = self._permutation(epoch), epoch
        return int(self._order[place])

    def _permutation(self, epoch: int) -> npt.NDArray[np.uint32] | _Bijection:
        random = philox(self.seed, PERMUTATION, epoch)
        if self.size > HELD:
            return _Bijection(self.size, [int(key) for key in random.random_raw(ROUNDS)])
        # A key has random high bits and the index in its low bits. No two keys are equal, so any sort of any version
        # gives the same order. Sorting values in place is several times as fast as argsort.
        bits = np.uint64(self.size.bit_length())
        keys: npt.NDArray[np.uint64] = random.random_raw(self.size)
        keys >>= bits
        keys <<= bits
        keys |= np.arange(self.size, dtype=np.uint64)
        keys.sort()
        keys &= (np.uint64(1) << bits) - np.uint64(1)
        return keys.astype(np.uint32)


class _Bijection:
    """A pseudorandom permutation of the numbers below ``size``, of which nothing is held but its keys.

    It is a Feistel network on as many bits as the numbers have, whose round function is XXH3. A result that is no
    number below ``size`` goes through it again until it is one (cycle walking, Black & Rogaway 2002): less than once
    more on average. A small domain would show that such permutations are not all equally likely, so it is for large
    ones.
    """

    def __init__(self, size: int, keys: list[int]) -> None:
        self._size = size
        self._rounds = list(zip(keys[::2], keys[1::2], strict=True))
        bits = (size - 1).bit_length()
        self._shift = bits // 2
        self._low, self._high = (1 << self._shift) - 1, (1 << (bits - self._shift)) - 1

    def __getitem__(self, place: int) -> int:
        """The number at ``place``, 0 <= place < size."""
        while True:
            high, low = place >> self._shift, place & self._low
            for one, other in self._rounds:
                high ^= xxhash.xxh3_64_intdigest(low.to_bytes(8, "little"), one) & self._high
                low ^= xxhash.xxh3_64_intdigest(high.to_bytes(8, "little"), other) & self._low
            place = high << self._shift | low
            if place < self._size:
                return place
