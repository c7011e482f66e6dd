"""What cannot be done is refused on the rank that asks for it, in words, and nothing is sent."""

import numpy as np
import pytest
import torch

from commengine import CollectiveError, CollectiveMismatch, Communicator

pytestmark = pytest.mark.mpi(min_size=1)

ONES = torch.ones
SPARSE = torch.eye(3).to_sparse()

# id: (operation, what the message says, the call)
BAD = {
    "list": ("all_reduce", "tensor is a list", lambda c: c.all_reduce([1.0])),
    "none": ("all_reduce", "tensor is a NoneType", lambda c: c.all_reduce(None)),
    "number": ("broadcast", "tensor is a float", lambda c: c.broadcast(1.0)),
    "text array": ("all_reduce", "DLPack", lambda c: c.all_reduce(np.array(["a"]))),
    "foreign byte order": ("all_reduce", "byte order", lambda c: c.all_reduce(np.ones(2, ">f8"))),
    "half complex": ("all_reduce", "dtype torch.complex32", lambda c: c.all_reduce(ONES(2).to(torch.complex32))),
    "complex minimum": ("all_reduce", "op='min'", lambda c: c.all_reduce(ONES(2, dtype=torch.complex64), "min")),
    "masked array": ("all_reduce", "the mask would be lost", lambda c: c.all_reduce(np.ma.masked_array([1.0], [True]))),
    "uint16 array": ("all_reduce", "dtype torch.uint16", lambda c: c.all_reduce(np.ones(2, np.uint16))),
    "float8": ("broadcast", "dtype torch.float8_e4m3fn", lambda c: c.broadcast(ONES(2).to(torch.float8_e4m3fn))),
    "transposed": ("all_reduce", "not contiguous", lambda c: c.all_reduce(ONES(2, 3).t())),
    "strided": ("send", "strides [2] is not contiguous", lambda c: c.send(ONES(8)[::2], 0)),
    "expanded": ("recv", "not contiguous", lambda c: c.recv(ONES(1).expand(4), 0)),
    "strided array": ("all_reduce", "not contiguous", lambda c: c.all_reduce(np.ones((4, 4))[:, 1])),
    "sparse": ("all_reduce", "layout torch.sparse_coo", lambda c: c.all_reduce(SPARSE)),
    "sparse rows": ("all_reduce", "layout torch.sparse_csc", lambda c: c.all_reduce(torch.eye(3).to_sparse_csc())),
    "meta": ("all_reduce", "lies on meta", lambda c: c.all_reduce(ONES(2, device="meta"))),
    "address": ("reduce", "begins at no multiple of 16 bytes; copy it first", lambda c: c.reduce(between())),
    "op": ("all_reduce", "op='SUM' is not one of sum, prod", lambda c: c.all_reduce(ONES(2), "SUM")),
    "op none": ("reduce", "op=None", lambda c: c.reduce(ONES(2), 0, None)),
    "op list": ("reduce_scatter", "op=['sum']", lambda c: c.reduce_scatter(ONES(2), ONES(2 * c.size), ["sum"])),
    "avg int": ("all_reduce", "'avg' needs a floating-point", lambda c: c.all_reduce(ONES(2).long(), "avg")),
    "avg bool": ("reduce", "'avg' needs a floating-point", lambda c: c.reduce(ONES(2).bool(), 0, "avg")),
    "avg uint8": (
        "reduce_scatter",
        "'avg' needs a floating-point",
        lambda c: c.reduce_scatter(ONES(2).byte(), ONES(2 * c.size).byte(), "avg"),
    ),
    "root high": ("broadcast", "is not a rank of the group: 0 to", lambda c: c.broadcast(ONES(2), c.size)),
    "root negative": ("reduce", "root=-1", lambda c: c.reduce(ONES(2), -1)),
    "root text": ("gather", "root='0'", lambda c: c.gather(ONES(2 * c.size), ONES(2), "0")),
    "root float": ("scatter", "root=0.0", lambda c: c.scatter(ONES(2), ONES(2 * c.size), 0.0)),
    "root none": ("broadcast", "root=None", lambda c: c.broadcast(ONES(2), None)),
    "root huge": ("broadcast", f"root={2**70}", lambda c: c.broadcast(ONES(2), 2**70)),
    "dst": ("send", "dst=", lambda c: c.send(ONES(2), c.size)),
    "src": ("recv", "src=", lambda c: c.recv(ONES(2), -1)),
    "sendrecv dst": ("sendrecv", "dst=", lambda c: c.sendrecv(ONES(2), -3, ONES(2), 0)),
    "sendrecv src": ("sendrecv", "src=", lambda c: c.sendrecv(ONES(2), 0, ONES(2), c.size)),
    "gather no output": ("gather", "output is None on the root", lambda c: c.gather(None, ONES(2), c.rank)),
    "scatter no input": ("scatter", "input is None on the root", lambda c: c.scatter(ONES(2), None, c.rank)),
    "reduce_scatter rows": (
        "reduce_scatter",
        "input [1] must be output [2] with dim 0 times the group's size",
        lambda c: c.reduce_scatter(ONES(2), ONES(1)),
    ),
    "reduce_scatter rest": ("reduce_scatter", "must be", lambda c: c.reduce_scatter(ONES(2, 3), ONES(2 * c.size, 4))),
    "reduce_scatter dims": ("reduce_scatter", "must be", lambda c: c.reduce_scatter(ONES(2), ONES(2 * c.size, 1))),
    "all_gather rows": (
        "all_gather",
        "output [1] must be input [2] with dim 0 times the group's size",
        lambda c: c.all_gather(ONES(1), ONES(2)),
    ),
    "all_gather swapped": ("all_gather", "must be", lambda c: c.all_gather(ONES(2), ONES(2 * c.size + 2))),
    "all_gather 0-d": ("all_gather", "must be", lambda c: c.all_gather(torch.tensor(1.0), torch.tensor(1.0))),
    "all_gather dtypes": ("all_gather", "float64", lambda c: c.all_gather(ONES(2 * c.size).double(), ONES(2))),
    "gather rows": ("gather", "must be", lambda c: c.gather(ONES(3 * c.size), ONES(2), c.rank)),
    "gather dtypes": ("gather", "float64", lambda c: c.gather(ONES(2 * c.size).double(), ONES(2), c.rank)),
    "scatter rows": ("scatter", "must be", lambda c: c.scatter(ONES(2), ONES(2 * c.size + 1), c.rank)),
    "all_to_all shapes": ("all_to_all", "must have one shape", lambda c: c.all_to_all(ONES(c.size), ONES(2 * c.size))),
    "all_to_all 0-d": ("all_to_all", "must have one shape", lambda c: c.all_to_all(torch.ones(()), torch.ones(()))),
    "all_to_all dtypes": ("all_to_all", "int64", lambda c: c.all_to_all(ONES(c.size), ONES(c.size).long())),
    "stream": ("all_reduce", "stream 'main' was not made by", lambda c: c.all_reduce(ONES(2), stream="main")),
    "group in group": ("coalesce", "do not nest", lambda c: nested_groups(c)),
    "stream in group": ("send", "coalesce(stream=...)", lambda c: stream_in_group(c)),
}  # fmt: skip


