"""Fixtures for all tests, and the plugins that a run of tests/run needs.

Only runs with ``--with-mpi`` import mpi4py, because importing it starts MPI. tests/support/running/lockstep.py keeps
the ranks of such a run in step.
"""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.support import mpirun
from tests.support.running import sizes

if TYPE_CHECKING:
    from mpi4py import MPI


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        sizes.OPTION,
        choices=("usual", "quick"),
        dest="chosen",
        help="leave out what make test, or test-quick, leaves out on this number of ranks (see running/sizes.py)",
    )
    parser.addoption(
        "--collected",
        type=int,
        metavar="FD",
        help="run no tests: fork for those that ask at this socket (tests/support/forking/collected.py)",
    )


@pytest.hookimpl(trylast=True)  # after pytest's own reporter
def pytest_configure(config: pytest.Config) -> None:
    environment = dict(os.environ)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a background job; programs of tests would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.setdefault("MKL_CBWR", "AUTO")  # before MKL's first call: see trainers.run.startup.fix_products
    if (listener := config.getoption("collected")) is None:
        begin(config)
        return
    from tests.support.forking.collected import Collected

    config.option.with_mpi = True  # pytest-mpi would mark the tests that need ranks to be skipped
    config.pluginmanager.register(Collected(listener, environment, begin), "collected")


def begin(config: pytest.Config) -> None:
    """Register the plugins of a run that runs tests."""
    if "gpu" not in config.getoption("-m"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the tests of host tensors use no device, even if there is one
    rank = 0
    if config.getoption("--with-mpi"):
        from mpi4py import MPI

        from tests.support.running.lockstep import Lockstep

        rank = MPI.COMM_WORLD.rank
        config.pluginmanager.register(Lockstep(config), "lockstep")
    # These variables are removed, so that a pytest inside a test is not a part of this run.
    tally, queue, passed = (os.environ.pop(f"TESTS_{name}", None) for name in ("TALLY", "QUEUE", "PASSED"))
    if tally and rank == 0:
        from tests.support.running.tally import Tally

        config.pluginmanager.register(Tally(tally), "tally")
    if passed:
        from tests.support.running.passed import Passed

        config.pluginmanager.register(Passed(passed), "passed")
    if queue:
        from tests.support.running.distribution import Queue

        config.pluginmanager.register(Queue(queue), "queue")


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    for plugin in session.config.pluginmanager.get_plugins():
        if type(plugin).__name__ == "MPIPlugin":  # pytest-mpi's, which prints 40 lines about mpi4py after each run
            plugin._is_testing_mpi = False


@pytest.hookimpl(trylast=True)  # after -m and -k: a case that is drawn must be one that they leave
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("collected") is not None:  # each fork chooses, and starts MPI
        return
    size = 1
    if config.getoption("--with-mpi"):
        from mpi4py import MPI

        size = MPI.COMM_WORLD.size
    selection = config.getoption("chosen")
    left = sizes.chosen(items, size, quick=selection == "quick") if selection else sizes.possible(items, size)
    chosen = dict.fromkeys(left)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # what tests have imported: a test's gc.collect() takes 0.3 s to look through it


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    mpirun.no_command_in = None if item.get_closest_marker("slow") else item.nodeid


@pytest.fixture(autouse=True)
def signal_handlers() -> Iterator[None]:
    """Signals do after a test what they did before it: programs of later tests would inherit an ignored one."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture(scope="session", autouse=True)
def few_mock_samples(pytestconfig: pytest.Config) -> None:
    """Tests under mpiexec make hundreds of trainers, and to sort a million of samples takes 0.05 s."""
    if pytestconfig.getoption("--with-mpi") and (corpus := sys.modules.get("trainers.data.corpus")):
        corpus.MOCK_SAMPLES = 4096  # type: ignore[attr-defined]


@pytest.fixture(scope="session")
def mpi_world() -> "MPI.Intracomm":
    """MPI.COMM_WORLD; for tests marked ``mpi``."""
    from mpi4py import MPI

    return MPI.COMM_WORLD
