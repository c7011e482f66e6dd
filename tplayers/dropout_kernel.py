"""Dropout's mask in one CUDA kernel: the integers of `rng`, which torch's operators would write to memory each.

Where there is no CuPy, or it cannot compile, torch's operators draw the same mask. A compiled graph does not come here,
because its compiler fuses the operators itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from commengine.device.kernel import compiled

#: Each block draws lines of the mask: the elements of one key and one row. Plain C, so that a test runs it on the host.
SOURCE = r"""
extern "C" __global__ void keep_mask(
    unsigned char *mask, const long long *keys, long long lines, long long columns, long long key_stride,
    long long key_count, long long row_stride, long long rows, long long first_row, int least)
{
    for (long long line = blockIdx.x; line < lines; line += gridDim.x) {
        const long long key = keys[line / key_stride % key_count];
        const unsigned low = (unsigned)key, high = (unsigned)(key >> 32);
        const long long start = (first_row + line / row_stride % rows) * columns;
        for (long long column = threadIdx.x; column < columns; column += blockDim.x) {
            unsigned bits = (unsigned)(start + column) ^ low;
            bits *= 2654435769u;
            bits ^= bits >> 15;
            bits += high;
            bits *= 2246822507u;
            bits ^= bits >> 13;
            bits *= 3266489917u;
            mask[line * columns + column] = (int)bits >= least;
        }
    }
}
"""


def drawn_mask(keys: Tensor, rows: int, columns: int, first_row: int, least: int) -> Tensor | None:
    """`rng.dropout_mask` for ``keys`` on a CUDA device; None where the kernel cannot draw it.

    least: the smallest value of a hash whose element stays. The mask is enqueued on torch's current stream.
    """
    # A fake tensor of torch's tracers has no memory.
    if keys.device.type != "cuda" or torch.compiler.is_compiling() or hasattr(keys, "fake_mode"):
        return None
    with torch.cuda.device(keys.device):  # CuPy, too, takes it
        return _drawn(keys, rows, columns, first_row, least)


def _drawn(keys: Tensor, rows: int, columns: int, first_row: int, least: int) -> Tensor | None:
    if (start := compiled(SOURCE, "keep_mask")) is None:
        return None
    keys = keys.contiguous()
    number = keys.numel()
    shape = (rows, number, columns) if keys.dim() == 1 else (*keys.shape, rows, columns)
    mask = torch.empty(shape, dtype=torch.bool, device=keys.device)
    if mask.numel() == 0:
        return mask
    key_stride, row_stride = (1, number) if keys.dim() == 1 else (rows, 1)
    sizes = (rows * number, columns, key_stride, number, row_stride, rows, first_row)
    start(rows * number, (mask.data_ptr(), keys.data_ptr(), *sizes), least)
    return mask
