"""Signals are heard while the main thread is inside a library, and a command's first second ends with one line."""

import signal
import subprocess
import sys
import textwrap

import pytest

from tests.support import mpirun
from tests.support.lab.hosts import is_intel
from trainers.run import signals
from trainers.settings.steps import SIGNALS

# The main thread waits for a lock that nobody releases, in the C library, where Python's handlers do not run.
HELD = """
import ctypes, fcntl, os, signal, sys, time
from trainers.run.signals import SignalListener
def end(number):
    os.write(1, f"at once {number.name}\\n".encode())
    os._exit(9)
listener = SignalListener(end)
listener.add(signal.SIGUSR1)
def wait():
    one, other = (os.open(sys.argv[1], os.O_RDWR | os.O_CREAT) for _ in range(2))
    fcntl.flock(one, fcntl.LOCK_EX)
    ctypes.CDLL(None).flock(other, fcntl.LOCK_EX)
"""


def run(tmp_path, body, timeout=30, held=HELD):
    argv = [sys.executable, "-c", held + textwrap.dedent(body), str(tmp_path / "lock")]
    return subprocess.run(
        argv, env=mpirun.environment(), capture_output=True, text=True, timeout=timeout, check=False, cwd=mpirun.ROOT
    )


def later(*numbers):
    """Code that sends these signals to the process itself, from another one."""
    sends = "; ".join(f"kill -{int(number)} $PPID; sleep 0.2" for number in numbers)
    return f"import subprocess; subprocess.Popen(['sh', '-c', 'sleep 0.2; {sends}'])\n"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_before_there_is_something_to_save_it_ends_at_once(tmp_path, number):
    done = run(tmp_path, later(number) + "wait()")
    assert (done.returncode, done.stdout, done.stderr) == (9, f"at once {number.name}\n", "")


IGNORED = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"


@pytest.mark.slow
def test_an_interrupt_that_is_ignored_stays_so(tmp_path):
    """As it is in a background job; other signals are heard."""
    early = IGNORED + "from commengine.job_end import end_on_interrupt\nend_on_interrupt()\n"
    done = run(tmp_path, later(signal.SIGINT, signal.SIGTERM) + "wait()", held=early + HELD)
    assert (done.returncode, done.stdout, done.stderr) == (9, "at once SIGTERM\n", "")


def test_an_ignored_interrupt_is_heard_if_it_is_asked_for(tmp_path):
    """As --exit-signal INT does."""
    body = "listener.add(signal.SIGINT)\n" + later(signal.SIGINT) + "wait()"
    done = run(tmp_path, body, held=IGNORED + HELD)
    assert (done.returncode, done.stdout, done.stderr) == (9, "at once SIGINT\n", "")


@pytest.mark.slow
def test_afterwards_the_first_is_kept_and_a_second_interrupt_ends(tmp_path):
    numbers = [signal.SIGUSR1, signal.SIGINT, signal.SIGTERM, signal.SIGINT]
    body = "listener._at_once = lambda number: (print(listener.received, flush=True), end(number))\n"
    done = run(tmp_path, "listener.hold()\n" + body + later(*numbers) + "wait()")
    assert done.stdout == f"{int(signal.SIGUSR1)}\nat once SIGINT\n" and done.returncode == 9, done.stderr


@pytest.mark.slow
def test_after_the_end_they_are_ignored_or_do_what_they_did(tmp_path):
    ignored = run(tmp_path, "listener.close(ignore=True)\n" + later(signal.SIGTERM, signal.SIGUSR1) + "time.sleep(1)")
    assert (ignored.returncode, ignored.stderr) == (0, "")
    restored = run(tmp_path, "listener.close(ignore=False)\n" + later(signal.SIGTERM) + "time.sleep(20)")
    assert restored.returncode == -signal.SIGTERM


@pytest.mark.slow
def test_system_calls_of_libraries_do_not_end_early(tmp_path):
    body = """
        listener.hold()
        import threading
        read, write = os.pipe()
        threading.Timer(1.0, lambda: os.write(write, b"x")).start()
        buffer = ctypes.create_string_buffer(1)
        print(ctypes.CDLL(None).read(read, buffer, 1), listener.received)
    """
    done = run(tmp_path, later(signal.SIGUSR1) + textwrap.dedent(body))
    assert done.stdout == f"1 {int(signal.SIGUSR1)}\n", done.stderr


BEFORE = "before the run began"


