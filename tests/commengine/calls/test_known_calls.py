"""A call like an earlier one skips the checks, and nothing else: what could have changed is looked at."""

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.masked import masked_tensor

from commengine import CollectiveError, Communicator, trace
from commengine.calls import routes
from commengine.operations import all_gather, all_reduce, broadcast, reduce_scatter

pytestmark = pytest.mark.mpi(min_size=1)


def calls_of(comm):
    """By name: a call whose form becomes known, and whose tensors [3, 3] look like those of BAD."""
    size = comm.size
    return {
        "all_reduce": lambda t: comm.all_reduce(t),
        "broadcast": lambda t: comm.broadcast(t, 0),
        "all_gather": lambda t: comm.all_gather(torch.empty(3 * size, 3), t),
        "reduce_scatter": lambda t: comm.reduce_scatter(t, torch.ones(3 * size, 3)),
    }


#: tensors of the shape and the dtype of a call that is known, and what the error says about them
BAD = {
    "not contiguous": ("not contiguous", lambda: torch.ones(3, 3).t()),
    "expanded": ("not contiguous", lambda: torch.ones(1, 3).expand(3, 3)),
    "sparse": ("layout torch.sparse_coo", lambda: torch.eye(3).to_sparse()),
    "sparse rows": ("layout torch.sparse_csr", lambda: torch.eye(3).to_sparse_csr()),
    "negated": ("lazily negated", lambda: torch._neg_view(torch.ones(3, 3))),
    "resized": ("without memory", lambda: resized(torch.ones(3, 3))),
    "fake": ("without memory", lambda: FakeTensorMode().from_tensor(torch.ones(3, 3))),
    "functional": ("without memory", lambda: torch._to_functional_tensor(torch.ones(3, 3))),
    "zeros": ("without memory", lambda: torch._efficientzerotensor(3, 3)),
    "nested": ("without memory", lambda: torch.nested.nested_tensor([torch.ones(3), torch.ones(2)])),
    "masked": ("without memory", lambda: masked_tensor(torch.ones(3, 3), torch.eye(3).bool())),
    "quantized": ("has dtype torch.quint8", lambda: torch.quantize_per_tensor(torch.ones(3, 3), 0.1, 0, torch.quint8)),
    "mkldnn": ("layout torch._mkldnn", lambda: torch.ones(3, 3).to_mkldnn()),
    "meta": ("lies on meta", lambda: torch.ones(3, 3, device="meta")),
    "array": ("read-only", lambda: read_only(np.ones((3, 3), np.float32))),
}


def resized(tensor):
    tensor.untyped_storage().resize_(0)
    return tensor


def read_only(array):
    array.setflags(write=False)
    return array


@pytest.fixture
def unchecked(world, monkeypatch):
    """Returns a function: from its call on, a check fails the test."""

    def unchecked():
        for module in (all_gather, all_reduce, broadcast, reduce_scatter):
            for name in ("checked_tensor", "checked_pair", "check_rank", "check_reduction"):
                monkeypatch.setattr(module, name, lambda *args: pytest.fail("checked once more"), raising=False)

    return unchecked


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("shape", [(4,), (2, 3), (1, 2, 3)])
def test_a_known_call_is_not_checked_again_and_has_the_right_result(world, unchecked, dtype, shape):
    rank, size = world.rank, world.size
    for attempt in range(3):
        if attempt == 1:
            unchecked()
        values = torch.arange(attempt, attempt + torch.Size(shape).numel()).view(shape).to(dtype)
        total, largest, sent = values + rank, values + rank, values + rank
        world.all_reduce(total)
        assert torch.equal(total, values * size + sum(range(size)))
        world.all_reduce(largest, "max")
        assert torch.equal(largest, values + size - 1)
        world.broadcast(sent, size - 1)
        assert torch.equal(sent, values + size - 1)
        whole, mine = torch.cat([values + other for other in range(size)]), torch.empty_like(values)
        found = torch.empty_like(whole)
        world.all_gather(found, values + rank)
        assert torch.equal(found, whole)
        found.fill_(-1)
        row = found.view(size, *shape)[rank]
        row.copy_(values + rank)
        world.all_gather(found, row)  # in place
        assert torch.equal(found, whole)
        world.reduce_scatter(mine, whole)
        assert torch.equal(mine, (values + rank) * size)