def between():
    """Numbers of complex128 where NumPy may place them, and torch's arithmetic ends the process."""
    memory = np.ones(4)
    first = memory.ctypes.data // 8 % 2 ^ 1
    return memory[first : first + 2].view(np.complex128)


def nested_groups(comm):
    with comm.coalesce():
        comm.send(ONES(2), 0)
        with comm.coalesce():
            pass


def stream_in_group(comm):
    with comm.coalesce():
        comm.send(ONES(2), 0, stream=comm._streams[0])


@pytest.fixture(scope="module")
def busy_world(world):
    stream = world.new_stream()
    yield world
    del stream


def assert_works(comm):
    """Nothing was left on the way: the next collectives and messages are the right ones."""
    assert not comm.mpi.Iprobe()
    tensor = torch.tensor([comm.rank, 1])
    comm.all_reduce(tensor)
    assert tensor.tolist() == [sum(range(comm.size)), comm.size]
    got = torch.zeros(1, dtype=torch.int64)
    comm.sendrecv(torch.tensor([comm.rank]), (comm.rank + 1) % comm.size, got, (comm.rank - 1) % comm.size)
    assert got.item() == (comm.rank - 1) % comm.size


@pytest.mark.filterwarnings("ignore:Sparse CS")
@pytest.mark.parametrize("case", BAD)
def test_bad_call_names_rank_group_and_operation(busy_world, case):
    operation, words, call = BAD[case]
    comm = busy_world
    if comm.rank == comm.size - 1:  # the others ask for nothing: so nothing may wait for them
        with pytest.raises(CollectiveError) as caught:
            call(comm)
        message = str(caught.value)
        assert message.startswith(f"rank {comm.rank} of group 'world' (size {comm.size}): {operation}: "), message
        assert words in message
    assert_works(comm)


