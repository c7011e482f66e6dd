"""The kernel of dropout's masks: its source, compiled for the host; and on a device, against the host's operators."""

import ctypes
import shutil
import subprocess

import pytest
import torch

from tplayers import Randomness, dropout
from tplayers.dropout_kernel import SOURCE, drawn_mask
from tplayers.rng import dropout_mask

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

    monkeypatch.setattr("tplayers.dropout_kernel._kernel", lambda: kernel)
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
