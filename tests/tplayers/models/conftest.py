"""A model over all ranks, and the same one over a rank alone."""

import pytest
import torch


@pytest.fixture
def pair(group, alone, request):
    """From a config: the module's MODEL over all ranks, and the same one over this rank alone."""

    def pair(shape):
        split, whole = (request.module.MODEL(shape, side.comm, dtype=torch.float64) for side in (group, alone))
        alone.load(whole, group.fill(split, scale=0.3))
        return split, whole

    return pair
