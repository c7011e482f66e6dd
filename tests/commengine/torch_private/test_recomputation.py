"""Each recomputation is seen, and a torch of which none can be seen is refused."""

import pytest
import torch
from torch.utils import checkpoint

from commengine.torch_private import MissingInTorch, recomputation, watched_recomputation


def test_a_recomputation_is_seen_or_the_torch_is_refused(monkeypatch):
    """Whether or not gradients are followed; and a torch that calls another function is noticed at once."""
    found = []
    with watched_recomputation(found.append), torch.no_grad():
        found.clear()
        checkpoint.checkpoint(torch.clone, torch.ones(3), use_reentrant=False)
    assert any(isinstance(one, torch.Tensor) and one.numel() == 3 for one in found[0])
    monkeypatch.setattr(recomputation, "RECOMPUTATION", ("_no_such_name",))
    with pytest.raises(MissingInTorch, match="which a trace that must see recomputations needs"):
        watched_recomputation(found.append).__enter__()
    checkpoint.checkpoint(torch.clone, torch.ones(3), use_reentrant=False)
    assert len(found) == 1