def overlapping(comm):
    n = comm.size
    memory = torch.zeros(4 * n)
    yield "all_gather", (memory[: 2 * n], memory[(2 * comm.rank + 1) :][:2])  # in the output, at the wrong place
    yield "all_gather", (memory[: 2 * n], memory[2 * n - 1 :][:2])
    yield "reduce_scatter", (memory[2 * n - 1 :][:2], memory[: 2 * n])
    yield "reduce_scatter", (memory[(2 * comm.rank + 1) :][:2], memory[: 2 * n])  # in the input, at the wrong place
    yield "all_to_all", (memory[:n], memory[:n])
    yield "all_to_all", (memory[1:][: 2 * n], memory[: 2 * n])
    yield "gather", (memory[: 2 * n], memory[1:3], comm.rank)
    yield "scatter", (memory[1:3], memory[: 2 * n], comm.rank)
    yield "sendrecv", (memory[:2], 0, memory[1:3], 0)


def test_overlapping_memory(world):
    for operation, args in overlapping(world):
        if world.rank == 0:
            with pytest.raises(CollectiveError, match=rf"rank 0 of group 'world'.*{operation}: .*share memory"):
                getattr(world, operation)(*args)
    assert_works(world)


def test_neighbours_in_one_storage_are_no_overlap(world):
    memory = torch.arange(3.0 * world.size)
    n = world.size
    world.all_to_all(memory[n : 2 * n], memory[:n])
    world.reduce_scatter(memory[2 * n : 2 * n + 1], memory[:n])
    assert_works(world)


def test_stream_of_another_communicator(world):
    with world.split(0, world.rank, name="other") as other:
        theirs, mine = other.new_stream(), other.name
        assert mine == "other"
        if world.rank == 0:
            with pytest.raises(CollectiveError, match=r"group 'world'.*all_reduce: stream other/stream1 was not made"):
                world.all_reduce(ONES(2), stream=theirs)
            with pytest.raises(CollectiveError, match=r"send: stream other/stream1 was not made"):
                world.send(ONES(2), 0, stream=theirs)
        assert_works(world)
        assert_works(other)


def test_stream_of_another_communicator_is_found_before_the_ranks_agree(world):
    """checked=True: the rank that errs must not have told the others that it takes part."""
    with world.split(0, world.rank) as plain, Communicator(world.mpi, checked=True) as comm:
        theirs, _ = plain.new_stream(), comm.new_stream()  # both are number 1
        if world.rank == 0:
            with pytest.raises(CollectiveError, match="was not made by this communicator"):
                comm.all_reduce(ONES(2), stream=theirs)
        assert_works(comm)


