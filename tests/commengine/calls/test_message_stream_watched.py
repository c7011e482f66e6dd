"""The timeout of messages that MPI starts when they are enqueued: it counts while somebody waits."""

import pytest

from commengine.timeout.watcher import EXIT_CODE

pytestmark = pytest.mark.slow

#: what the ranks of a job run on, besides the world that launch gives them
WATCHED = """
timed = Communicator(world.mpi, timeout=2, name="pipeline")
lane = timed.new_stream(threaded=False)
got, peer = torch.zeros(4), 1 - world.rank
"""
SAID = "stage 1, forward of micro-batch 3"


@pytest.mark.parametrize(
    "wait",
    [
        "work.wait()",
        pytest.param("lane.synchronize()", marks=pytest.mark.long),
        pytest.param("timed.close()", marks=pytest.mark.long),
        pytest.param("worker.synchronize()", marks=pytest.mark.long),
    ],
)
def test_a_message_that_never_comes_is_reported_with_its_words_and_its_peer(job, wait):
    elsewhere = "timed.close()" if wait == "timed.close()" else "time.sleep(60)"
    done, seconds = job(
        WATCHED
        + f"""
worker = timed.new_stream()
if world.rank == 1:
    {elsewhere}
with timed.about("{SAID}"):
    work = timed.recv(got, 1, stream=lane)
worker.wait_event(work)
with timed.about("the words of another call"):
    {wait}
"""
    )
    assert done.returncode == EXIT_CODE and seconds < 30, (done.stdout, done.stderr)
    assert f"[rank 0] recv #1 of group 'pipeline' ({SAID}) is not done after 2." in done.stderr, done.stderr
    assert "missing: rank 1, recv #1 (it neither sends to this rank nor receives from it)" in done.stderr
    line = f"#1 recv(float32 [4], root=1) of group 'pipeline', stream 1 point to point ({SAID}): running for 2."
    assert line in done.stderr


@pytest.mark.long
def test_a_collective_in_a_block_of_words(job):
    done, _ = job(WATCHED + f"with timed.about('{SAID}'):\n    time.sleep(60 * world.rank)\n    timed.barrier()")
    assert f"[rank 0] barrier #1 of group 'pipeline' ({SAID}) is not done after 2." in done.stderr, done.stderr
    assert f"#1 barrier() of group 'pipeline' ({SAID}): running for" in done.stderr


@pytest.mark.long
def test_a_peer_that_is_gone_is_named(job):
    done, _ = job(
        WATCHED
        + """
timed.barrier()
work = timed.recv(got, peer, stream=lane)
if world.rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)  # if it had ended, the launcher would end the job
work.wait()
"""
    )
    assert done.returncode == EXIT_CODE, (done.stdout, done.stderr)
    assert "missing: rank 1, recv #1 (it does not answer)" in done.stderr


@pytest.mark.long
def test_a_peer_that_is_killed_ends_the_job(job):
    done, seconds = job(
        WATCHED
        + """
timed.barrier()
work = timed.recv(got, peer, stream=lane)
if world.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
work.wait()
"""
    )
    assert done.returncode != 0 and seconds < 20, (done.stdout, done.stderr)


@pytest.mark.long
def test_a_late_sender_is_no_error(job):
    """Receives are posted early and not waited for, for longer than the timeout; other calls run meanwhile."""
    done, _ = job(
        WATCHED
        + """
works = [timed.recv(torch.zeros(1 << 20), peer, stream=lane), timed.recv(got, peer, stream=lane)]
timed.barrier()
time.sleep(3.5)
assert not any(work.done() for work in works)
timed.barrier()  # under load the other rank's sleep may end first, and it must not have sent
timed.send(torch.ones(1 << 20), peer, stream=lane)
timed.send(torch.ones(4), peer, stream=lane)
time.sleep(0.5)
for work in reversed(works):
    work.wait()
assert (got == 1).all()
timed.close()
print("all done")
"""
    )
    assert done.returncode == 0 and done.stdout.count("all done") == 2, (done.stdout, done.stderr)


@pytest.mark.long
def test_without_threads_the_wait_itself_raises(job):
    done, _ = job(
        WATCHED
        + f"""
if world.rank == 1:
    time.sleep(60)
with timed.about("{SAID}"):
    work = timed.recv(got, 1, stream=lane)
time.sleep(2.5)
work.wait()
""",
        program="import mpi4py\nmpi4py.rc.thread_level = 'funneled'\nfrom mpi4py import MPI\nlaunch.run(main)",
    )
    assert done.returncode == 1
    assert f"CollectiveTimeout: [rank 0] recv #1 of group 'pipeline' ({SAID}) is not done after 2." in done.stderr


def test_a_program_that_ends_without_close_delivers_its_messages(job):
    done, _ = job(
        """
alone = Communicator(world.mpi, name="pipeline")
lane = alone.new_stream(threaded=False)
if world.rank == 0:
    alone.send(torch.ones(1 << 20), 1, stream=lane)
else:
    got = torch.zeros(1 << 20)
    time.sleep(0.5)
    alone.recv(got, 0, stream=lane).wait()
    assert (got == 1).all()
    print("delivered")
"""
    )
    assert done.returncode == 0 and "delivered" in done.stdout, (done.stdout, done.stderr)
