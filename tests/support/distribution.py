"""Hand the serial tests out to the processes of pytest-xdist."""

from xdist.scheduler import LoadScopeScheduling

#: files in which no two tests share a fixture that is slow to make, and which take more than half a minute
INDEPENDENT = (
    "tests/commengine/test_launch.py",
    "tests/commengine/timeout/test_watcher.py",
    "tests/lab/test_emulated_hosts.py",
    "tests/test_harness.py",
)


class Scheduler(LoadScopeScheduling):
    """Give one process all tests of a file, so that the fixtures of the file are made once.

    The tests of the files in INDEPENDENT are given out one by one, because they mostly wait.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::")[0]
        return nodeid if file in INDEPENDENT else file