def test_everything_on_a_closed_communicator(world):
    n = world.size
    comm = world.split(0, world.rank, name="gone")
    stream = comm.new_stream()
    comm.close()
    calls = {
        "all_reduce": (ONES(2),),
        "reduce": (ONES(2),),
        "reduce_scatter": (ONES(2), ONES(2 * n)),
        "all_gather": (ONES(2 * n), ONES(2)),
        "broadcast": (ONES(2),),
        "gather": (ONES(2 * n), ONES(2)),
        "scatter": (ONES(2), ONES(2 * n)),
        "all_to_all": (ONES(n), ONES(n)),
        "barrier": (),
        "send": (ONES(2), 0),
        "recv": (ONES(2), 0),
        "sendrecv": (ONES(2), 0, ONES(2), 0),
    }
    for lane in (None, stream):
        for operation, args in calls.items():
            with pytest.raises(CollectiveError) as caught:
                getattr(comm, operation)(*args, stream=lane)
            assert str(caught.value) == (
                f"rank {comm.rank} of group 'gone' (size {n}): {operation}: the communicator is closed"
            )
    for call in (comm.new_stream, lambda: comm.split(0)):
        with pytest.raises(CollectiveError, match="the communicator is closed"):
            call()
    with pytest.raises(CollectiveError, match="the communicator is closed"), comm.coalesce():
        comm.send(ONES(2), 0)
    comm.close()  # again
    assert_works(world)


def test_closed_communicator_that_was_checked_or_traced(world):
    import commengine

    comm = Communicator(world.mpi, checked=True, name="gone")
    with commengine.trace(comm) as log:
        comm.close()
        with pytest.raises(CollectiveError, match=r"group 'gone'.*broadcast: the communicator is closed"):
            comm.broadcast(ONES(2))
    assert log.events == []


def test_a_communicator_needs_an_intracommunicator(mpi_world):
    from mpi4py import MPI

    for value in (None, 0, "world", MPI, MPI.COMM_NULL):
        with pytest.raises(CollectiveError, match="needs an MPI intracommunicator"):
            Communicator(value)
    with pytest.raises(CollectiveError, match="'cuda'"):
        Communicator(mpi_world, device="cuda")


@pytest.mark.mpi(min_size=2)
@pytest.mark.every_size
def test_intercommunicator_is_refused(mpi_world):
    half = mpi_world.Split(mpi_world.rank % 2)
    between = half.Create_intercomm(0, mpi_world, 1 - mpi_world.rank % 2)
    with pytest.raises(CollectiveError, match="needs an MPI intracommunicator"):
        Communicator(between)
    between.Free()
    half.Free()


def test_errors_are_exceptions_although_the_callers_handler_is_fatal(mpi_world):
    """A wrong message would end the process when the duplicate inherited the caller's error handler."""
    from mpi4py import MPI

    if MPI.get_vendor()[0] == "Open MPI":
        pytest.skip("Open MPI reports no error where a rank's message to itself is longer than its buffer")

    theirs = mpi_world.Dup()
    theirs.Set_errhandler(MPI.ERRORS_ARE_FATAL)
    with Communicator(theirs) as comm:
        with pytest.raises(CollectiveError, match=rf"rank {comm.rank} of group 'world' .*sendrecv: "):
            comm.sendrecv(ONES(8), comm.rank, ONES(4), comm.rank)
        with comm.split(0) as part:
            assert part.mpi.Get_errhandler() == MPI.ERRORS_RETURN
    assert theirs.Get_errhandler() == MPI.ERRORS_ARE_FATAL
    theirs.Free()


