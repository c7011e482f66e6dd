"""Write the outcome of each test into a file, from which tests/run counts even if the run was aborted."""

from collections import defaultdict
from pathlib import Path

import pytest


class Tally:
    """The plugin. It writes a line "begun 0 ID" and a line "OUTCOME SECONDS ID" for each test, and last "end 0 STATUS".

    SECONDS is the time of setup, call and teardown together. STATUS is pytest's exit status. With pytest-xdist the
    plugin runs in the process that hands out the tests, so the reports of several tests may be mixed.
    """

    def __init__(self, path: str) -> None:
        self._file = Path(path).open("a", buffering=1, encoding="utf-8")  # noqa: SIM115
        self._outcomes: defaultdict[str, set[str]] = defaultdict(set)  # by test id
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write("begun", 0.0, nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._outcomes[report.nodeid].add(report.outcome)
        self._seconds[report.nodeid] += report.duration

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write("failed", 0.0, report.nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        outcomes = self._outcomes.pop(nodeid)
        self._write(
            next(o for o in ("failed", "skipped", "passed") if o in outcomes), self._seconds.pop(nodeid), nodeid
        )

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        for nodeid in list(self._outcomes):  # a process of pytest-xdist died in these tests
            self.pytest_runtest_logfinish(nodeid)
        self._write("end", 0.0, str(int(exitstatus)))

    def pytest_unconfigure(self) -> None:
        self._file.close()

    def _write(self, word: str, seconds: float, name: str) -> None:
        self._file.write(f"{word} {seconds:.3f} {name}\n")
