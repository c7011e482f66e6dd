"""Row-parallel products; and layers whose collectives go through the node's memory have the bits of MPI's."""

import pytest
import torch

from commengine import Communicator
from tests.support.exact import ALWAYS, NEVER
from tests.support.small_models import KINDS, arguments, made, total
from tplayers import ColumnParallelLinear, RowParallelLinear, initialize

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.sizes(1, 2)]

OPTIONS = [{}, {"sequence_parallel": True}, {"recompute": "full"}]


def steps_of(comm, kind, dtype, options):
    """The loss and the gradients of two steps."""
    model, found = made(kind, comm, dtype=dtype, **options), []
    for step in range(2):
        inputs, named = arguments(kind, step)
        loss = total(model(*inputs, **named))
        loss.backward()
        found.append(loss.detach().clone())
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
    return found


@pytest.mark.some(7)
@pytest.mark.slow
@pytest.mark.parametrize("kind", [KINDS[0], "llama", "bert"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_have_the_same_bits_through_memory_and_through_mpi(mpi_world, kind, options, dtype):
    with Communicator(mpi_world, switch_points=NEVER, order="rank") as private:
        expected = steps_of(private, kind, dtype, options)
    with Communicator(mpi_world, switch_points=ALWAYS) as comm:
        found = steps_of(comm, kind, dtype, options)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_row_parallel_product_and_its_gradients(group, mpi_world, sequence_parallel):
    """Against the whole product on one rank, in float64; with a frozen weight, a frozen input, and without a graph."""
    rows, features, outputs = 4 * group.size, 3 * group.size, 5
    generator = torch.Generator().manual_seed(4)
    whole_x = torch.randn(rows, 2, features, generator=generator).double()
    whole_weight = torch.randn(outputs, features, generator=generator).double()
    seed = torch.randn(rows, 2, outputs, generator=generator).double()
    part = seed.chunk(group.size)[group.rank] if sequence_parallel else seed
    for of_x, of_weight in ((True, True), (True, False), (False, True), (False, False)):
        truth = [whole_x.clone().requires_grad_(of_x), whole_weight.clone().requires_grad_(of_weight)]
        product = truth[0] @ truth[1].t()
        with Communicator(mpi_world, switch_points=ALWAYS) as comm:
            x = group.mine(truth[0].detach()).requires_grad_(of_x)
            layer = RowParallelLinear(
                features, outputs, comm, bias=False, sequence_parallel=sequence_parallel, dtype=torch.float64
            )
            weight = layer.weight.requires_grad_(of_weight)
            with torch.no_grad():
                weight.copy_(group.mine(truth[1]))
            y = layer(x)
            expected = product.detach().chunk(group.size)[group.rank] if sequence_parallel else product.detach()
            torch.testing.assert_close(y.detach(), expected)
            if of_x or of_weight:
                y.backward(part)
                product.backward(seed)
            for found, one in ((x, truth[0]), (weight, truth[1])):
                assert (found.grad is None) == (one.grad is None)
                if found.grad is not None:
                    torch.testing.assert_close(found.grad, group.mine(one.grad))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_autocast_gives_the_same_dtype_and_bits_through_memory_and_through_mpi(mpi_world, sequence_parallel):
    found = []
    for points in (NEVER, ALWAYS):
        with Communicator(mpi_world, switch_points=points, order="rank") as comm, torch.no_grad():
            up = ColumnParallelLinear(16, 32, comm, sequence_parallel=sequence_parallel)
            down = RowParallelLinear(32, 16, comm, sequence_parallel=sequence_parallel)
            initialize(torch.nn.ModuleList([up, down]), 1)
            x = torch.linspace(-1, 1, 6 * 2 * 16).view(6, 2, 16)
            with torch.autocast("cpu", torch.bfloat16):
                found.append(down(up(x)).clone())
    assert found[0].dtype == torch.bfloat16
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
