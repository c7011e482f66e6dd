"""Collect the tests once for all runs of tests/run: a process that has collected them forks for each run.

Collecting imports all files of tests and what they test, which takes a processor 15 seconds. The process listens as the
server of programs does (tests/support/forking/server.py). A stub stands in for ``python -m pytest ...``; the fork takes
the options of that command line that differ between the runs, chooses from the tests, and starts MPI if they need it.
"""

import faulthandler
import importlib
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

#: pytest's options that differ between the runs of tests/run
DIFFERENT = ("markexpr", "with_mpi", "chosen", "collected")


class Collected:
    """The plugin. Its process forks in place of running tests.

    listener: the file descriptor of the socket at which stubs ask. environment: that of the process before pytest and
    tests changed it, which is also that of the stubs. begin: registers the plugins of a run.
    """

    def __init__(self, listener: int, environment: dict[str, str], begin: Any) -> None:
        self._listener, self._environment, self._begin = listener, environment, begin

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Any:
        config = session.config
        config.pluginmanager.unregister(self)
        if session.testsfailed:
            return None  # this process ends, and the stubs become pytest, which then says why
        if "mpi4py.MPI" in sys.modules:
            raise pytest.UsageError("a file of tests starts MPI when it is imported; it must be collected without")
        capture: Any = config.pluginmanager.getplugin("capturemanager")
        capture.stop_global_capturing()
        server = _server()
        environment = dict(os.environ)
        own = server.read_at_imports(self._environment)
        request = server.Server(socket.socket(fileno=self._listener), own).serve()
        if request is None:
            os._exit(0)
        server.become(request, has_open_files=True)  # what tests opened as they were imported
        for name, value in environment.items():  # what tests have set while they were imported
            os.environ.setdefault(name, value)
        faulthandler.enable(sys.__stderr__)
        capture.start_global_capturing()
        capture.suspend_global_capture()
        given = config._parser.parse_known_args(request.words[2:])  # after "-m pytest"
        for name in DIFFERENT:
            setattr(config.option, name, getattr(given, name))
        self._begin(config)
        config.pluginmanager.getplugin("terminalreporter").pytest_sessionstart(session)
        config.hook.pytest_collection_modifyitems(session=session, config=config, items=session.items)
        session.testscollected = len(session.items)
        return config.hook.pytest_runtestloop(session=session)


def _server() -> Any:
    """The module server.py, which removes its folder from the path as it does where it is the program."""
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    return importlib.import_module("server")
