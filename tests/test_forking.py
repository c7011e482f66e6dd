"""The fork server of the tests: a forked program ends as a started one, and nothing is left of one whose stub dies."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from tests.support import mpirun
from tests.support.forking import client

pytestmark = pytest.mark.slow


def both(*words, n=None, env=None):
    """What a program says and how it ends: forked, and then started. n: under mpiexec."""
    argv = [sys.executable, *words] if n is None else [mpirun.mpiexec(), "-n", str(n), sys.executable, *words]
    done = [mpirun.command(argv, 30, env=env, fresh=fresh) for fresh in (False, True)]
    return [(one.returncode, one.stdout, one.stderr) for one in done]


@pytest.mark.parametrize(
    "program",
    [
        "import sys; print(sys.argv, sys.path, __name__); sys.exit(5)",
        "import os; os._exit(9)",
        "import sys; sys.exit('words')",
        "def f(): raise ValueError(3)\nf()",
        "import os; os.kill(os.getpid(), 9)",
        "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
        "import atexit; atexit.register(print, 'the end')",
        "import os, sys; print(sys.stdin.read(), sorted(os.environ), os.getcwd(), sys.flags, sys.orig_argv[-1])",
    ],
)
def test_a_forked_program_ends_as_a_started_one(program):
    forked, started = both("-c", program, "an argument")
    assert forked == started


def test_scripts_and_modules_see_what_python_gives_them(tmp_path):
    path = tmp_path / "program.py"
    path.write_text("import sys\nprint(__file__, sys.argv, sys.path[0], sys.modules['__main__'].__dict__['sys'])\n")
    forked, started = both(str(path), "a")
    assert forked == started and forked[0] == 0
    forked, started = both("-m", "tests.faults", "--help")
    assert forked == started and forked[0] == 0


@pytest.mark.parametrize("end", ["sys.exit(7 * (rank == 1))", "os.kill(os.getpid(), 9) if rank else comm.Barrier()"])
def test_mpiexec_sees_how_a_forked_rank_ends(end):
    program = f"import os, sys\nfrom mpi4py import MPI\ncomm = MPI.COMM_WORLD\nrank = comm.rank\n{end}\n"
    forked, started = both("-c", program, n=2)
    assert forked[0] == started[0] != 0


def test_a_variable_that_a_library_reads_starts_python():
    program = "import sys; print('torch' in sys.modules)"
    assert [one[1] for one in both("-c", program)] == ["True\n", "False\n"]
    assert [one[1] for one in both("-c", program, env={"OMP_NUM_THREADS": "2"})] == ["False\n"] * 2
    assert [one[1] for one in both("-W", "error", "-c", program)] == ["False\n"] * 2


def gone(process):
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.01)
    return False


def test_a_program_gets_the_signals_of_its_stub_and_ends_with_it():
    words = ["-c", "import os, time; print(os.getpid(), flush=True); time.sleep(60)"]
    for number in (signal.SIGTERM, signal.SIGKILL):
        with mpirun.start([sys.executable, *words], stdout=subprocess.PIPE, fresh=False) as stub:
            process = int(stub.stdout.readline())
            assert process != stub.pid
            stub.send_signal(number)
            assert stub.wait(10) == -number
        assert gone(process)


def test_the_server_outlives_clients_that_break_off():
    *_, address = client.python(mpirun.environment())
    for said in (b"", b"1", bytes(12)):
        with socket.socket(socket.AF_UNIX) as broken:
            broken.connect(address)
            broken.sendall(said)
    assert client.python(mpirun.environment())[-1] == address
    assert mpirun.command([sys.executable, "-c", "print(3)"], 30, fresh=False).stdout == "3\n"
