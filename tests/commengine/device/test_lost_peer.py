"""Jobs over the real CuPy in which a rank is lost while another one waits for it: one report, and the job ends."""

import textwrap

import pytest

import tests.support.device.nccl.library  # noqa: F401  skips this file where there is no CuPy
from commengine.timeout.watcher import EXIT_CODE
from tests.support import mpirun
from tests.support.lab import hosts as lab

REASON = lab.why_not()
pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]
#: all ranks have connected; rank 1 is lost, and the others enqueue a collective and wait for it
BODY = """
import pytest
from tests.support.device.device_stand_in import communicator_stand_in, on_device
patches, tensor = pytest.MonkeyPatch(), torch.ones(3)
timed, runtime = communicator_stand_in(patches, world.mpi, timeout={timeout})
lane = {lane}
timed.all_reduce(on_device(tensor), stream=lane).wait()
runtime.cuda.synchronize()
assert (tensor == world.size).all()
if world.rank == 1:
    {lost}
    time.sleep(60)
timed.all_reduce(on_device(tensor), stream=lane).wait()
runtime.cuda.synchronize()
print("nobody noticed")
"""


def body(lost, timeout=60, lane="None"):
    return BODY.format(lost=lost, timeout=timeout, lane=lane)


def report(stderr, rank):
    """What this rank printed last."""
    assert f"[rank {rank}] " in stderr, stderr
    return stderr.rsplit(f"[rank {rank}] ", 1)[1]


@pytest.mark.parametrize(
    ("n", "lane"), [(2, "None"), (2, "timed.new_stream()"), pytest.param(4, "None", marks=pytest.mark.long)]
)
def test_a_broken_link_ends_the_job_before_the_timeout(job, n, lane):
    """NCCL tells it by an asynchronous error only: what is enqueued never ends."""
    done, seconds = job(body("runtime.library.comms[-1].lose()", lane=lane), n=n)
    assert done.returncode == EXIT_CODE and "nobody" not in done.stdout, (done.stdout, done.stderr)
    assert "NCCL_ERROR_REMOTE" in report(done.stderr, 0) and "(rank 1 has left)" in done.stderr
    assert "#2 all_reduce(float32 cuda [3], op=sum) of group 'world'" in report(done.stderr, 0)
    assert seconds < 40


@pytest.mark.long
@pytest.mark.skipif(REASON is not None, reason=f"no emulated hosts: {REASON}")
@pytest.mark.skipif(lab.is_open_mpi(), reason="Open MPI's launcher ends all ranks when one dies")
def test_a_killed_rank_ends_the_job_before_the_timeout(tmp_path):
    """On two hosts, because there the launcher leaves the survivor alone. MPICH then crashes it, after its report."""
    path, log = tmp_path / "program.py", tmp_path / "log"
    path.write_text(
        "import os, signal, time, torch\nfrom commengine import launch\ndef main(world):\n"
        + textwrap.indent(body("os.kill(os.getpid(), signal.SIGKILL)"), "    ")
        + "\nlaunch.run(main)\n"
    )
    with lab.emulated_hosts(2, 100, 1000) as hosts:
        killed = hosts.start(str(path), log=log, options=["-disable-auto-cleanup"])
        try:
            assert killed.wait(40) != 0
        finally:
            mpirun.stop(killed)
    said = log.read_text()
    assert "[rank 0] NCCL_ERROR_REMOTE" in said and "(rank 1 has left)" in said and "nobody" not in said
    assert "#2 all_reduce(float32 cuda [3], op=sum) of group 'world': running" in said


def test_a_rank_that_raises_is_named(job):
    done, _ = job(body("raise ValueError('planted')"))
    assert done.returncode not in (0, EXIT_CODE), (done.stdout, done.stderr)
    assert "ValueError: planted" in done.stderr and "nobody" not in done.stdout


def test_a_rank_that_stays_away_runs_out_of_the_timeout(job):
    done, _ = job(body("time.sleep(60)", timeout=3))
    assert done.returncode == EXIT_CODE, (done.stdout, done.stderr)
    assert "missing: rank 1, all_reduce #2" in report(done.stderr, 0)


def test_a_rank_that_never_connects_runs_out_of_the_timeout(job):
    late = "from commengine.device import nccl\nif world.rank == 1: nccl._joined = lambda *_: time.sleep(60)\n"
    done, _ = job(late + body("pass", timeout=3))
    assert done.returncode == EXIT_CODE, (done.stdout, done.stderr)
    assert "is not done" in report(done.stderr, 0) and "(timeout 3 s)" in report(done.stderr, 0)
