"""Stand in for a Python process that the fork server makes: ``python -I -S stub.py ADDRESS WORDS...``.

``mpiexec`` starts this program in place of ``python WORDS...``. It gives the server (tests/support/forking/server.py)
its words, environment, folder and file descriptors, and stays as the process that mpiexec knows. It passes signals on,
and ends as the server's process ends: with its exit status, or by the same signal. Where there is no server, or it
refuses, this process becomes ``python WORDS...`` itself. It imports little, because every rank starts it.
"""

import _socket
import os
import signal
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, NoReturn

#: how many fds, bytes of all that follows, words
HEADER = struct.Struct("=iii")
NUMBER = struct.Struct("=i")
#: the variable by which MPICH's and Intel's mpiexec tell a process the fd over which it speaks to them
PMI_FD = "PMI_FD"
#: beginnings of the names of variables that no library reads when it is imported, if mpi4py.MPI is not
FREE = (
    "PMI_", "PMI2_", "MPI_LOCAL", "MPIR_", "HYDI_", "HYDRA_", "I_MPI_", "COMMENGINE_", "PYTEST_", "TEST_", "TESTS_",
    "GFORTRAN_", "SLURM_",
)  # fmt: skip
#: the signals that programs of tests listen to, or that mpiexec and the tests send
PASSED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGCONT", "SIGALRM")


def read_at_imports(environment: "Mapping[str, str]") -> dict[str, str]:
    """The variables that a library may have read when it was imported."""
    return {name: value for name, value in environment.items() if not name.startswith(FREE)}


#: those of this process when it started: the server then imports torch._dynamo, which adds one
AT_START = read_at_imports(os.environ)


def become(words: list[str]) -> "NoReturn":
    os.execv(sys.executable, [sys.executable, *words])


def asked(address: str, words: list[str]) -> "Any":
    """The connection to the server, which has got the request; None if there is no server."""
    fds = [0, 1, 2] + ([int(os.environ[PMI_FD])] if PMI_FD in os.environ else [])
    folder = os.getcwd()  # noqa: PTH109 - pathlib takes long to import
    strings = [folder, *words, *(f"{name}={value}" for name, value in os.environ.items())]
    content = "\0".join(strings).encode(errors="surrogateescape")
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    try:
        connection.connect(address)
        connection.sendmsg(
            [HEADER.pack(len(fds), len(content), len(words))],
            [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))],
        )
        connection.sendall(content)
    except OSError:
        return None
    return connection


def number(connection: "Any") -> int | None:
    """The next number that the server sends; None if it died."""
    try:
        received = connection.recv(NUMBER.size)
    except OSError:
        return None
    return NUMBER.unpack(received)[0] if len(received) == NUMBER.size else None


def main(address: str, words: list[str]) -> None:
    signals = {getattr(signal, name) for name in PASSED}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # until there is a process to pass them to
    connection = asked(address, words)
    process = connection and number(connection)
    if not process:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        become(words)
    for one in signals:
        signal.signal(one, lambda number, _: os.kill(process, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    status = number(connection)
    if status is None:
        sys.stderr.write("the fork server died\n")
        os._exit(70)
    if os.WIFSIGNALED(status):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL) if os.WTERMSIG(status) != signal.SIGKILL else None
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
