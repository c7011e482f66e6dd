"""Copies to a device: pinned and not waited for; and no other copies in a layer's training pass."""

import torch
from torch.overrides import TorchFunctionMode

from tests.support.small_models import block
from tplayers import Randomness, initialize
from tplayers.host_copy import to_device

META = torch.device("meta")


class OnDevice(torch.Tensor):
    """Host memory that records how it is copied to a device."""

    def pin_memory(self):
        pinned = self.clone()
        pinned.pinned = True
        return pinned

    def to(self, device, non_blocking=False):
        assert device == torch.device("cuda", 1)
        assert non_blocking and self.pinned, "the host would wait"
        return self.as_subclass(torch.Tensor)


def test_a_copy_to_cuda_is_pinned_and_not_waited_for():
    x = torch.arange(6).view(2, 3)
    assert torch.equal(to_device(x.as_subclass(OnDevice), torch.device("cuda", 1)), x)


def test_the_host_gets_the_tensor_itself():
    x = torch.arange(6)
    assert to_device(x, torch.device("cpu")) is x


class Constructions(TorchFunctionMode):
    """Counts the tensors that are made from Python numbers: on a device each is a copy that the host waits for."""

    count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.count += function in (torch.tensor, torch.as_tensor, torch.asarray)
        return function(*args, **(kwargs or {}))


def test_a_training_pass_copies_nothing_from_the_host(ranks_of):
    """On the meta device, which has no values, everything that reads one raises an error."""
    (alone,) = ranks_of(1)
    layer = block(alone, 16, 4, 64, hidden_dropout=0.1, attention_dropout=0.1).to(META)
    randomness = Randomness(1, 2, (3, 4), device=META)
    x = torch.empty(8, 2, 16, device=META, requires_grad=True)
    with Constructions() as constructions:
        layer(x, randomness).sum().backward()
        assert constructions.count == 0
        torch.tensor([1])
        assert constructions.count == 1


def test_a_module_that_was_made_without_memory_draws_the_same_masks(ranks_of):
    (alone,) = ranks_of(1)
    x, randomness = torch.randn(8, 2, 16), Randomness(1, 2, (3, 4))
    expected = block(alone, 16, 4, 64, hidden_dropout=0.1, attention_dropout=0.1)
    with META:
        found = block(alone, 16, 4, 64, hidden_dropout=0.1, attention_dropout=0.1)
    for layer in (expected, found.to_empty(device="cpu")):
        initialize(layer, 5)
    assert torch.equal(found(x, randomness), expected(x, randomness))
