"""GPT, Llama and BERT over (tensor, context) grids: losses, logits and all gradients of the model on one rank."""

import pytest
import torch

import tplayers
from commengine import Communicator, ProcessGrid
from tests.support.small_models import KINDS, arguments, made, total
from tplayers.context.group import CONTEXT_METHODS, ContextGroup


@pytest.fixture(scope="module")
def grids(mpi_world):
    """With 2 ranks (1, 2); with 4 ranks (2, 2) and (1, 4)."""
    with Communicator(mpi_world) as world:
        found = [ProcessGrid(world, tensor=world.size // context, context=context) for context in {2, world.size}]
        yield found
        for grid in found:
            grid.close()


def results(model, kind, context=None, tensor=None):
    """The sum of the losses and the gradients: of all ranks of the context group."""
    inputs, named = arguments(kind)
    loss = total(model(*inputs, **named))
    loss.backward()
    if model.config.sequence_parallel:
        tplayers.sum_partial_gradients(model, tensor)
    found = {"loss": loss.detach()[None]} | {name: p.grad for name, p in model.named_parameters()}
    for part in found.values() if context is not None else ():
        context.all_reduce(part)
    return found


OPTIONS = {
    "plain": {},
    "selective": {"recompute": "selective"},
    "full and sequence-parallel": {"recompute": "full", "sequence_parallel": True},
}


@pytest.mark.some(14)
@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(2, 4)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", CONTEXT_METHODS)
def test_losses_and_gradients(grids, alone, close, method, kind, options):
    """With dropout: its masks are those of the positions in the whole sequence."""
    whole = made(kind, alone.comm, dtype=torch.float64)
    expected = results(whole, kind)
    for grid in grids:
        context = ContextGroup(grid.context, method, causal=whole.config.causal)
        model = made(kind, grid.tensor, dtype=torch.float64, context=context, **OPTIONS[options])
        found = results(model, kind, grid.context, grid.tensor)
        close(found.pop("loss"), expected["loss"])
        for name, placement in tplayers.placements(model).items():
            close(found[name], placement.part(expected[name]))


@pytest.mark.mpi
@pytest.mark.sizes(2, only=True)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", CONTEXT_METHODS)
def test_logits_are_of_the_own_positions(grids, alone, close, method, kind):
    whole = made(kind, alone.comm, dtype=torch.float64).eval()
    context = ContextGroup(grids[0].context, method, causal=whole.config.causal)
    model = made(kind, grids[0].tensor, dtype=torch.float64, context=context).eval()
    inputs, named = arguments(kind)
    given = (inputs[0], *(inputs[1:] if not whole.config.causal else ()))
    at = {"positions": named["positions"]} if "positions" in named else {}
    expected, found = whole(*given, **at), model(*given, **at)
    if whole.config.causal:
        close(found, context.take(expected, 1))
        return
    close(found[1], expected[1])  # of sentence order, on every rank
    if not at:
        close(found[0], context.take(expected[0], 1))


@pytest.mark.mpi
@pytest.mark.sizes(2, only=True)
def test_a_sequence_that_does_not_fit(grids, alone):
    tokens = torch.zeros(1, 6, dtype=torch.int64)
    for method, multiple in (("ulysses", 2), ("ring", 4)):
        model = made("gpt", alone.comm, context=ContextGroup(grids[0].context, method)).eval()
        if 6 % multiple:
            with pytest.raises(ValueError, match="sequence_length=6"):
                model(tokens)
        else:
            assert model(tokens).shape[1] == 3
    cache = model.new_cache(1, 4)
    for length in (1, 4):
        with pytest.raises(ValueError, match="excludes a context group"):
            model(tokens[:, :length], cache=cache)
