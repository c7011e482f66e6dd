"""Which ranks share memory: also where MPI says that they do, and then makes no window for them."""

import sys

import pytest

from tests.support import mpirun

#: two ranks spawn two more, on the same node
SPAWNED = """
import sys
import torch
from mpi4py import MPI
from commengine import Communicator
parent = MPI.Comm.Get_parent()
if parent == MPI.COMM_NULL:
    both = MPI.COMM_WORLD.Spawn(sys.executable, [__file__], maxprocs=2).Merge(False)
else:
    both = parent.Merge(True)
with Communicator(both, timeout=30) as comm:
    tensor = comm.empty((1 << 18,)).fill_(1)
    comm.all_reduce(tensor)
    private = torch.ones(1 << 18)
    comm.all_reduce(private, stream=comm.new_stream()).wait()
    assert tensor.eq(4).all() and private.eq(4).all()
    assert comm._watched.world_ranks == (0, 1, 2, 3)
    assert comm.node_size in (4, None) and comm._shared.reaches(tensor) == (comm.node_size == 4)
    sys.stdout.write(f"rank {comm.rank} is right\\n")
    sys.stdout.flush()
"""


@pytest.mark.slow
@pytest.mark.long
def test_spawned_and_merged_ranks(tmp_path):
    """MPICH shares no memory between ranks that were spawned apart: tensors are private there. Others do."""
    (tmp_path / "program.py").write_text(SPAWNED)
    done = mpirun.command([mpirun.mpiexec(), "-n", "2", sys.executable, str(tmp_path / "program.py")], timeout=60,
                          env={"I_MPI_SPAWN": "1"})  # fmt: skip
    assert done.returncode == 0 and sorted(done.stdout.split("\n")[:-1]) == [f"rank {r} is right" for r in range(4)], (
        done
    )
