"""torch's default device and dtype belong to the program: no collective follows them."""

import pytest
import torch

from commengine import Communicator
from commengine.copies import difference_between
from commengine.dtypes import reduction_error
from commengine.rank_zero import broadcast_json, gather_json, on_every_rank
from tests.support.device.torch_defaults import DEFAULTS

pytestmark = pytest.mark.mpi(min_size=2)

#: elements of a rank's part: of MPI, of gathered halves, of slots and windows
COUNTS = (1, 3000, 300_000)
ALL = (torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.complex64)


def results(comm, place):
    """The results of the collectives on small integers, which every dtype adds exactly."""
    n, rank, found = comm.size, comm.rank, []
    lane = comm.new_stream()
    for count in COUNTS:
        for dtype in ALL if count == 3000 and place == "private" else (torch.float32, torch.bfloat16):

            def tensor(parts=1, of=rank, count=count, dtype=dtype):
                made = {
                    "private": lambda: torch.empty(parts * count, dtype=dtype, device="cpu"),
                    "window": lambda: comm.empty((parts * count,), dtype),
                }[place]()
                numbers = torch.arange(parts * count, dtype=torch.int64, device="cpu")
                return made.copy_((numbers + of) % 2)

            for stream in (None, lane) if count == 3000 else (None,):
                for op in ("sum", "max", "avg"):
                    if reduction_error(dtype, op) is None:
                        whole, part, rooted = tensor(n), tensor(), tensor()
                        comm.all_reduce(whole, op, stream=stream).wait()
                        comm.reduce_scatter(part, tensor(n), op, stream=stream).wait()
                        comm.reduce(rooted, 1, op, stream=stream).wait()
                        found += [whole, part, rooted]
                gathered, sent, swapped, spread = tensor(n), tensor(), tensor(n), tensor()
                comm.all_gather(gathered, tensor(), stream=stream).wait()
                comm.broadcast(sent, 1, stream=stream).wait()
                comm.all_to_all(swapped, tensor(n), stream=stream).wait()
                comm.scatter(spread, tensor(n), stream=stream).wait()
                comm.sendrecv(tensor(), (rank + 1) % n, received := tensor(), (rank - 1) % n, stream=stream).wait()
                found += [gathered, sent, swapped, spread, received]
    words = (broadcast_json(comm, {"a": rank}), gather_json(comm, [rank]), on_every_rank(comm, lambda: rank))
    return found, (*words, difference_between(comm, [("value", rank)]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "how"),
    [
        pytest.param("private", {}, marks=pytest.mark.long),
        pytest.param("private", {"order": "tree"}, marks=pytest.mark.long),
        ("private", {"order": "rank", "checked": True}),
        pytest.param("window", {}, marks=pytest.mark.long),
    ],
)
def test_collectives_do_not_follow_torchs_defaults(mpi_world, place, how):
    with Communicator(mpi_world, device="cpu", **how) as comm:
        expected, words = results(comm, place)
    for default in DEFAULTS.values():
        with Communicator(mpi_world, device="cpu", **how) as comm:
            with default():
                found, said = results(comm, place)
            assert said == words
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
