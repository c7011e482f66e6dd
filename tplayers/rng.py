"""Random numbers that are a function of position, never of history.

A dropout mask is a pure function of (seed, iteration, global sample, site, position), and inside attention also of the
global head. It is therefore the same at every TP and DP size, equal on all ranks where the activation is replicated and
different where it is split (paper, appendix B.2), and a recomputation draws it again without a saved state.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .dropout_kernel import drawn_mask
from .functions import finished
from .host_copy import integers

_GOLDEN = -7046029254386353131  # 2^64 / golden ratio, as int64


def stable_hash(*parts: int | str) -> int:
    """A 64-bit signed hash of ``parts``, the same in every process and release."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def generator(seed: int, name: str) -> torch.Generator:
    """A CPU generator whose seed follows from ``seed`` and ``name``."""
    return torch.Generator("cpu").manual_seed(stable_hash(seed, name))


class Randomness:
    """The source of the dropout masks of one forward pass.

    seed: of the run. iteration: of training. samples: the global number of each sample of the microbatch, in order.
    device: the device of ``base``.

    ``base`` is an int64 tensor with a hash for each sample. Everything that changes from step to step is in this
    tensor, so that a compiled model takes it as an input and is not compiled again for every step. A site, the name of
    a place where dropout is applied, is a constant of the program. ``parts`` are seed, iteration and samples.
    """

    def __init__(
        self, seed: int, iteration: int, samples: Sequence[int], *, device: torch.device | None = None
    ) -> None:
        self.base = integers([stable_hash(seed, iteration, sample) for sample in samples], device)
        self.parts = (seed, iteration, *samples)

    def keys(self, site: str, heads: range | Tensor | None = None) -> Tensor:
        """The int64 keys of the dropout at ``site``: one per sample [b], or per sample and global head [b, heads].

        heads: the global heads, or their `head_offsets`. A caller that keeps the offsets on the device saves a copy
        from the host, which would wait for the device.
        """
        keys = _mix64(self.base ^ _hash_of_site(site))
        if heads is None:
            return keys
        offsets = head_offsets(heads, keys.device) if isinstance(heads, range) else heads
        return _mix64(keys[:, None] + offsets)

    def rank_seed(self, site: str, rank: int) -> int:
        """The seed of a mask at ``site`` that only rank number ``rank`` of the tensor group draws (`seeded`).

        Micro-batch and rank of the data group enter by the numbers of the samples, which differ between all of them.
        """
        return stable_hash("rank", *self.parts, site, rank)


def head_offsets(heads: range, device: torch.device | None = None) -> Tensor:
    """The int64 number of each global head [heads] that enters its keys (`Randomness.keys`)."""
    # Python numbers, not arange * _GOLDEN: the compiler would compute that in integers that do not wrap around.
    return torch.tensor([_int64(head * _GOLDEN) for head in heads], dtype=torch.int64, device=device)


@contextlib.contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """A block in which torch's generator of ``device`` starts from ``seed``; after it, the generator is as before.

    device: the host or a CUDA device. The generators of other devices are not touched. Nothing waits for the device,
    because torch keeps the state of a CUDA generator on the host.
    """
    generator = torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index]
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)


def _hash_of_site(site: str) -> int:
    return stable_hash(site)


# This mark is all that torch.compiler.assume_constant_result sets; calling it would import the compiler, which takes
# seconds.
_hash_of_site._dynamo_marked_constant = True  # type: ignore[attr-defined]


def dropout(x: Tensor, p: float, keys: Tensor, first_row: int | Tensor = 0) -> Tensor:
    """Zero each element of ``x`` with probability ``p`` and scale the rest by 1 / (1 - p).

    x: [s, b, h] with ``keys`` [b], or [b, heads, s, k] with ``keys`` [b, heads].
    first_row: the global position of row 0 of the s dimension, if the sequence is split; or those of all rows, int64
    [s], if its parts are not neighbours.
    """
    if keys.shape != (x.shape[1:2] if keys.dim() == 1 else x.shape[:2]):
        raise ValueError(f"{list(keys.shape)} dropout keys do not fit an input of shape {list(x.shape)}")
    rows = x.shape[0] if keys.dim() == 1 else x.shape[-2]
    return dropped(x, p, dropout_mask(p, keys.to(x.device), rows, x.shape[-1], first_row))


