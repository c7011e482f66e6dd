"""The copy computes what the model does in evaluation mode, from the same tensors, and leaves the model alone."""

import pytest
import torch
from torch import nn

from tests.support.small_models import VOCAB, made
from tplayers.generation.fast_weights import inference_copy

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2)]

TOKENS = torch.randint(VOCAB, (2, 8), generator=torch.Generator().manual_seed(5))


@pytest.mark.every_size
@pytest.mark.parametrize("split", [False, True], ids=["plain", "sequence parallel"])
def test_it_computes_what_the_model_does(group, split):
    """The model has dropout and is in training, which it stays; with the bits of a model that is evaluated."""
    model, plain = made("gpt", group.comm, sequence_parallel=split), made("gpt", group.comm).eval()
    copied = inference_copy(model)
    with torch.inference_mode():
        assert torch.equal(copied(TOKENS), plain(TOKENS))
    assert all(module.training for module in model.modules())
    assert model.sequence_parallel == model.layers[0].mlp.up.sequence_parallel == split
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_it_sees_changes_of_the_weights(group):
    model = made("gpt", group.comm).eval()
    copied = inference_copy(model)
    with torch.inference_mode():
        before = copied(TOKENS)
        model.layers[1].mlp.down.weight.mul_(3.0)
        assert not torch.equal(copied(TOKENS), before)
        assert torch.equal(copied(TOKENS), model(TOKENS))


def test_hooks_of_a_module_run(group):
    model, called = made("gpt", group.comm).eval(), []
    model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: called.append("after"))
    model.layers[1].register_forward_pre_hook(lambda module, inputs: called.append("before"))
    with torch.inference_mode():
        inference_copy(model)(TOKENS)
    assert called == ["after", "before"]


def test_modules_within_any_container_are_copied(group):
    """Buffers, missing parameters, and a module that stands at two places."""
    shared = nn.Linear(4, 4, bias=False)
    model = nn.Sequential(shared, nn.BatchNorm1d(4), nn.Dropout(0.9), shared)
    x = torch.arange(8.0).view(2, 4)
    with torch.inference_mode():
        found = inference_copy(model)(x)
        assert model.training and int(model[1].num_batches_tracked) == 0
        assert torch.equal(found, model.eval()(x))