@pytest.mark.slow
@pytest.mark.parametrize(
    "number, flags, status, line",
    [
        ("SIGINT", [], 130, f"interrupted (SIGINT) {BEFORE}\n"),
        ("SIGTERM", [], 75, f"SIGTERM {BEFORE}: nothing to save (exit status 75)\n"),
        pytest.param(
            "SIGUSR1", ["--exit-signal", "usr1"], 75, f"SIGUSR1 {BEFORE}: nothing to save (exit status 75)\n",
            marks=pytest.mark.long,
        ),
        ("SIGUSR1", ["--exit-signal=SIGUSR1"], 75, f"SIGUSR1 {BEFORE}: nothing to save (exit status 75)\n"),
        ("SIGUSR1", ["--exit-signal", "nonsense", "--exit-signal"], -signal.SIGUSR1, ""),
        pytest.param(
            "SIGINT", ["--exit-signal", "INT"], 130, f"interrupted (SIGINT) {BEFORE}\n", marks=pytest.mark.long
        ),
    ],
)  # fmt: skip
def test_a_signal_before_the_imports_are_done(tmp_path, number, flags, status, line):
    done = interrupted_imports(tmp_path, f"os.kill(os.getpid(), signal.{number})", "trainers.pretrain_gpt", *flags)
    assert (done.returncode, done.stderr) == (status, line)


def at_import(tmp_path, code):
    """The environment of a Python in which ``code`` runs when commengine.options is about to be imported."""
    (tmp_path / "sitecustomize.py").write_text(f"""
import os, signal, subprocess, sys, time
class AtImport:
    def find_spec(self, name, path=None, target=None):
        if name == "commengine.options":
            {code}
sys.meta_path.insert(0, AtImport())
""")
    return {"PYTHONPATH": f"{tmp_path}:{mpirun.ROOT}"}


def interrupted_imports(tmp_path, code, command, *words):
    """``python -m COMMAND``, with `at_import`."""
    env = mpirun.environment(at_import(tmp_path, code))
    argv = [sys.executable, "-m", command, *words]
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=False, cwd=mpirun.ROOT)


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        *("trainers.generate", "trainers.supervise", "bench.study"),
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in (
                *(f"trainers.{name}" for name in ("evaluate", "prepare_corpus", "convert", "preprocess_data")),
                *("trainers.compare", "bench.doctor"),
            )
        ),
    ],
)
def test_ctrl_c_during_the_imports_of_any_command(tmp_path, command):
    """Not even an import that catches every exception loses it."""
    code = "exec('try: os.kill(os.getpid(), signal.SIGINT)\\nexcept BaseException: pass')"
    done = interrupted_imports(tmp_path, code, command)
    assert (done.returncode, done.stderr) == (130, f"interrupted (SIGINT) {BEFORE}\n")


# Rank 0 starts MPI and waits; rank 1 is the command, in which a signal comes.
ONE_OF_TWO = """
import os, signal, subprocess, sys, time
from pathlib import Path
if next(os.environ[name] for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK") if name in os.environ) == "1":
    os.execv(sys.executable, [sys.executable, "-m", *sys.argv[1:]])
time.sleep(2)
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
time.sleep(60)
"""
AT_ONCE = "os.kill(os.getpid(), signal.{})"
IN_MPI_INIT = "subprocess.Popen(['sh', '-c', f'sleep 0.7; kill -TERM {{os.getpid()}}']); import mpi4py.MPI  # {}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "command, when, number, status",
    [
        ("trainers.pretrain_gpt", AT_ONCE, "SIGTERM", 75),
        pytest.param("trainers.pretrain_gpt", IN_MPI_INIT, "SIGTERM", 75, marks=pytest.mark.long),
        pytest.param("trainers.evaluate", AT_ONCE, "SIGINT", 130, marks=pytest.mark.long),
    ],
)
def test_a_signal_to_one_rank_before_mpi_has_started_ends_all_ranks(tmp_path, command, when, number, status):
    argv = [mpirun.mpiexec(), "-n", "2", sys.executable, "-c", ONE_OF_TWO, command]
    done = mpirun.command(argv, timeout=50, env=at_import(tmp_path, when.format(number)))
    # Intel's launcher has a status of its own for a rank that ends inside MPI_Init.
    expected = 255 if is_intel() and when == IN_MPI_INIT else status
    assert done.returncode == expected, done.stderr
    assert done.stderr.count(f"{BEFORE}") == 1 and "Traceback" not in done.stderr


@pytest.mark.parametrize("name", SIGNALS)
def test_every_name_that_the_option_takes_is_a_signal(name):
    number = signal.Signals[f"SIG{name}"]
    assert signals.parse(name) == signals.parse(f"SIG{name}") == signals.parse(name.lower()) == number