@pytest.mark.filterwarnings("ignore:Sparse CS")
@pytest.mark.parametrize("name", ["all_reduce", "broadcast", "all_gather", "reduce_scatter"])
@pytest.mark.parametrize("bad", BAD)
def test_a_bad_tensor_of_a_known_form_is_refused(world, name, bad):
    call, (words, make) = calls_of(world)[name], BAD[bad]
    call(torch.ones(3, 3))
    if world.rank == 0:  # nothing may be sent
        with pytest.raises(CollectiveError, match=words):
            call(make())
    world.barrier()


def test_a_known_tensor_that_changes_is_looked_at(world):
    tensor = torch.ones(3, 3)
    world.all_reduce(tensor)
    tensor.t_()
    if world.rank == 0:
        with pytest.raises(CollectiveError, match="not contiguous"):
            world.all_reduce(tensor)
    tensor.data = torch.ones(3, 3, dtype=torch.int32)
    world.all_reduce(tensor)
    assert torch.equal(tensor, torch.full((3, 3), world.size, dtype=torch.int32))


def test_memory_that_a_known_pair_shares(world):
    size, rank = world.size, world.rank
    memory = torch.zeros(4 * size)
    whole = memory[: 2 * size]
    world.all_gather(whole, torch.ones(2))
    world.reduce_scatter(torch.ones(2), whole)
    bad = [("all_gather", (whole, memory[2 * size - 1 :][:2])), ("reduce_scatter", (memory[2 * size - 1 :][:2], whole))]
    bad += [(name, pair) for name, pair in (("all_gather", (whole, memory[2 * rank + 1 :][:2])),)]
    for name, pair in bad:
        if rank == 0:
            with pytest.raises(CollectiveError, match=f"{name}: the tensors share memory"):
                getattr(world, name)(*pair)
    world.barrier()
    whole.copy_(torch.arange(2.0 * size))
    world.reduce_scatter(whole[2 * rank :][:2], whole)  # in place: the other rows stay
    expected = torch.arange(2.0 * size)
    expected[2 * rank :][:2] *= size
    assert torch.equal(whole, expected)


def test_shapes_of_as_many_bytes_are_other_forms(world):
    size = world.size
    world.all_gather(torch.empty(4 * size, 3), torch.ones(4, 3))
    if world.rank == 0:
        with pytest.raises(CollectiveError, match="must be input"):
            world.all_gather(torch.empty(4 * size, 3), torch.ones(6, 2))
        with pytest.raises(CollectiveError, match="must be input"):
            world.all_gather(torch.empty(12 * size), torch.ones(4, 3))
    world.barrier()


def test_what_equals_a_root_or_a_reduction_is_checked(world):
    tensor = torch.ones(4)
    world.broadcast(tensor, 0)
    world.all_reduce(tensor)
    if world.rank == 0:
        with pytest.raises(CollectiveError, match=r"root=0\.0"):
            world.broadcast(tensor, 0.0)
        with pytest.raises(CollectiveError, match=r"op=\['sum'\]"):
            world.all_reduce(tensor, ["sum"])
    world.broadcast(tensor, np.int64(0))


def test_observed_and_closed_communicators_know_nothing(world):
    tensor = torch.ones(2)
    with world.split(0, world.rank, name="observed") as group:
        group.all_reduce(tensor)
        with trace(group) as log:
            group.all_reduce(tensor)
        assert [event.operation for event in log.events] == ["all_reduce"]
        with group.coalesce():
            work = group.all_reduce(tensor)
            assert not work.done()
        lane = group.new_stream()
        group.all_reduce(tensor, stream=lane).wait()
        group.all_reduce(tensor)
        group.close()
        with pytest.raises(CollectiveError, match="the communicator is closed"):
            group.all_reduce(tensor)
    assert torch.equal(tensor, torch.full((2,), float(world.size**5)))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("how", [{}, {"checked": True}, {"timeout": 60.0}])
