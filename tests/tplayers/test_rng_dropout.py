"""Dropout masks: a function of position, as random as they need to be; and the kernel that draws them on a device."""

import ctypes
import itertools
import math
import shutil
import subprocess

import pytest
import torch

from tplayers import Randomness, dropout
from tplayers.dropout_kernel import SOURCE, drawn_mask
from tplayers.rng import dropout_mask, dropout_mask_at, keep_mask, stable_hash

M32 = 2**32 - 1
BITS = 1 << 20
KEYS = [0, 1, 2, 3, -1, 1 << 32, 2 << 32, 2**63 - 1, -(2**63), 0x5DEECE66D1234567]


def ones(*shape):
    return torch.ones(shape, dtype=torch.float64)


def kept(keys, p=0.5, s=16, h=32):
    """Bool mask for hidden [s, b, h] or, where keys are per head, for attention [b, heads, s, h]."""
    shape = (s, len(keys), h) if keys.dim() == 1 else (*keys.shape, s, h)
    return dropout(ones(*shape), p, keys) != 0


def centred(key, p, count=BITS):
    """The mask of ``key`` as numbers of mean 0 and variance 1."""
    mask = keep_mask(torch.arange(count, dtype=torch.int32), torch.tensor([key]), p)
    return (mask.double() - (1 - p)) / math.sqrt(p * (1 - p))


# What it computes ------------------------------------------------------------------------------------------------


def scalar_bits(key, counter):
    """The hash in Python's integers, modulo 2^32: the meaning that the tensor code must have."""
    low, high = key & M32, key >> 32 & M32
    bits = (counter ^ low) * 0x9E3779B9 & M32
    bits ^= bits >> 15
    bits = (bits + high) * 0x85EBCA6B & M32
    bits ^= bits >> 13
    bits = bits * 0xC2B2AE3D & M32
    return bits - (bits >> 31 << 32)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_hash_in_python_integers(p):
    keys = [key if key < 2**63 else key - 2**64 for key in KEYS]
    counters = [*range(300), 2**31 - 1, 10**9]
    found = keep_mask(torch.tensor(counters, dtype=torch.int32)[:, None], torch.tensor(keys)[None], p)
    threshold = int(p * 2**32) - 2**31
    assert found.tolist() == [[scalar_bits(key, counter) >= threshold for key in keys] for counter in counters]


def test_mask_is_the_same_in_every_release():
    """A run that resumes, or is repeated, with another release draws the same masks."""
    mask = kept(Randomness(1234, 5, (6,)).keys("layers.0.after_mlp"), s=2, h=16).flatten()
    assert "".join(str(int(bit)) for bit in mask) == HIDDEN
    mask = kept(Randomness(1234, 5, (6,)).keys("layers.0.attention", range(3, 4)), s=2, h=16).flatten()
    assert "".join(str(int(bit)) for bit in mask) == ATTENTION


HIDDEN = "01010101001001100100111000000101"
ATTENTION = "00101100110111011000110100010011"


