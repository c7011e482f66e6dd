"""Copies between addresses: all bytes, and no others, wherever the two lie."""

import pytest
import torch

from commengine.shared_memory.copying import copy_bytes


@pytest.mark.parametrize("behind", [-40, -1, 0, 1, 17, 63, 64, 100])
def test_copies_are_right_wherever_they_lie(behind):
    memory = torch.randint(0, 256, (40_000,), dtype=torch.uint8)
    target = torch.zeros(40_000, dtype=torch.uint8)
    start = 4200 + (memory.data_ptr() - target.data_ptr() + behind) % 4096
    for nbytes in (0, 1, 4096, 4097, 30_000):
        target.zero_()
        copy_bytes(target.data_ptr() + start, memory.data_ptr() + 4200, nbytes)
        assert torch.equal(target[start : start + nbytes], memory[4200 : 4200 + nbytes])
        assert not target[:start].any() and not target[start + nbytes :].any()
