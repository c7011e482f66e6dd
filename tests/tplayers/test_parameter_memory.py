"""New parameters hold NaN, unless a reader is about to fill them."""

import threading

import pytest
import torch
from torch import nn

from tplayers import LayerNorm, Placement, add_parameter
from tplayers.parameter_memory import parameter_memory, unfilled_parameters


def is_filled(shape=(3, 4)):
    """Whether a new parameter is written to: memory that was freed with other values is given again."""
    for _ in range(8):
        torch.ones(shape)
    return bool(parameter_memory(shape, torch.float32).isnan().all())


def test_a_parameter_is_filled_outside_of_the_block_alone(monkeypatch):
    assert is_filled()
    with unfilled_parameters():
        assert not is_filled()
        found = []
        other = threading.Thread(target=lambda: found.append(is_filled()))
        other.start()
        other.join()
        assert found == [True]  # the block is of one thread
        assert parameter_memory((2, 5), torch.bfloat16).shape == (2, 5)
        assert parameter_memory((2, 5), torch.bfloat16).dtype == torch.bfloat16
    assert is_filled()
    with pytest.raises(KeyError), unfilled_parameters():
        raise KeyError
    assert is_filled()


def test_a_layer_that_is_made_in_the_block_has_its_placement(monkeypatch):
    monkeypatch.setattr(torch, "full", lambda *_, **__: pytest.fail("a parameter was filled"))
    with unfilled_parameters():
        module = nn.Module()
        add_parameter(module, "weight", Placement((4, 2)))
        assert module.weight.shape == (4, 2) and module.weight.requires_grad
        assert LayerNorm(8).weight.shape == (8,)
