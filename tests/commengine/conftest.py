"""A communicator over the whole job, for the tests marked ``mpi``."""

import textwrap
import time

import pytest

from tests.support import mpirun


@pytest.fixture(scope="module")
def world(mpi_world):
    from commengine import Communicator

    with Communicator(mpi_world, device="cpu") as world:
        yield world
        world.close()


@pytest.fixture(scope="module", params=["direct", pytest.param("stream", marks=pytest.mark.sizes(1, 2))])
def run(request, world):
    """``run("all_reduce", ...)``: the operation on ``world``, at once or on a stream, done on return."""
    lane = world.new_stream() if request.param == "stream" else None

    def run(operation, *args):
        getattr(world, operation)(*args, stream=lane).wait()

    return run


@pytest.fixture
def stream(mpi_world):
    """A stream of a communicator of its own: what breaks it breaks nothing else."""
    from commengine import Communicator

    comm = Communicator(mpi_world, device="cpu", name="streamed")
    made = comm.new_stream()
    made.comm = comm
    yield made
    comm.close()


@pytest.fixture
def job(tmp_path):
    """Run ``body`` as ``main(world)`` of a job: (the finished process, its seconds). fresh: as for `mpirun.run`."""

    def job(body, n=2, env=None, program="launch.run(main)", fresh=False):
        path = tmp_path / "program.py"
        path.write_text(
            "import os, signal, sys, time\n"
            "import torch\n"
            "from commengine import CollectiveError, Communicator, UsageError, launch\n"
            "def main(world):\n"
            "    print(f'<{world.rank} of {world.size}>\\n', end='', flush=True)\n"
            + textwrap.indent(textwrap.dedent(body), "    ")
            + f"\n{program}\n"
        )
        began = time.monotonic()
        done = mpirun.run(n, str(path), env=env, timeout=40, fresh=fresh)
        return done, time.monotonic() - began

    return job
