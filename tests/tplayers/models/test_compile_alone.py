"""A group of one rank that is to call its collectives: eager, compiled on the host, and compiled on one device."""

import collections
import operator
import sys

import pytest
import torch

from commengine import CollectiveError, Communicator
from tests.support.small_models import KINDS, arguments, block, made, total
from tests.tplayers.models.test_compile import compare, fresh_compiler  # noqa: F401  (an autouse fixture)
from tplayers import Randomness, regions

pytestmark = pytest.mark.mpi


@pytest.fixture
def with_collectives(monkeypatch):
    """Let a group of one rank call its collectives: all operators run on a machine that has one device only."""
    original = regions.communicates
    for name, module in list(sys.modules.items()):
        if name.startswith("tplayers") and getattr(module, "communicates", None) is original:
            monkeypatch.setattr(module, "communicates", lambda comm: True)


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
            for name in ("all_reduce", "all_gather", "reduce_scatter"):
                self.operators[name] += f"commengine.{name}." in str(node.target)
        return self.boxed(graph.forward)


@pytest.fixture
def itself():
    """MPI.COMM_SELF."""
    from mpi4py import MPI

    return MPI.COMM_SELF


def model(comm, kind="gpt", **options):
    return made(kind, comm, num_layers=1, **options).to(comm.device)


def inputs(device, kind="gpt"):
    return lambda step: arguments(kind, step, device)


def losses_and_gradients(module, kind):
    positional, named = arguments(kind, device=module.comm.device)
    losses = module(*positional, **named)
    total(losses).backward()
    losses = [losses] if isinstance(losses, torch.Tensor) else list(losses)
    return [*(part.detach() for part in losses), *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_group_of_one_computes_the_same_with_its_collectives(alone, itself, sequence_parallel, kind, request):
    expected = losses_and_gradients(model(alone.comm, kind, sequence_parallel=sequence_parallel), kind)
    request.getfixturevalue("with_collectives")
    with Communicator(itself) as comm:
        found = losses_and_gradients(model(comm, kind, sequence_parallel=sequence_parallel), kind)
    torch.testing.assert_close(found, expected)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [pytest.param(False, marks=pytest.mark.long), True])
def test_the_graph_has_the_operators(itself, with_collectives, sequence_parallel):
    """Each collective that eager runs, forward and backward, is one operator. The values are equal bit for bit."""
    recording = Recording()
    with Communicator(itself) as comm:
        module = model(comm, sequence_parallel=sequence_parallel, recompute="selective")
        eager, compiled = compare(comm, module, inputs(comm.device), recording.compiler, rtol=0, atol=0)
    assert compiled == eager
    counts = collections.Counter(operation for operation, *_ in eager)
    assert recording.operators == counts
    assert counts["all_reduce"] >= 2  # of the loss
    assert (counts["all_gather"] > 4 and counts["reduce_scatter"] > 2) == sequence_parallel


class ReturnedInPlace:
    """A backend that runs the graph as it is, and notes what a Function returns straight from an operation in place."""

    def __init__(self):
        self.functions, self.found = 0, []

    def __call__(self, graph, inputs):
        for node in graph.graph.nodes:
            if "autograd_function_apply" in str(node.target):
                self.functions += 1
                body = getattr(graph, node.args[0].target).graph
                (output,) = (one for one in body.nodes if one.op == "output")
                # The body may return what it has computed on its way, too (torch 2.11), which nobody takes.
                taken = [one.args[1] for one in node.users if one.target is operator.getitem and one.users]
                results = [output.args[0][0][place] for place in taken] or output.all_input_nodes
                self.found += [one for one in results if one.op == "call_method" and one.target.endswith("_")]
        return graph.forward


@pytest.mark.slow
def test_no_function_returns_the_result_of_an_operation_in_place(alone):
    """The compiler of torch 2.11 loses its gradient, and says nothing."""
    seen = ReturnedInPlace()
    layer = block(
        alone.comm, 16, 4, 32, normalization="RMSNorm", swiglu=True, attention_dropout=0.1, hidden_dropout=0.1
    )
    compiled = torch.compile(layer, fullgraph=True, backend=seen)
    compiled(torch.ones(8, 2, 16, requires_grad=True), Randomness(1, 0, (3, 4)))
    assert seen.functions >= 5
    assert not seen.found


@pytest.mark.gpu
@pytest.mark.every_size
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device, or not asked for with -m gpu")
@pytest.mark.parametrize("transport", ["nccl", "staged"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("kind", KINDS)
def test_on_one_device(itself, with_collectives, backend, transport, sequence_parallel, kind):
    try:
        comm = Communicator(itself, device="cuda", transport=transport)
    except CollectiveError as error:
        if "needs one for each rank" in str(error):
            pytest.skip(str(error))
        raise
    with comm:
        module = model(comm, kind, sequence_parallel=sequence_parallel, recompute="selective")
        eager, compiled = compare(comm, module, inputs(comm.device, kind), backend, rtol=1e-4, atol=1e-4)
    assert compiled == eager
    assert len(eager) > 2
