"""A process that has imported what programs need, and forks one for each stub that asks: ``server.py LISTENER``.

Standard input is a pipe from the process that owns the server. When it closes, the server kills its children and ends.
LISTENER is the file descriptor of the socket at which it listens. tests/support/forking/stub.py has the requests.

A request is refused, and the stub then starts Python itself, if an environment variable differs from the server's that
a library may have read when it was imported, or if Python is to get options of its own.
"""

import contextlib
import gc
import os
import selectors
import signal
import socket
import sys
import types
from pathlib import Path
from typing import Any, NamedTuple

from stub import AT_START, HEADER, NUMBER, read_at_imports

sys.path.pop(0)  # this program's folder

# What most programs import. None of it is of the project, so that each program imports its own checkout.
import mpi4py  # noqa: F401
import numpy as np
import safetensors.torch  # noqa: F401
import tokenizers  # noqa: F401
import torch._dynamo  # noqa: F401 - the first optimizer imports it, which takes a second
import yaml  # noqa: F401


class Request(NamedTuple):
    """What a stub asks for. fds: its file descriptors 0 to 2 and that of PMI."""

    folder: str
    words: list[str]
    environment: dict[str, str]
    fds: list[int]


class Child(NamedTuple):
    """A process that the server has forked, with the connection to its stub."""

    process: int
    connection: socket.socket


def received(connection: socket.socket) -> Request:
    """The request of a stub. Raises OSError or ValueError if the stub died in it."""
    connection.settimeout(10)
    head, fds, _, _ = socket.recv_fds(connection, HEADER.size, 8)
    if len(head) < HEADER.size:
        for fd in fds:
            os.close(fd)
        raise ValueError("the stub died")
    _, size, count = HEADER.unpack(head)
    content = bytearray()
    while len(content) < size:
        more = connection.recv(size - len(content))
        if not more:
            for fd in fds:
                os.close(fd)
            raise ValueError("the stub died")
        content += more
    connection.settimeout(None)
    folder, *rest = content.decode(errors="surrogateescape").split("\0")
    environment = dict(one.split("=", 1) for one in rest[count:])
    return Request(folder, rest[:count], environment, fds)


def fits(request: Request, own: dict[str, str]) -> bool:
    """Whether a fork of this process is what Python would be after it imported the same libraries."""
    options = not request.words or (request.words[0][0] == "-" and request.words[0] not in ("-m", "-c"))
    return not options and read_at_imports(request.environment) == own


def become(request: Request, *, has_open_files: bool = False) -> None:
    """Make this process, which has just been forked, that of the request: its files, folder and environment.

    has_open_files: objects of this process hold files, and will close them. All other fds are closed.
    """
    os.setsid()
    high = [os.dup2(fd, 200 + n, inheritable=False) for n, fd in enumerate(request.fds)]
    if not has_open_files:
        os.closerange(3, 200)
    wanted = [0, 1, 2]
    if len(request.fds) > 3:
        wanted.append(os.dup(high[3]) if has_open_files else int(request.environment["PMI_FD"]))
        request.environment["PMI_FD"] = str(wanted[-1])
    for fd, place in zip(high, wanted, strict=True):
        os.dup2(fd, place)
        os.close(fd)
    for name in os.environ.keys() - request.environment.keys():
        del os.environ[name]
    os.environ.update(request.environment)
    os.chdir(request.folder)
    np.random.seed()  # noqa: NPY002


def run(words: list[str]) -> None:
    """Run ``python WORDS...`` in this process, up to the end of its main program."""
    import runpy

    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    sys.orig_argv[:] = [sys.executable, *words]
    how, *arguments = words
    if how == "-m":
        sys.path.insert(0, str(Path.cwd()))
        sys.argv = ["-m", *arguments[1:]]
        runpy._run_module_as_main(arguments[0])  # type: ignore[attr-defined]
    elif how == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *arguments[1:]]
        exec(compile(arguments[0], "<string>", "exec"), main.__dict__)
    else:
        path = Path.cwd() / how
        sys.path.insert(0, str(path.resolve().parent))
        sys.argv = [how, *arguments]
        main.__dict__["__file__"] = str(path)
        exec(compile(path.read_bytes(), path, "exec"), main.__dict__)


class Server:
    """The server: `serve` returns only in a child, with what the child is to be. own: as for `fits`."""

    def __init__(self, listener: socket.socket, own: dict[str, str]) -> None:
        self._listener, self._own = listener, own
        self._selector = selectors.DefaultSelector()
        self._children: dict[int, Child] = {}  # by the fd that is readable once the process has ended

    def serve(self) -> Request | None:
        """Answer stubs until the owner ends. Returns in each child, and None in the server at its end."""
        self._selector.register(0, selectors.EVENT_READ, "owner")
        self._selector.register(self._listener, selectors.EVENT_READ, "listener")
        while True:
            for key, _ in self._selector.select():
                if key.data == "owner":
                    for child in self._children.values():
                        kill(child.process)
                    return None
                if key.data == "listener":
                    request = self._answer()
                    if request is not None:
                        return request
                elif key.fd in self._children:
                    self._end(key.fd)
                elif any(child.connection is key.fileobj for child in self._children.values()):  # the stub died
                    kill(key.data)
                    self._selector.unregister(key.fileobj)

    def _answer(self) -> Request | None:
        connection, _ = self._listener.accept()
        try:
            request = received(connection)
        except (OSError, ValueError):
            connection.close()
            return None
        fit = fits(request, self._own)
        process = os.fork() if fit else 0
        if fit and process == 0:
            self._selector.close()
            return request
        for fd in request.fds:
            os.close(fd)
        try:
            connection.sendall(NUMBER.pack(process))
        except OSError:
            if process:
                kill(process)
        if not process:
            connection.close()
            return None
        ended = os.pidfd_open(process)
        self._children[ended] = Child(process, connection)
        self._selector.register(ended, selectors.EVENT_READ)
        self._selector.register(connection, selectors.EVENT_READ, process)
        return None

    def _end(self, ended: int) -> None:
        """Tell a stub how its process ended."""
        child = self._children.pop(ended)
        self._selector.unregister(ended)
        os.close(ended)
        _, status = os.waitpid(child.process, 0)
        if child.connection in self._selector.get_map():
            self._selector.unregister(child.connection)
        with contextlib.suppress(OSError):  # the stub was killed
            child.connection.sendall(NUMBER.pack(status))
        child.connection.close()


def kill(process: int) -> None:
    """Kill a child that has not been waited for, with its process group."""
    for end in (os.killpg, os.kill):
        with contextlib.suppress(OSError):  # it has no group of its own yet
            end(process, signal.SIGKILL)


def main() -> Any:
    gc.collect()
    gc.freeze()
    request = Server(socket.socket(fileno=int(sys.argv[1])), AT_START).serve()
    if request is None:
        os._exit(0)
    become(request)
    try:
        run(request.words)
    except SystemExit:
        raise
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        if isinstance(error, KeyboardInterrupt):
            sys.stdout.flush()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        sys.exit(1)


if __name__ == "__main__":
    main()