@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(2, only=True)  # which rank MPI tells
@pytest.mark.parametrize("operation", ["broadcast", "gather", "reduce_scatter"])
def test_sizes_that_differ_are_named_where_mpi_tells(mpi_world, operation):
    """Nothing is compared in advance. MPICH ends the job by itself in collectives that send and receive at once."""
    from mpi4py import MPI

    if operation != "reduce_scatter" and MPI.get_vendor()[0] == "Intel MPI":
        pytest.skip("Intel's MPI cuts a broadcast that is too long, and waits in such a gather without end")
    comm = Communicator(mpi_world, device="cpu")
    rank, size = comm.rank, comm.size
    count = 8 if rank == 0 else 4
    calls = {
        "broadcast": (lambda: comm.broadcast(ONES(count)), rank == 1),
        "gather": (lambda: comm.gather(ONES(4 * size) if rank == 0 else None, ONES(12 - count)), rank == 0),
        "reduce_scatter": (  # of halves: an all-to-all
            lambda: comm.reduce_scatter(ONES(12 - count).bfloat16(), ONES((12 - count) * size).bfloat16()),
            rank == 0,
        ),
    }
    call, told = calls[operation]
    if told:
        said = rf"rank {rank} of group 'world' \(size {size}\): {operation}: .*different sizes .*checked=True"
        with pytest.raises(CollectiveMismatch, match=said):
            call()
    else:
        call()
    comm.close()


def test_a_count_that_this_mpi_cannot_take(mpi_world):
    """mpi4py raises OverflowError on an MPI without large counts. Ours has them, so the transport is replaced."""

    class Small:
        def run(self, operation, args):
            raise OverflowError("integer 4294967296 does not fit in 'int'")

    with Communicator(mpi_world, device="cpu") as comm:
        host, comm._calls.host = comm._calls.host, Small()
        with pytest.raises(CollectiveError, match=r"all_reduce: this MPI counts at most 2147483647 elements"):
            comm.all_reduce(ONES(4))
        comm._calls.host = host


def test_what_the_caller_sends_is_never_seen(mpi_world):
    """The caller's messages and collectives are on its own communicator: also between two of ours."""
    with Communicator(mpi_world) as comm:
        request = mpi_world.Isend(np.array([42]), mpi_world.rank)
        got = torch.zeros(1, dtype=torch.int64)
        with comm.coalesce():
            comm.recv(got, comm.rank)
            comm.send(torch.tensor([7]), comm.rank)
        assert got.item() == 7
        theirs = np.zeros(1, int)
        mpi_world.Recv(theirs, mpi_world.rank)
        request.Wait()
        assert theirs[0] == 42


def test_exception_in_with_block_is_not_replaced_and_nothing_hangs(mpi_world):
    """Only one rank raises: the collective free is left out there."""
    comm = Communicator(mpi_world)
    if mpi_world.rank == 0:
        with pytest.raises(ValueError, match="mine"), comm:
            raise ValueError("mine")
    assert_works(comm)
    comm.close()
    comm.close()


@pytest.mark.every_size
def test_split_orders_by_key_and_leaves_out_color_none(world):
    with world.split(0, -world.rank, name="backwards") as part:
        assert (part.rank, part.size, part.name) == (world.size - 1 - world.rank, world.size, "backwards")
        assert part.world_rank == world.rank
        tensor = torch.tensor([world.rank])
        part.broadcast(tensor)
        assert tensor.item() == world.size - 1
    outside = world.split(None if world.rank == 0 else 2**31 - 1)
    if world.rank == 0:
        assert outside is None
    else:
        assert outside.size == world.size - 1
        assert_works(outside)
        outside.close()


def test_close_frees_what_was_made(mpi_world):
    """MPI has some 2000 communicators: what close() frees can be had again."""
    from mpi4py import MPI

    for _ in range(1100):
        with Communicator(MPI.COMM_SELF) as comm:
            part = comm.split(0)
            part.close()
    comm = Communicator(mpi_world)
    stream = comm.new_stream()
    comm.close()
    assert comm.mpi == MPI.COMM_NULL and stream.transport.wire.comm == MPI.COMM_NULL
    assert mpi_world.allreduce(1) == mpi_world.size
