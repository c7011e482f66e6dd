"""Keep the ranks of an MPI test run in step: a failure on one rank is a failure on all, and never a hang.

After each phase of a test (setup, call, teardown) the ranks exchange its outcome on a communicator of their own. If the
phase failed on one rank, all ranks fail it. Only rank 0's report is shown, and it contains the failures of the other
ranks. Therefore the ranks always run the same tests in the same order.

The other ranks may wait for a failed rank inside a collective that it never joined. A failed rank therefore waits only
``GRACE_S`` for them, prints its own failure and aborts the job. A rank that did not fail waits until the test's time
limit (pytest-timeout's). Then every rank prints its stacks.
"""

import faulthandler
import io
import os
import re
import signal
import threading
import time
from collections.abc import Generator
from typing import Any, NoReturn

import numpy as np
import pytest
from mpi4py import MPI

GRACE_S = 5.0  # a failed rank waits this long for the others before it ends the job
COLLECTION_S = 60.0  # the first rank to have collected its tests waits this long for the others
WATCH_S = 0.2  # how often a rank looks at its time limit
STACKS_S = 1.0  # after a time limit, a rank waits this long before it ends the job, so that all print their stacks
FORWARD_S = 0.5  # an aborting rank waits this long for its output to be forwarded, because MPICH's launcher drops it
EXIT_S = 30  # a rank that has not left MPI this long after its last test is killed

PASSED, SKIPPED, FAILED = range(3)
WORDS = ("passed", "skipped", "failed")


