"""Fixtures for all tests, and what makes ``mpiexec -n N python -m pytest --with-mpi`` safe (see lockstep.py).

mpi4py is imported only under --with-mpi: importing it starts MPI.
"""

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from mpi4py import MPI


@pytest.hookimpl(trylast=True)  # after pytest's own reporter
def pytest_configure(config: pytest.Config) -> None:
    if "gpu" not in config.getoption("-m"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the tests of host tensors want no device that there may be
    rank = 0
    if config.getoption("--with-mpi"):
        from mpi4py import MPI

        from tests.support.lockstep import Lockstep

        rank = MPI.COMM_WORLD.rank
        config.pluginmanager.register(Lockstep(config), "lockstep")
    tally = os.environ.pop("TESTS_TALLY", None)  # taken away, so that a test's own pytest does not write there
    if tally and rank == 0:
        from tests.support.tally import Tally

        config.pluginmanager.register(Tally(tally), "tally")


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    for plugin in session.config.pluginmanager.get_plugins():
        if type(plugin).__name__ == "MPIPlugin":  # pytest-mpi's: 40 lines about mpi4py after each run
            plugin._is_testing_mpi = False


@pytest.fixture(scope="session")
def mpi_world() -> "MPI.Intracomm":
    """MPI.COMM_WORLD; for tests marked ``mpi``."""
    from mpi4py import MPI

    return MPI.COMM_WORLD
