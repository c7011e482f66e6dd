"""Hand the tests of a run out to several processes, each of which has all of them."""

import fcntl
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.running import budget

#: files in which no two tests share a fixture that is slow to make, and which take more than half a minute
INDEPENDENT = (
    "tests/commengine/test_launch.py",
    "tests/commengine/timeout/test_watcher.py",
    "tests/lab/test_emulated_hosts.py",
    "tests/test_harness.py",
)
#: files whose jobs keep four ranks busy; two such jobs at once on two cores take longer than one after the other. Those
#: with tests that ask for the fixture ``pretrain``, which has such a job, are among them.
BUSY = ("tests/bench/test_collectives.py", "tests/commengine/shared_memory/test_sequence.py")
#: tests whose ranks wait for each other without a pause: beside another job they take four times as long as alone, so
#: they come last, where there is least beside them
LAST = ("tests/commengine/calls/test_dispatch.py::test_drawn_calls_that_are_left_at_a_drawn_moment",)


class Queue:
    """The plugin: a process takes the next tests when it is done with those before, from a number in the file ``path``.

    One process gets all tests of a file, so that the fixtures of the file are made once. The tests of the files in
    INDEPENDENT are given out one by one, because they mostly wait. One process runs all files that keep four ranks
    busy.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed:
            return None
        groups = _groups(session.items)
        todo = self._taken(groups)
        group = next(todo, [])
        while group:
            *earlier, last = group
            for item, following in zip(earlier, group[1:], strict=True):
                self._run(session, item, following)
            group = next(todo, [])  # now, because the last test tears down what those of the next group do not need
            self._run(session, last, group[0] if group else None)
        return True

    def _run(self, session: pytest.Session, item: pytest.Item, following: pytest.Item | None) -> None:
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)

    def _taken(self, groups: list[list[pytest.Item]]) -> Iterator[list[pytest.Item]]:
        while True:
            with self._path.open("r+") as file:
                fcntl.lockf(file, fcntl.LOCK_EX)
                number = int(file.read() or "0")
                file.seek(0)
                file.write(str(number + 1))
                file.flush()
            if number >= len(groups):
                return
            yield groups[number]


def _groups(items: list[pytest.Item]) -> list[list[pytest.Item]]:
    """The tests that one process runs one after the other; the groups that take longest come first."""
    known: dict[str, dict[str, float]] = budget.read()["seconds"]
    files = [item.nodeid.partition("::")[0] for item in items]
    busy = {file for item, file in zip(items, files, strict=True) if "pretrain" in getattr(item, "fixturenames", ())}
    busy.update(BUSY)
    tests = Counter(files)
    groups: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    seconds: Counter[str] = Counter()
    for item, file in zip(items, files, strict=True):
        name = item.nodeid if file in INDEPENDENT or item.nodeid in LAST else "busy" if file in busy else file
        groups[name].append(item)
        of_file = known.get(file, {}).get("1" if item.get_closest_marker("mpi") else "0")
        guess = 0.5 if item.get_closest_marker("slow") else 0.01
        seconds[name] += guess if of_file is None else of_file / tests[file]  # type: ignore[assignment]
    order = sorted(seconds, key=lambda name: (name in LAST, -seconds[name]))
    return [groups[name] for name in order]
