"""A group of one rank that is to call its collectives: eager, compiled on the host, and compiled on one device."""

import collections

import pytest
import torch

from commengine import CollectiveError, Communicator
from tests.tplayers.models.test_compile import compare, fresh_compiler  # noqa: F401  (an autouse fixture)
from tplayers import GPT, GPTConfig, Randomness, initialize

pytestmark = pytest.mark.mpi

S, B = 8, 2


class Alone(Communicator):
    """A group of this rank, in which nothing is left out."""

    collectives_alone = True


class Recording:
    """A backend that runs eager's operations, and counts the operators of commengine in the graphs."""

    def __init__(self):
        # Imported here: it takes more than a second, and most runs of the tests only skip the tests of this file.
        from functorch.compile import make_boxed_func
        from torch._dynamo.backends.common import aot_autograd

        self.boxed = make_boxed_func
        self.operators = collections.Counter()
        self.compiler = aot_autograd(fw_compiler=self.note)

    def note(self, graph, inputs):
        for node in graph.graph.nodes:
            for name in ("all_reduce_", "all_gather_into_", "reduce_scatter_into_"):
                self.operators[name] += f"commengine.{name}" in f"{node.target} {node.args[:1]}"
        return self.boxed(graph.forward)


@pytest.fixture
def itself():
    """MPI.COMM_SELF."""
    from mpi4py import MPI

    return MPI.COMM_SELF


def model(comm, **options):
    shape = GPTConfig(
        1, 16, 4, 13, S, make_vocab_size_divisible_by=16, hidden_dropout=0.2, attention_dropout=0.1, **options
    )
    made = GPT(shape, comm)
    initialize(made, 3)
    return made.to(comm.device)


def inputs(device):
    def of_step(step):
        tokens = torch.randint(13, (B, S + 1), generator=torch.Generator().manual_seed(step)).to(device)
        return tokens[:, :-1], tokens[:, 1:], Randomness(1, step, (step, 7), device=device)

    return of_step


def losses_and_gradients(made, device):
    losses = made(*inputs(device)(0))
    losses.sum().backward()
    return [losses.detach(), *(p.grad for p in made.parameters())]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_group_of_one_computes_the_same_with_its_collectives(alone, itself, sequence_parallel):
    with Alone(itself) as comm:
        found = losses_and_gradients(model(comm, sequence_parallel=sequence_parallel), comm.device)
    expected = losses_and_gradients(model(alone.comm, sequence_parallel=sequence_parallel), comm.device)
    torch.testing.assert_close(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_graph_has_the_operators(itself, sequence_parallel):
    """Each collective that eager runs, forward and backward, is one operator. The values are equal bit for bit."""
    recording = Recording()
    with Alone(itself) as comm:
        made = model(comm, sequence_parallel=sequence_parallel, recompute="selective")
        eager, compiled = compare(comm, made, inputs(comm.device), recording.compiler, rtol=0, atol=0)
    assert compiled == eager
    counts = collections.Counter(operation for operation, *_ in eager)
    assert recording.operators == collections.Counter(
        {"all_reduce_": counts["all_reduce"], "all_gather_into_": counts["all_gather"],
         "reduce_scatter_into_": counts["reduce_scatter"]}
    )  # fmt: skip
    assert counts["all_reduce"] >= 2  # of the loss
    assert (counts["all_gather"] > 4 and counts["reduce_scatter"] > 2) == sequence_parallel


@pytest.mark.gpu
@pytest.mark.every_size
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device, or not asked for with -m gpu")
@pytest.mark.parametrize("transport", ["nccl", "staged"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_on_one_device(itself, backend, transport, sequence_parallel):
    try:
        comm = Alone(itself, device="cuda", transport=transport)
    except CollectiveError as error:
        pytest.skip(str(error))
    with comm:
        made = model(comm, sequence_parallel=sequence_parallel, recompute="selective")
        eager, compiled = compare(comm, made, inputs(comm.device), backend, rtol=1e-4, atol=1e-4)
    assert compiled == eager
    assert len(eager) > 2