def test_two_threads_at_once_get_an_error(mpi_world, how):
    """Another thread may call when the first is done, as autograd does; while it waits for other ranks, none may."""
    with Communicator(mpi_world, device="cpu", **how) as group:
        tensor = torch.ones(2)
        for _ in range(2):
            group.all_reduce(tensor)  # on a plain communicator its form is known now
        if mpi_world.rank == 0:
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(group.all_reduce, tensor)
                while not group._calls.busy:
                    time.sleep(1e-3)
                others = {
                    "all_reduce": lambda: group.all_reduce(torch.ones(2)),
                    "broadcast": lambda: group.broadcast(torch.ones(2)),
                    "all_gather": lambda: group.all_gather(torch.ones(2 * group.size), torch.ones(2)),
                    "barrier": group.barrier,
                    "empty": lambda: group.empty((4,)),
                    "close": group.close,
                }
                for operation, call in others.items():
                    with pytest.raises(CollectiveError, match=rf"{operation}: another thread is inside a call"):
                        call()
                mpi_world.Barrier()
                waiting.result()
        else:
            mpi_world.Barrier()
            group.all_reduce(tensor)
        assert (tensor == group.size**3).all()
        group.barrier()


def test_windows_that_come_later_are_used(mpi_world):
    """A form that was known before the first window is compared with the calls of the other ranks afterwards."""
    if mpi_world.size == 1:
        pytest.skip("one rank has no windows")
    with Communicator(mpi_world, device="cpu") as group:
        private, whole = torch.ones(1 << 20), torch.empty((1 << 20) * group.size)
        group.all_gather(whole, private)
        if group.node_size is None:
            pytest.skip("the group shares no memory")
        window = group.empty((1 << 20,))
        window.fill_(2.0)
        group.all_gather(whole, window)
        assert torch.equal(whole, torch.full_like(whole, 2.0))
        with pytest.raises(CollectiveError, match="the ranks gave different"):
            group.all_gather(whole, private if group.rank == 0 else window)
        group.all_gather(whole, private)
        assert torch.equal(whole, torch.ones_like(whole))
        del window


def test_an_error_of_mpi_names_the_call(world, monkeypatch):
    from mpi4py import MPI

    def fail(*args):
        raise MPI.Exception(MPI.ERR_TRUNCATE)

    with world.split(0, world.rank, name="short") as group:
        group.broadcast(torch.ones(4), 0)
        for form, known in group._host.known.items():
            group._host.known[form] = known._replace(run=fail)
        with pytest.raises(CollectiveError, match=rf"^rank {world.rank} of group 'short' .*broadcast: .*truncated"):
            group.broadcast(torch.ones(4), 0)


def test_few_forms_are_kept(world):
    for numel in range(1, routes.MOST_FORMS + 10):
        world.all_reduce(torch.ones(numel))
    assert 0 < len(world._host.known) <= len(world._host._runs) <= routes.MOST_FORMS


WRITES = {
    "all_reduce": lambda comm, t: comm.all_reduce(t),
    "broadcast": lambda comm, t: comm.broadcast(t, 0),
    "reduce": lambda comm, t: comm.reduce(t, 0),
    "all_gather": lambda comm, t: comm.all_gather(t, torch.ones(len(t) // comm.size)),
    "all_to_all": lambda comm, t: comm.all_to_all(t, torch.ones(len(t))),
    "all_to_all_v": lambda comm, t: comm.all_to_all_v(
        t, torch.ones(len(t)), [len(t) // comm.size] * comm.size, [len(t) // comm.size] * comm.size
    ),
}


@pytest.mark.parametrize("way", ["known", "traced", "stream"])
@pytest.mark.parametrize("name", WRITES)
def test_a_tensor_that_autograd_saved_is_not_used_after_it_was_written(mpi_world, name, way):
    """A rank that only reads its tensor, as the root of a broadcast, has the gradient."""
    with Communicator(mpi_world, device="cpu") as comm:
        for _ in range(3):
            x = torch.randn(2 * comm.size, requires_grad=True)
            y = x.exp()  # saves its result
            with trace(comm) if way == "traced" else contextlib.nullcontext():
                if way == "stream" and name == "all_reduce":
                    comm.all_reduce(y.detach(), stream=comm.new_stream()).wait()
                else:
                    WRITES[name](comm, y.detach())
            if (name == "broadcast" and comm.rank == 0) or (name == "reduce" and comm.rank):
                y.sum().backward()
                torch.testing.assert_close(x.grad, x.detach().exp())
            else:
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    y.sum().backward()
