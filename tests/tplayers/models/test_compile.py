"""torch.compile of layers and models: one graph, the numbers and the collectives of eager, no second compilation."""

import shutil

import pytest
import torch

import commengine
from commengine import CollectiveError, Communicator
from tests.support.small_models import KINDS, arguments, block, made
from tplayers import MLP, Randomness, initialize
from tplayers import sum_partial_gradients as sum_partial

pytestmark = pytest.mark.mpi

S, B, H, HEADS, STEPS = 8, 2, 16, 4, 3


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compare(comm, module, inputs, backend, **tolerance):
    """Steps of ``module``, eager and compiled; what each communicates. inputs: of a step, (arguments, named ones)."""
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    said = []
    for step in range(STEPS):
        results = []
        for call in (module, compiled):
            module.zero_grad()
            # Iteration and samples change from step to step: the graph must take them as they come.
            with torch._dynamo.config.patch(error_on_recompile=step > 0), commengine.trace(comm) as log:
                positional, named = inputs(step)
                y = call(*positional, **named)
                losses = [y] if isinstance(y, torch.Tensor) else list(y)
                sum(part.sum() for part in losses).backward()
            results.append([*(part.detach() for part in losses), *(p.grad for p in module.parameters())])
            said.append([(event.operation, event.redop, event.elements) for event in log.events])
        torch.testing.assert_close(results[1], results[0], **tolerance)
    assert said == said[:2] * STEPS
    return said[:2]


@pytest.mark.mpi(min_size=2)
@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_model(group, kind):
    """Bit-equal: this backend runs the operations that eager runs. The collectives, too, and in their order."""
    model = made(
        kind, group.comm, overlap_stream=group.comm.new_stream(), num_layers=1, sequence_parallel=True,
        recompute="selective",
    )  # fmt: skip
    eager, compiled = compare(group.comm, model, lambda step: arguments(kind, step), "aot_eager", rtol=0, atol=0)
    assert compiled == eager


@pytest.mark.long
@pytest.mark.slow
def test_block_with_full_recompute(group):
    """The compiler drops a replayed collective whose result nothing reads, and adds none."""
    layer = block(group.comm, H, HEADS, 4 * H, hidden_dropout=0.1, attention_dropout=0.1, recompute="full")
    initialize(layer, 3)
    x = torch.randn(S, B, H, generator=torch.Generator().manual_seed(0)).requires_grad_()
    eager, compiled = compare(
        group.comm, layer, lambda step: ((x, Randomness(1, step, (3, 4))), {}), "aot_eager", rtol=0, atol=0
    )
    assert len(compiled) <= len(eager)
    assert set(compiled) == set(eager)


@pytest.mark.mpi(min_size=2)
@pytest.mark.slow
@pytest.mark.long
def test_inductor(group):
    """What fused kernels could get wrong: the masks' integers, and what is read before its collective has written it.

    Without biases the masks of both branches are in one kernel, and so were their sums with the second collective's
    result, when operators wrote into tensors.
    """
    if group.size != 2:
        pytest.skip("two ranks are enough for what takes so long")
    if shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler")
    layer = block(
        group.comm, H, HEADS, 4 * H, add_bias_linear=False, hidden_dropout=0.2, attention_dropout=0.1,
        sequence_parallel=True,
    )  # fmt: skip
    initialize(layer, 3)
    x = torch.randn(S // group.size, B, H, generator=torch.Generator().manual_seed(group.rank)).requires_grad_()
    eager, compiled = compare(
        group.comm, layer, lambda step: ((x, Randomness(1, step, (3, 4))), {}), "inductor", rtol=1e-5, atol=1e-5
    )
    assert compiled == eager
    sum_partial(layer, group.comm)
    group.same(layer.mlp_norm.weight.grad)


@pytest.mark.mpi(min_size=2)
def test_a_graph_outlives_its_communicator_and_says_so(mpi_world):
    with Communicator(mpi_world) as comm:
        layer = MLP(H, 2 * H, comm)
        initialize(layer, 3)
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        with torch.no_grad():
            torch.testing.assert_close(compiled(torch.ones(S, H)), layer(torch.ones(S, H)), rtol=0, atol=0)
        handle = comm.handle
    with torch.no_grad(), pytest.raises(CollectiveError, match=f"uses communicator {handle}, which is closed"):
        compiled(torch.ones(S, H))