class Lockstep:
    """The plugin. It uses a duplicate of MPI.COMM_WORLD, so that its messages and those of a test never meet."""

    def __init__(self, config: pytest.Config) -> None:
        self._comm = MPI.COMM_WORLD.Dup()
        self._rank = self._comm.rank
        self._stderr = os.dup(2)  # not captured by pytest
        self._report = io.StringIO()  # the report of a rank other than 0
        self._report_is_news = self._rank > 0  # whether rank 0's report does not contain it
        self._limit: float | None = None  # seconds for each phase of the current test
        self._due: tuple[float, pytest.Item, str] | None = None  # when the current phase must have ended, and which
        threading.Thread(target=self._watch, name="time limits", daemon=True).start()
        if self._rank > 0:
            config.pluginmanager.unregister(name="terminalreporter")
            config.pluginmanager.register(pytest.TerminalReporter(config, self._report), "terminalreporter")

    def pytest_report_header(self) -> str:
        vendor, version = MPI.get_vendor()
        return f"mpi: {self._comm.size} ranks, {vendor} {'.'.join(map(str, version))}"

    # Collection: unless all ranks collected the same tests, none is run.

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, Any, Any]:
        errors, names = session.testsfailed, [item.nodeid for item in session.items]
        if self._arrived(errors, COLLECTION_S) is None:
            self._abort("this rank has collected its tests, and another has not")
        found = self._comm.allgather((errors, names))
        if found[0][0] > 0:
            self._report_is_news = False
        for rank, (theirs, others) in enumerate(found):
            if theirs and not errors:
                self._report_is_news = False
                pytest.exit(f"rank {rank} could not collect its tests", returncode=pytest.ExitCode.INTERRUPTED)
            if others != found[0][1] and not errors:
                self._report_is_news = False
                odd = sorted(set(others) ^ set(found[0][1])) or ["another order"]
                reason = f"ranks 0 and {rank} collected different tests: {', '.join(odd[:4])}"
                pytest.exit(reason, returncode=pytest.ExitCode.INTERRUPTED)
        return (yield)

    # Tests: all ranks exchange the outcome of each phase.

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, Any, Any]:
        return (yield from self._phase(item, "setup"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        return (yield from self._phase(item, "call"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, Any, Any]:
        return (yield from self._phase(item, "teardown"))

    def _phase(self, item: pytest.Item, phase: str) -> Generator[None, Any, Any]:
        self._due = (time.monotonic() + self._limit, item, phase) if self._limit else None
        try:
            try:
                result = yield
            except (KeyboardInterrupt, pytest.exit.Exception):
                raise
            except BaseException as error:  # pytest's own outcomes are no Exceptions
                outcome = SKIPPED if isinstance(error, pytest.skip.Exception) else FAILED
                text = str(item.repr_failure(pytest.ExceptionInfo.from_exception(error)))
                others = self._agree(item, phase, outcome, text)
                if others and outcome == SKIPPED:
                    pytest.fail(others, pytrace=False)
                raise
            others = self._agree(item, phase, PASSED, "")
            if others:
                pytest.fail(others, pytrace=False)
            return result
        finally:
            self._due = None

    def _agree(self, item: pytest.Item, phase: str, outcome: int, text: str) -> str:
        """Exchange the outcome of a phase. Return the other ranks' words, or "" if all passed or all skipped."""
        outcomes = self._arrived(outcome, GRACE_S if outcome == FAILED else None)
        if outcomes is None:
            self._abort(f"{text}\n{item.nodeid}: this rank failed in {phase}, and the others wait for it")
        if len(set(outcomes)) == 1 and outcome != FAILED:
            return ""
        said: dict[str, list[int]] = {}
        for rank, (theirs, words) in enumerate(zip(outcomes, self._comm.allgather(text), strict=True)):
            if rank != self._rank:
                same = theirs == outcome and _anywhere(words) == _anywhere(text)
                message = f"{WORDS[theirs]} in {phase}" + (", in the same way" if same else f"\n{words}".rstrip())
                said.setdefault(message, []).append(rank)
        others = "\n".join(f"[rank {', '.join(map(str, ranks))}] {words}" for words, ranks in said.items())
        if outcome == FAILED:
            item.add_report_section(phase, "word from the other ranks after", others)
        return others

    def _arrived(self, mine: int, seconds: float | None) -> list[int] | None:
        """The numbers of all ranks, or None if one of them did not arrive in time."""
        send, received = np.array([mine]), np.empty(self._comm.size, dtype=int)
        request = self._comm.Iallgather(send, received)
        deadline = None if seconds is None else time.monotonic() + seconds
        pause = 1e-5
        while not request.Test():
            if deadline is not None and time.monotonic() > deadline:
                return None
            time.sleep(pause)
            pause = min(2 * pause, 1e-3)
        return received.tolist()

    # Time limits: pytest-timeout chooses them. It would report only on rank 0's output, and it stops its timer at the
    # first failure, although the teardown may hang. This watch does neither. One thread does for all phases.

    @pytest.hookimpl(tryfirst=True)
    def pytest_timeout_set_timer(self, settings: Any) -> bool:
        self._limit = settings.timeout
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_timeout_cancel_timer(self) -> bool:
        return True

    def pytest_runtest_logfinish(self) -> None:
        self._limit = None

    def _watch(self) -> None:
        while (due := self._due) is None or time.monotonic() < due[0]:
            time.sleep(WATCH_S)
        self._out_of_time(*due[1:])

    def _out_of_time(self, item: pytest.Item, phase: str) -> None:
        self._say(f"{item.nodeid}: more than {self._limit} s in {phase}; this rank is here:")
        faulthandler.dump_traceback(self._stderr, all_threads=True)
        time.sleep(STACKS_S)
        os._exit(1)  # mpiexec ends the others

    # The end.

    def _abort(self, why: str) -> NoReturn:
        self._say(why)
        time.sleep(FORWARD_S)
        MPI.COMM_WORLD.Abort(1)
        os._exit(1)

    def _say(self, text: str) -> None:
        lines = "".join(f"[rank {self._rank}] {line}\n" for line in text.strip().splitlines())
        os.write(self._stderr, f"\n{lines}".encode(errors="replace"))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        in_order = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
        self._report_is_news &= exitstatus not in in_order

    def pytest_unconfigure(self) -> None:
        if self._report_is_news:
            self._say(self._report.getvalue())
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # no Python handler could run during MPI_Finalize
        signal.alarm(int(GRACE_S) if self._report_is_news else EXIT_S)


def _anywhere(report: str) -> str:
    """A report without the addresses of objects, which differ between processes."""
    return re.sub("0x[0-9a-f]+", "0x", report)
