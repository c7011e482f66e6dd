"""Start Python programs by forking a process that has imported torch already: it saves each of them a second.

tests/run starts its runs of pytest in the same way, by forking a process that has collected the tests.
"""

import atexit
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from .stub import read_at_imports

HERE = Path(__file__).resolve().parent
#: the environment variable by which tests.faults finds the processes of a case; the server serves the next case, too
CASE = "COMMENGINE_FAULTS_CASE"


class Server:
    """A process that forks for stubs, with this environment, which ends with this process or before.

    words: those of its command line after Python's own, before the number of the socket's file descriptor.
    """

    def __init__(self, environment: dict[str, str], words: list[str]) -> None:
        folder = tempfile.mkdtemp(prefix="fork-server-")  # only this user may enter it
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        self.address, self.owner = str(Path(folder, "socket")), os.getpid()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(self.address)
            listener.listen(64)  # stubs wait there while the server imports torch
            self._process = subprocess.Popen(
                [sys.executable, *words, str(listener.fileno())],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=[listener.fileno()],
                env={name: value for name, value in environment.items() if name != CASE}, start_new_session=True,
            )  # fmt: skip

    @property
    def stub(self) -> list[str]:
        """The words that take the place of ``sys.executable`` in a command line."""
        return [sys.executable, "-I", "-S", str(HERE / "stub.py"), self.address]

    @property
    def there(self) -> bool:
        return self.owner == os.getpid() and self._process.poll() is None


#: by what their libraries read of the environment; a test may change this process's environment for good
_servers: dict[frozenset[tuple[str, str]], Server] = {}


def python(environment: dict[str, str]) -> list[str]:
    """The words that take the place of ``sys.executable`` in a command line, if its program may be forked.

    environment: of this process's commands. A command whose own environment differs from it in a variable that
    libraries read when they are imported is started as always, and so is one on another system than Linux.
    """
    if not hasattr(os, "pidfd_open"):
        return [sys.executable]
    key = frozenset(read_at_imports(environment).items())
    if key not in _servers or not _servers[key].there:
        _servers[key] = Server(environment, [str(HERE / "server.py")])
    return _servers[key].stub
