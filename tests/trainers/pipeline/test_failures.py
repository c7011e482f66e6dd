"""A stage that is late or dies ends the job, and the report names the stage, the action and the micro-batch."""

import textwrap
import time

import pytest

from commengine.timeout.watcher import EXIT_CODE
from tests.support import mpirun

pytestmark = pytest.mark.slow
LONG = pytest.mark.long

PROGRAM = """
import os, signal, time
from commengine import Communicator, ProcessGrid, launch
from tests.support.training import small_runs

def main(world):
    comm = Communicator(world.mpi, timeout=3)
    trainer = small_runs.trainer("gpt", ProcessGrid(comm, pipeline=2), layers=4)
    trainer.step()
    objective, seen = trainer.objective, []

    def failing(model, batch, randomness):
        seen.append(batch.numbers)
        if world.rank == {rank} and len(seen) == 3:
            {fault}
        return objective(model, batch, randomness)

    failing.names = objective.names
    trainer.objective = failing
    trainer.step()
    print("the step has ended")

launch.run(main)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("rank", "fault", "code", "words"),
    [
        # The last stage waits for the activations of its third micro-batch, which the first one never computes.
        (0, "time.sleep(60)", EXIT_CODE, r"(stage 1, forward of micro-batch 2, chunk 0) is not done after 3."),
        # The first stage waits for the gradient of the third micro-batch.
        pytest.param(
            1, "time.sleep(60)", EXIT_CODE, "(stage 0, backward of micro-batch 2, chunk 0) is not done", marks=LONG
        ),
        pytest.param(1, "os.kill(os.getpid(), signal.SIGKILL)", None, "", marks=LONG),
        pytest.param(1, "raise ValueError('a fault of stage 1')", None, "a fault of stage 1", marks=LONG),
    ],
)
def test_a_fault_of_one_stage_ends_all(tmp_path, rank, fault, code, words):
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(PROGRAM).format(rank=rank, fault=fault))
    began = time.monotonic()
    done = mpirun.run(2, str(path), timeout=60, fresh=True, env={"PYTHONPATH": str(mpirun.ROOT)})
    assert done.returncode != 0 and (code is None or done.returncode == code), (done.stdout, done.stderr)
    assert time.monotonic() - began < 40
    assert words in done.stderr, done.stderr
    assert "the step has ended" not in done.stdout
