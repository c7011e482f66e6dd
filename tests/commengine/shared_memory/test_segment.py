"""Memory that the ranks of a node share: whose memory is where, that it is reserved, and when there is none."""

import gc
import re
import time
from pathlib import Path

import pytest
import torch

from commengine.shared_memory.files import NAMED, NAMELESS, PREFIX, Way
from commengine.shared_memory.segment import PAGE, NodeMemory

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.every_size]

#: a file of a segment; a folder of the checkout may have the prefix, too
OURS = re.compile(rf"/(memfd:|dev/shm/){PREFIX}")
ways = pytest.mark.parametrize("way", [NAMELESS, NAMED], ids=["memfd", "named"])


def ours():
    return set(Path("/dev/shm").glob(PREFIX + "*"))


def none_is_left(before):
    """Whether there are no more files than before. One of another job beside this one has a name for a moment only."""
    for _ in range(50):
        if ours() <= before:
            return True
        time.sleep(0.1)
    return False


def open_files():
    """What this process has open that is shared memory; no path is left of the file of a segment."""
    return [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink() and OURS.match(str(link.readlink()))]


def pages(address):
    """The kilobytes of memory that lie behind the mapping at ``address``, over all processes: its file's blocks."""
    for block in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(end, 16) for end in block.split()[0].split("-"))
        if low <= address < high:
            return Path(f"/proc/self/map_files/{low:x}-{high:x}").stat().st_blocks // 2
    raise AssertionError("the address is not mapped")


@ways
@pytest.mark.parametrize("dtype", [torch.float32, torch.int16])
def test_every_rank_sees_every_part(mpi_world, way, dtype):
    before = ours()
    segment = NodeMemory(mpi_world, mpi_world, way).make(1003)  # not a multiple of the element
    mine = segment.tensor(250, dtype).fill_(mpi_world.rank + 1)
    mpi_world.Barrier()
    parts = segment.typed(dtype)
    assert [len(part) for part in parts] == [1003 // dtype.itemsize] * mpi_world.size
    for rank, part in enumerate(parts):
        assert part[:250].eq(rank + 1).all() and part[250:].eq(0).all()
    assert mine.data_ptr() == segment.address == parts[mpi_world.rank].data_ptr()
    assert segment.address % PAGE == 0
    assert open_files() == []
    mpi_world.Barrier()
    assert none_is_left(before)
    mpi_world.Barrier()


@ways
def test_memory_is_reserved_when_it_is_made_and_lives_as_long_as_a_tensor(mpi_world, way):
    segment = NodeMemory(mpi_world, mpi_world, way).make(3 << 20)
    kept = segment.tensor(100, torch.float32)[50:]
    try:
        assert pages(segment.address) == 3 * 1024 * mpi_world.size, "before anybody has written there"
    except PermissionError:
        pytest.skip("/proc/self/map_files is for root")
    finally:
        address = segment.address
        del segment
        gc.collect()
    kept.fill_(7)
    assert kept.sum() == 350
    del kept
    gc.collect()
    with pytest.raises(AssertionError, match="not mapped"):
        pages(address)


def test_a_file_of_more_bytes_than_an_int_has(mpi_world):
    class Unreserved(Way):
        def reserve(self, file, start, end, ranks=1):
            return end

    made = NodeMemory(mpi_world, mpi_world, Unreserved(*NAMELESS)).make(3 << 30)
    made.parts[mpi_world.rank][-1] = mpi_world.rank + 1
    mpi_world.Barrier()
    assert [int(part[-1]) for part in made.parts] == [rank + 1 for rank in range(mpi_world.size)]
    mpi_world.Barrier()


def _fail(*args):
    raise OSError("not here")


@pytest.mark.slow
@pytest.mark.mpi(min_size=2)
@ways
@pytest.mark.parametrize("fault", [{"left": lambda: 0}, {"open": _fail}, {"create": _fail}, {"left": _fail}])
@pytest.mark.parametrize("who", [0, 1])
def test_where_one_rank_fails_nobody_gets_memory(mpi_world, way, fault, who):
    """And nothing is left behind, of the ranks that had reserved theirs too."""
    memory = NodeMemory(mpi_world, mpi_world, way._replace(**fault) if mpi_world.rank == who else way)
    needless = ("create" if who else "open") in fault  # only the first rank creates a file, and does not open it
    before = ours()
    assert (memory.make(5 << 20) is not None) == needless
    gc.collect()
    mpi_world.Barrier()
    assert open_files() == [] and none_is_left(before)
    mpi_world.Barrier()
    assert NodeMemory(mpi_world, mpi_world, way).make(100) is not None