def scalar_mix(x):
    """The finaliser of SplitMix64 (Steele et al. 2014) in Python's integers, modulo 2^64."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


def test_keys_in_python_integers():
    """Of every sample, and of every sample and head, signs and all."""
    samples, heads = (3, 2**40, 9), range(5, 300, 59)
    randomness = Randomness(7, 11, samples)
    for site in ("embedding", "layers.0.after_mlp"):
        keys = [scalar_mix((stable_hash(7, 11, n) ^ stable_hash(site)) % 2**64) for n in samples]
        assert [key % 2**64 for key in randomness.keys(site).tolist()] == keys
        of_heads = [[scalar_mix((key + head * 0x9E3779B97F4A7C15) % 2**64) for head in heads] for key in keys]
        assert [[key % 2**64 for key in row] for row in randomness.keys(site, heads).tolist()] == of_heads


@pytest.mark.parametrize("p", [0.1, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kept_elements_are_scaled_and_the_rest_are_zero(p, dtype):
    x = torch.randn(16, 2, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    keys = Randomness(1, 2, (3, 4)).keys("site")
    y = dropout(x, p, keys)
    assert y.dtype == dtype
    mask = kept(keys, p)
    torch.testing.assert_close(y, torch.where(mask, x / (1 - p), 0.0).to(dtype), rtol=1e-2, atol=0)
    assert 0 < mask.double().mean() < 1


def test_no_dropout_and_nothing_but_dropout():
    x, keys = torch.randn(16, 2, 32, requires_grad=True), Randomness(1, 2, (3, 4)).keys("site")
    y = dropout(x, 0.0, keys)
    assert torch.equal(y, x)
    y = dropout(x, 1.0, keys)
    assert torch.equal(y, torch.zeros_like(x))
    y.sum().backward()
    assert torch.equal(x.grad, torch.zeros_like(x))


@pytest.mark.parametrize("p", [-0.1, 1.5, 10, math.nan])
def test_probability_outside_0_to_1(p):
    with pytest.raises(ValueError, match="not within 0 to 1"):
        dropout(ones(2, 1, 2), p, torch.zeros(1, dtype=torch.int64))


def test_gradient_uses_the_same_mask():
    x, keys = ones(16, 2, 32).requires_grad_(), Randomness(1, 2, (3, 4)).keys("site")
    y = dropout(x, 0.3, keys)
    gradient = torch.arange(x.numel()).double().view_as(x) + 1
    y.backward(gradient)
    assert torch.equal(x.grad, gradient * y.detach())
    keys = Randomness(1, 2, (3,)).keys("site", range(2))
    assert torch.autograd.gradcheck(lambda x: dropout(x, 0.4, keys), torch.randn(1, 2, 3, 4).double().requires_grad_())


def test_layouts_that_are_not_contiguous():
    x, keys = torch.randn(32, 2, 16).double(), Randomness(1, 2, (3, 4)).keys("site")
    assert torch.equal(dropout(x.transpose(0, 2), 0.5, keys), dropout(x.transpose(0, 2).contiguous(), 0.5, keys))


@pytest.mark.parametrize(
    "shape, keys", [((4, 3, 8), 1), ((4, 1, 8), 3), ((3, 2, 4, 8), (3, 1)), ((3, 2, 4, 8), (1, 2))]
)
def test_keys_that_would_broadcast_are_refused(shape, keys):
    with pytest.raises(ValueError, match="dropout keys do not fit"):
        dropout(torch.ones(shape), 0.5, torch.zeros(keys, dtype=torch.int64))


# What it depends on -----------------------------------------------------------------------------------------------

BASE = {"seed": 1, "iteration": 2, "sample": 3, "site": "layers.0.after_mlp", "head": 0}
CHANGES = [("seed", 2), ("iteration", 3), ("sample", 4), ("site", "layers.0.after_attention"), ("head", 1)]


def mask_of(seed, iteration, sample, site, head):
    return kept(Randomness(seed, iteration, (sample,)).keys(site, range(head, head + 1)), s=64, h=64)


@pytest.mark.parametrize("what, value", CHANGES)
def test_differs_in(what, value):
    """Two masks that have nothing to do with each other agree in half their bits."""
    one, other = mask_of(**BASE), mask_of(**{**BASE, what: value})
    assert torch.equal(one, mask_of(**BASE))
    agreement = (one == other).double().mean().item()
    assert abs(agreement - 0.5) < 4 * 0.5 / 64


def test_numbers_that_swap_places_do_not_collide():
    keys = [
        Randomness(seed, iteration, (sample,)).keys(site, range(head, head + 1)).item()
        for seed, iteration, sample, head in itertools.product(range(4), repeat=4)
        for site in ("a", "b")
    ]
    assert len(set(keys)) == len(keys)


def test_split_batch():
    """Data-parallel ranks with samples (0, 1) and (2, 3) draw what one rank draws for all four."""
    whole = kept(Randomness(1, 2, (0, 1, 2, 3)).keys("site"))
    halves = [kept(Randomness(1, 2, samples).keys("site")) for samples in ((0, 1), (2, 3))]
    assert torch.equal(whole, torch.cat(halves, 1))
    assert not torch.equal(*halves)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_split_heads(tp):
    randomness = Randomness(1, 2, (5, 9))
    whole = kept(randomness.keys("site", range(8)))
    per_rank = 8 // tp
    parts = [kept(randomness.keys("site", range(rank * per_rank, (rank + 1) * per_rank))) for rank in range(tp)]
    assert torch.equal(whole, torch.cat(parts, 1))
    for one, other in itertools.combinations(whole.unbind(1), 2):
        assert abs((one == other).double().mean().item() - 0.5) < 4 * 0.5 / math.sqrt(one.numel())


@pytest.mark.parametrize("parts", [2, 4])
def test_split_sequence(parts):
    """first_row: a rank that holds a slice of the sequence draws the slice of the mask."""
    keys = Randomness(1, 2, (5, 9)).keys("site")
    rows = 16 // parts
    x = ones(16, 2, 32)
    sliced = [dropout(part, 0.5, keys, first_row=i * rows) for i, part in enumerate(x.chunk(parts))]
    assert torch.equal(torch.cat(sliced), dropout(x, 0.5, keys))

    keys = Randomness(1, 2, (5, 9)).keys("site", range(3))
    x = ones(2, 3, 16, 32)
    sliced = [dropout(part, 0.5, keys, first_row=i * rows) for i, part in enumerate(x.chunk(parts, dim=2))]
    assert torch.equal(torch.cat(sliced, 2), dropout(x, 0.5, keys))


def test_no_state_is_kept():
    keys = Randomness(1, 2, (3,)).keys("site")
    first = kept(keys)
    before = torch.get_rng_state()
    torch.rand(5)
    kept(Randomness(9, 9, (9,)).keys("other"))
    torch.set_rng_state(before)
    assert torch.equal(kept(keys), first)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.mpi
@pytest.mark.every_size
def test_replicated_on_all_ranks(group):
    randomness = Randomness(1, 2, (3, 4))
    group.same(kept(randomness.keys("site")).double())
    heads = range(group.rank, group.rank + 1)
    masks = group.ranks(kept(randomness.keys("site", heads)).double())
    for one, other in itertools.combinations(masks, 2):
        assert not torch.equal(one, other)


# How random it is -------------------------------------------------------------------------------------------------
# Everything is deterministic: a bound is either met for good or not. 5 sigma leave room for the many comparisons.


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("key", KEYS)
def test_rate_within_4_sigma(p, key):
    assert abs(centred(key, p).sum()) < 4 * math.sqrt(BITS)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_no_correlation_between_neighbours_rows_and_far_positions(p):
    lags = [*range(1, 34), 63, 64, 65, 127, 128, 256, 512, 768, 1000, 1024, 1600, 2048, 4096, 8192, 65536, 1 << 18]
    for key in KEYS:
        mask = centred(key, p)
        for lag in lags:
            assert abs((mask[:-lag] @ mask[lag:]).item()) < 5 * math.sqrt(BITS - lag), (key, lag)


@pytest.mark.slow
@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize(
    "keys",
    [list(range(16)), [k << 32 for k in range(16)], [0, *(1 << k for k in range(0, 50, 4))]],
    ids=["sequential", "sequential high halves", "one bit"],
)
def test_no_correlation_between_keys(p, keys):
    """Even such as differ in one bit (but for the highest 13, where one bit is too little for this short a hash).

    The keys in use are hashes themselves and differ in half their bits: the next test.
    """
    masks = torch.stack([centred(key, p) for key in keys])
    products = (masks @ masks.T / math.sqrt(BITS)).fill_diagonal_(0)
    assert products.abs().max() < 5


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_sequential_samples_iterations_and_heads_are_independent(p):
    keys = [Randomness(1, 0, (sample,)).keys("x").item() for sample in range(6)]
    keys += [Randomness(1, iteration, (0,)).keys("x").item() for iteration in range(1, 6)]
    keys += Randomness(1, 0, (0,)).keys("x", range(6)).flatten().tolist()
    masks = torch.stack([centred(key, p) for key in keys])
    products = (masks @ masks.T / math.sqrt(BITS)).fill_diagonal_(0)
    assert products.abs().max() < 5


@pytest.mark.parametrize("key", KEYS)
def test_bytes_of_the_mask_are_uniform(key):
    """Chi-square over all patterns of 8 neighbouring bits: 255 degrees of freedom."""
    bits = keep_mask(torch.arange(BITS, dtype=torch.int32), torch.tensor([key]), 0.5)
    patterns = (bits.view(-1, 8) * (1 << torch.arange(8))).sum(1)
    counts = torch.bincount(patterns, minlength=256).double()
    expected = BITS / 8 / 256
    chi_square = ((counts - expected).square() / expected).sum().item()
    assert abs(chi_square - 255) < 5 * math.sqrt(2 * 255)


@pytest.mark.slow
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("columns", [64, 1000, 1024])
def test_rows_and_columns_vary_as_binomials_do(p, columns):
    """A hash that spreads its bits too evenly, or clumps them, has the right rate and the wrong variance."""
    for key in KEYS:
        grid = centred(key, p)[: BITS // columns * columns].view(-1, columns)
        for sums in (grid.sum(1) / math.sqrt(grid.shape[1]), grid.sum(0) / math.sqrt(grid.shape[0])):
            assert abs(sums.var().item() - 1) < 6 * math.sqrt(2 / len(sums)), key
            assert sums.abs().max() < 6


def test_both_signs_of_the_hash_occur():
    """An arithmetic shift in x ^ (x >> n) clears the sign for good: then p < 1/2 would drop nothing at all."""
    for p in (0.01, 0.1, 0.3, 0.49, 0.51, 0.99):
        assert abs(centred(KEYS[-1], p).mean()) < 4 / math.sqrt(BITS)


# The kernel --------------------------------------------------------------------------------------------------------

AS_C = """
#define __global__
struct { int x; } blockIdx, threadIdx, gridDim = {3}, blockDim = {5};
"""
STARTED = """
extern "C" void start(unsigned char *m, const long long *k, const long long *n, int least) {
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < blockDim.x; threadIdx.x++)
            keep_mask(m, k, n[0], n[1], n[2], n[3], n[4], n[5], n[6], least);
}
"""
#: shape of the keys, rows, columns, first row. The last counters wrap around 2^31 and 2^32
CASES = [
    ((3,), 4, 7, 0), ((2,), 5, 16, 11), ((2, 3), 6, 9, 0), ((1, 4), 1, 1, 3), ((2,), 3, 1000, 2147484),
    ((2, 2), 2, 3, 1431655764),
]  # fmt: skip


def keys_of(shape, device=None):
    keys = Randomness(7, 3, tuple(range(shape[0]))).keys("here", range(5, 5 + shape[1]) if shape[1:] else None)
    return keys.to(device)


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("kernel")
    (folder / "kernel.cpp").write_text(AS_C + SOURCE + STARTED)
    subprocess.run(["c++", "-O1", "-shared", "-fPIC", "kernel.cpp", "-o", "kernel.so"], cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "kernel.so")).start


@pytest.mark.slow
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("case", CASES)
def test_the_source_draws_the_masks_of_the_operators(start, monkeypatch, case, p):
    """`drawn_mask` itself calls it, with the arguments that it gives the device."""
    shape, rows, columns, first = case
    keys = keys_of(shape)

    def kernel(lines, arguments, least):
        mask, key, *sizes = arguments
        numbers = (ctypes.c_longlong * len(sizes))(*sizes)
        start(ctypes.c_void_p(mask), ctypes.c_void_p(key), numbers, ctypes.c_int(least))

    class OnTheHost(torch.Tensor):
        """A host tensor that says it is on a device."""

        device = property(lambda self: type("Device", (), {"type": "cuda"}))

    monkeypatch.setattr("tplayers.dropout_kernel.compiled", lambda source, name: kernel)
    monkeypatch.setattr("torch.cuda.device", lambda device: torch.no_grad())
    made = torch.empty
    monkeypatch.setattr("torch.empty", lambda *args, device, **named: made(*args, **named).fill_(True))
    least = min(int(p * 2**32) - 2**31, 2**31 - 1)
    found = drawn_mask(keys.as_subclass(OnTheHost), rows, columns, first, least)
    assert torch.equal(found, dropout_mask(p, keys, rows, columns, first))


def test_the_host_has_no_kernel():
    assert drawn_mask(keys_of((2,)), 3, 4, 0, 0) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device, or not asked for with -m gpu")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_dropout_on_a_device_has_the_hosts_bits(case, dtype):
    """The values, too: on both sides a product is rounded once."""
    shape, rows, columns, first = case
    whole = (*shape, rows, columns) if shape[1:] else (rows, shape[0], columns)
    x = torch.randn(whole, generator=torch.Generator().manual_seed(1)).to(dtype)
    x.view(-1)[0] = -float("inf")
    results = []
    for device in ("cpu", "cuda"):
        given = x.to(device, copy=True).requires_grad_()
        y = dropout(given, 0.3, keys_of(shape, device), first)
        y.backward(given.detach())
        results.append((y.detach().cpu(), given.grad.cpu()))
    for host, found in zip(*results, strict=True):
        torch.testing.assert_close(found, host, rtol=0, atol=0, equal_nan=True)
    assert drawn_mask(keys_of(shape, "cuda"), rows, columns, first, 0) is not None


def test_dropout_of_some_positions_is_that_of_the_whole_sequence():
    keys = Randomness(1, 2, (3, 4)).keys("site", range(3))
    rows, columns = torch.tensor([0, 4, 9]), torch.tensor([2, 3, 8, 11])
    whole = dropout_mask(0.4, keys, 12, 12)
    assert torch.equal(dropout_mask_at(0.4, keys, rows, columns, 12), whole[:, :, rows[:, None], columns])
