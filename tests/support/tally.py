"""What came of each test, in a file that outlives the run: the count where a job was aborted."""

from pathlib import Path

import pytest


class Tally:
    """One line per finished test in ``path``, and a last one with pytest's exit status, for tests/run."""

    def __init__(self, path: str) -> None:
        self._file = Path(path).open("a", buffering=1, encoding="utf-8")  # noqa: SIM115
        self._outcomes: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._outcomes.add(report.outcome)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._file.write("failed\n")

    def pytest_runtest_logfinish(self) -> None:
        self._file.write(next(o for o in ("failed", "skipped", "passed") if o in self._outcomes) + "\n")
        self._outcomes.clear()

    def pytest_unconfigure(self) -> None:
        self._file.close()

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self._file.write(f"end {int(exitstatus)}\n")
