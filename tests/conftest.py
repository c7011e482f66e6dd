"""Fixtures for all tests, and the plugins that a run of tests/run needs.

Only runs with ``--with-mpi`` import mpi4py, because importing it starts MPI. tests/support/lockstep.py keeps the ranks
of such a run in step.
"""

import gc
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import mpirun, sizes

if TYPE_CHECKING:
    from mpi4py import MPI


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        sizes.OPTION,
        action="store_true",
        dest="where_size_matters",
        help="with --with-mpi: leave out tests that need not run on this number of ranks (tests/support/sizes.py)",
    )
    parser.addoption(
        "--only-mpi-files",
        action="store_true",
        help="do not import test files that contain no test marked mpi, because importing takes each rank seconds",
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if not config.getoption("only_mpi_files") or not collection_path.match("test_*.py"):
        return None
    if not all(Path(argument).is_dir() for argument in config.args):  # pytest takes an ignored argument for an error
        return None
    return True if "mark.mpi" not in collection_path.read_text(encoding="utf-8") else None


@pytest.hookimpl(trylast=True)  # after pytest's own reporter
def pytest_configure(config: pytest.Config) -> None:
    if "gpu" not in config.getoption("-m"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the tests of host tensors use no device, even if there is one
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a background job; programs of tests would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.setdefault("MKL_CBWR", "AUTO")  # before MKL's first call: see trainers.run.startup.fix_products
    rank = 0
    if config.getoption("--with-mpi"):
        from mpi4py import MPI

        from tests.support.lockstep import Lockstep

        rank = MPI.COMM_WORLD.rank
        config.pluginmanager.register(Lockstep(config), "lockstep")
    tally = os.environ.pop("TESTS_TALLY", None)  # removed, so that a pytest inside a test does not write there
    if tally and rank == 0:
        from tests.support.tally import Tally

        config.pluginmanager.register(Tally(tally), "tally")


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    for plugin in session.config.pluginmanager.get_plugins():
        if type(plugin).__name__ == "MPIPlugin":  # pytest-mpi's, which prints 40 lines about mpi4py after each run
            plugin._is_testing_mpi = False


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("where_size_matters"):
        from mpi4py import MPI

        left_out = [item for item in items if not sizes.selected(item, MPI.COMM_WORLD.size)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
    if hasattr(config, "workerinput"):  # a process of pytest-xdist: start with the files that take longest
        slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
        items.sort(key=lambda item: -slow[item.path])


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # what tests have imported: a test's gc.collect() takes 0.3 s to look through it


@pytest.hookimpl(optionalhook=True)  # only pytest-xdist calls it
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from tests.support.distribution import Scheduler

    return Scheduler(config, log)


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


@pytest.fixture(scope="session")
def mpi_world() -> "MPI.Intracomm":
    """MPI.COMM_WORLD; for tests marked ``mpi``."""
    from mpi4py import MPI

    return MPI.COMM_WORLD