def dropout_mask(p: float, keys: Tensor, rows: int, columns: int, first_row: int | Tensor = 0) -> Tensor:
    """The mask of `dropout` with ``keys``: bool [rows, b, columns] or [b, heads, rows, columns], True where x stays."""
    if not 0 <= p <= 1:
        raise ValueError(f"dropout probability {p} is not within 0 to 1")
    if isinstance(first_row, Tensor):
        every = torch.arange(columns, dtype=torch.int64, device=keys.device)
        return dropout_mask_at(p, keys, first_row, every, columns)
    if (mask := drawn_mask(keys, rows, columns, first_row, _least(p))) is not None:
        return mask
    counters = torch.arange(first_row * columns, (first_row + rows) * columns, dtype=torch.int64, device=keys.device)
    return _mask_of_counters(p, keys, counters.view(rows, columns))


def dropout_mask_at(p: float, keys: Tensor, rows: Tensor, columns: Tensor, width: int) -> Tensor:
    """`dropout_mask` at some rows and columns of an input that has ``width`` columns: int64 positions of each."""
    return _mask_of_counters(p, keys, rows[:, None] * width + columns)


def _mask_of_counters(p: float, keys: Tensor, counters: Tensor) -> Tensor:
    """`dropout_mask` of elements with these int64 numbers [rows, columns]."""
    counters = counters.to(torch.int32)
    if keys.dim() == 1:
        return keep_mask(counters.unsqueeze(1), keys.view(1, -1, 1), p)
    return keep_mask(counters, keys[:, :, None, None], p)


def dropped(x: Tensor, p: float, mask: Tensor) -> Tensor:
    """`dropout` of ``x`` with its mask (`dropout_mask`)."""
    return _Dropout.apply(x, mask, 1.0 / (1.0 - p) if p < 1 else 0.0)  # type: ignore[no-untyped-call, no-any-return]


def keep_mask(counters: Tensor, keys: Tensor, p: float) -> Tensor:
    """Bool, True with probability 1 - p: a hash of (int64 key, int32 counter), broadcast against each other."""
    return _hashed(counters, keys) >= _least(p)


def _least(p: float) -> int:
    """The smallest hash of an element that stays, with probability 1 - p."""
    return min(int(p * 2**32) - 2**31, 2**31 - 1)


def exponential(counters: Tensor, keys: Tensor) -> Tensor:
    """Float32 numbers of the exponential distribution of mean 1: a hash of (int64 key, int32 counter), as `keep_mask`.

    They lie between 2^-33 and 16.7. Equal keys and counters give equal numbers in every process.
    """
    bits = _hashed(counters, keys)
    bits ^= _shifted(bits, 16)  # the lowest bits count, too: they are all that differs between small numbers
    # Not log(1 - uniform): near 1 a float32 has 2^-24 for its smallest step, and near 0 many more.
    uniform = bits.bitwise_and(2**31 - 1).to(torch.float32).add_(0.5).mul_(2.0**-32) + (bits < 0) * 0.5
    return uniform.clamp_(max=1 - 2.0**-24).neg_().log1p_().neg_()


def _hashed(counters: Tensor, keys: Tensor) -> Tensor:
    """Int32 of any value: a hash of (int64 key, int32 counter), broadcast against each other.

    It is a sequence of multiply-xorshift rounds in int32 (the form of Murmur3's finaliser), and the two halves of the
    key enter between them. The finaliser's last xorshift is left out, because it changes no high bit and mostly those
    matter. The hash is not cryptographic.
    """
    low, high = keys.to(torch.int32), (keys >> 32).to(torch.int32)
    bits = counters ^ low
    bits *= -1640531527
    bits ^= _shifted(bits, 15)
    bits += high
    bits *= -2048144789
    bits ^= _shifted(bits, 13)
    bits *= -1028477379
    return bits


def _int64(x: int) -> int:
    """``x`` modulo 2^64, as int64."""
    return (x + 2**63) % 2**64 - 2**63


def _shifted(x: Tensor, by: int) -> Tensor:
    """Logical shift to the right. torch's shift copies the sign, so x ^ (x >> n) would always clear the sign bit."""
    return (x >> by).bitwise_and_((1 << (x.dtype.itemsize * 8 - by)) - 1)


def _mix64(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * -4658895280553007687
    x = (x ^ _shifted(x, 27)) * -7723592293110705685
    return x ^ _shifted(x, 31)


class _Dropout(torch.autograd.Function):
    """The product with a mask. It keeps one byte per element for the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(keep)
        ctx.scale = scale
        return finished(_masked(x, keep, scale))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (keep,) = ctx.saved_tensors
        return _masked(grads[0], keep, ctx.scale), None, None


def _masked(x: Tensor, keep: Tensor, scale: float) -> Tensor:
    """``x`` times ``keep`` times ``scale``, rounded once."""
    if x.device.type == "cuda" and not torch.compiler.is_compiling():  # one kernel; the host's rounds the scale, too
        return torch.ops.aten.native_dropout_backward(x, keep, scale)  # type: ignore[no-any-return]
    return (x * keep).mul_(scale)
