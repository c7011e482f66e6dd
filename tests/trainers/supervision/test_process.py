"""A child that is watched: its status, signals that are passed on, a start that takes too long, a parent that dies."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from tests.support import mpirun
from trainers.supervision import process

pytestmark = pytest.mark.slow

#: says that it is ready, and what signal it got
LISTENER = """
import signal, sys, time
def end(number, frame):
    open(sys.argv[1] + ".got", "w").write(signal.Signals(number).name)
    sys.exit(75)
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
    signal.signal(number, end)
open(sys.argv[1], "w").close()
time.sleep(60)
"""


def start(words, signals=None, begun=lambda: True, seconds=60.0):
    if signals is not None:
        return process.run(words, signals, begun, seconds)
    with process.Signals() as signals:
        return process.run(words, signals, begun, seconds)


def test_status_is_that_of_the_child():
    assert start(["sh", "-c", "exit 7"]) == 7
    assert start(["sh", "-c", "kill -9 $$"]) == -9
    with pytest.raises(FileNotFoundError):
        start(["no-such-launcher"])


@pytest.mark.parametrize(
    "sent, translated, got",
    [
        (signal.SIGUSR1, None, "SIGUSR1"),
        (signal.SIGINT, None, "SIGINT"),
        (signal.SIGTERM, None, "SIGTERM"),
        (signal.SIGTERM, signal.SIGUSR1, "SIGUSR1"),
    ],
)
def test_a_signal_is_passed_on(tmp_path, sent, translated, got):
    ready = tmp_path / "ready"

    def send():
        while not ready.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), sent)

    before = signal.getsignal(sent)
    with process.Signals(translated) as signals:
        threading.Thread(target=send).start()
        assert start([sys.executable, "-c", LISTENER, str(ready)], signals) == 75
        assert signals.received == sent
    assert (tmp_path / "ready.got").read_text() == got and signal.getsignal(sent) is before


def test_a_signal_before_the_child_is_there_reaches_it_and_ends_a_wait():
    with process.Signals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        signals.sleep(60)
        assert start(["sleep", "60"], signals) == -signal.SIGTERM


def test_a_start_that_takes_too_long_is_ended(capfd):
    assert start(["sleep", "60"], begun=lambda: False, seconds=0.3) is None
    assert "no step has begun (--start-minutes)" in capfd.readouterr().err
    assert start(["sleep", "0.5"], begun=lambda: True, seconds=0.0) == 0


@pytest.mark.parametrize("status", [75, 0])
def test_a_start_that_takes_too_long_has_no_status(tmp_path, status):
    """Ranks before their first step answer SIGTERM with 75, which otherwise means that the run was stopped."""
    ready = tmp_path / "ready"
    trapped = f"trap 'exit {status}' TERM; touch {ready}; while :; do sleep 0.05; done"
    assert start(["sh", "-c", trapped], begun=lambda: False, seconds=1.0) is None
    assert ready.exists()


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_an_ignored_signal_stays_ignored_here_and_in_the_child(number):
    """As SIGHUP is under nohup, and SIGINT in a background job."""
    tells = f"import signal, sys; sys.exit(7 + (signal.getsignal({int(number)}) is signal.SIG_IGN))"
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with process.Signals() as signals:
            os.kill(os.getpid(), number)
            assert start([sys.executable, "-c", tells], signals) == 8
            assert signals.received is None
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux ends a child with its parent")
def test_the_child_ends_with_its_parent(tmp_path):
    program = (
        "import sys; from trainers.supervision import process\n"
        "with process.Signals() as signals:\n"
        "    process.run([sys.executable, '-c', *sys.argv[1:]], signals, lambda: True, 60)\n"
    )
    ready = tmp_path / "ready"
    parent = subprocess.Popen([sys.executable, "-c", program, LISTENER, str(ready)], env=mpirun.environment())
    deadline = time.monotonic() + 60
    while not ready.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    parent.kill()
    parent.wait()
    got = tmp_path / "ready.got"
    while not (got.exists() and got.read_text()) and time.monotonic() < deadline:  # it exists before it is written
        time.sleep(0.01)
    assert got.read_text() == "SIGTERM"
