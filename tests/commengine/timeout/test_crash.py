"""A rank that crashes while it is watched says so first, and then ends as the signal would have ended it."""

import signal

import pytest

from tests.support.lab.hosts import is_open_mpi

pytestmark = pytest.mark.slow

#: a crash in C code, without Python's lock, as in a call of MPI
CRASH = "import ctypes\nctypes.CDLL(None).memset(0, 0, 1)\n"


def test_a_crash_is_reported(job):
    """The report names the collective, and the other rank of the group."""
    done, _ = job(
        """
import ctypes, threading
timed = Communicator(world.mpi, timeout=20)
timed.all_reduce(torch.ones(4))
crash = threading.Timer(0.5, lambda: ctypes.CDLL(None).memset(0, 0, 1))
if world.rank == 1:
    crash.start()
    timed.barrier()
time.sleep(30)
""",
    )
    assert done.returncode not in (0, 1, 124), done
    assert "[rank 1] crashed (SIGSEGV)." in done.stderr
    assert "missing: rank 0, barrier #2 (the crash was in this call)" in done.stderr
    assert "#1 all_reduce(float32 [4], op=sum) of group 'world': done in" in done.stderr
    assert "Fatal Python error: Segmentation fault" in done.stderr and "in run" in done.stderr


@pytest.mark.long
def test_what_belongs_to_others_is_left_alone(job):
    """Whoever handles crashes already, a forked child, and the process after the communicator's end."""
    done, _ = job(
        f"""
import faulthandler
from commengine.timeout.crash import CrashReport
def crash():
{"".join(f"    {line}" + chr(10) for line in CRASH.splitlines())}
def crash_in_child():
    pid = os.fork()
    if pid == 0:
        crash()
    return -os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
timed = Communicator(world.mpi, timeout=20)
assert faulthandler.is_enabled()
began = time.monotonic()
assert crash_in_child() == signal.SIGSEGV
assert time.monotonic() - began < 4, "the child slept"
timed.close()
assert not faulthandler.is_enabled()
began = time.monotonic()
assert crash_in_child() == signal.SIGSEGV
assert time.monotonic() - began < 4, "the child slept"
faulthandler.enable()
assert not CrashReport(str).active
faulthandler.disable()
signal.signal(signal.SIGBUS, lambda *_: None)
assert not CrashReport(str).active and not faulthandler.is_enabled()
""",
        n=1,
    )
    assert done.returncode == 0 and "crashed (" not in done.stderr and "Traceback" not in done.stderr, done
    assert done.stderr == "" or is_open_mpi(), "Open MPI's own handlers, which print, are in place again"


@pytest.mark.long
def test_a_crash_that_holds_pythons_lock_ends_the_process_too(job):
    """It cannot be reported, and its signal ends it after the sleep: 4 s for SIGILL."""
    done, seconds = job(
        "timed = Communicator(world.mpi, timeout=20)\n__import__('ctypes').PyDLL(None).raise_ = None\n"
        "getattr(__import__('ctypes').PyDLL(None), 'raise')(signal.SIGILL)\ntime.sleep(30)",
        n=1,
    )
    assert done.returncode != 0 and seconds < 15, done
    assert signal.SIGILL.value == 4
