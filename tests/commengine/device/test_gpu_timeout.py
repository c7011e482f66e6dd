"""A device collective that a rank never joins, for real: tests/run -m gpu with RANKS=0."""

import pytest
import torch

from tests.support import mpirun

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device, or not asked for with -m gpu"),
]


def test_a_rank_that_never_comes_is_named(tmp_path):
    """The timeout also covers the import of CuPy and NCCL's start, which take seconds."""
    (tmp_path / "job.py").write_text(
        "from mpi4py import MPI\nimport time, torch\nfrom commengine import Communicator\n"
        "comm = Communicator(MPI.COMM_WORLD, device='cuda', timeout=30)\n"
        "tensor = torch.ones(3, device=comm.device)\ncomm.all_reduce(tensor)\ntorch.cuda.synchronize()\n"
        "if comm.rank == 1: time.sleep(300)\n"
        "comm.all_reduce(tensor)\ntorch.cuda.synchronize()\n"
    )
    done = mpirun.run(2, str(tmp_path / "job.py"), timeout=100, fresh=True)
    if "needs one for each rank" in done.stderr:
        pytest.skip("NCCL wants a device for each rank")
    assert done.returncode == 124, (done.stdout, done.stderr)
    assert "missing: rank 1, all_reduce #2" in done.stderr
