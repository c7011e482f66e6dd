"""Write the outcome of each test into a file, from which tests/run counts even if the run was aborted."""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest


def lines(path: Path) -> Iterator[tuple[str, float, str]]:
    """The (word, seconds, rest) of each line that a `Tally` has written whole."""
    for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
        word, seconds, rest = line.split(" ", 2)
        yield word, float(seconds), rest


class Tally:
    """The plugin. It writes a line "begun 0 ID" and a line "OUTCOME SECONDS ID" for each test, and last "end 0 STATUS".

    SECONDS is the time of setup, call and teardown together. STATUS is pytest's exit status. A test that was
    interrupted has begun and has no outcome.
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
        self._write("end", 0.0, str(int(exitstatus)))

    def pytest_unconfigure(self) -> None:
        self._file.close()

    def _write(self, word: str, seconds: float, name: str) -> None:
        self._file.write(f"{word} {seconds:.3f} {name}\n")
