"""Start emulated hosts with a known delay and rate for MPI jobs, and remove them, in one ``with``.

    with emulated_hosts(2, delay_us=1000, rate_mbit=500) as hosts:
        done = hosts.run("-m", "some.program", timeout=60)      # one rank on each host

relay.py emulates the wire. Nothing outlives the block, because the namespaces have no names, only processes.
"""

import contextlib
import functools
import json
import os
import select
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support import mpirun

HERE = Path(__file__).resolve().parent
START_S = 20.0
MTU = 9000  # large packets: the relay is Python, and takes 10 to 20 us for one


def why_not() -> str | None:
    """The reason why this machine cannot emulate hosts, or None if it can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "there is no /dev/net/tun to read and write"
    if not (is_mpich() or is_intel() or is_open_mpi()):
        return "only the mpiexec of MPICH, of Intel's MPI and of Open MPI are known to start ranks on such hosts"
    probe = [sys.executable, "-c", "import namespaces; namespaces.leave(); namespaces.new_tun('wan0')"]
    done = subprocess.run(probe, cwd=HERE, capture_output=True, text=True, timeout=START_S, check=False)
    return f"namespaces or TUN devices are not allowed here: {done.stderr.strip()[-200:]}" if done.returncode else None


@functools.cache
def _launcher_version() -> str:
    argv = [mpirun.mpiexec(), "--version"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=START_S, check=False, env=mpirun.environment())
    return done.stdout.lower()


def is_mpich() -> bool:
    """Whether the launcher is MPICH's."""
    return "hydra" in _launcher_version()


def is_intel() -> bool:
    """Whether the launcher is that of Intel's MPI, another hydra."""
    return "intel(r) mpi" in _launcher_version()


def is_open_mpi() -> bool:
    """Whether the launcher is that of Open MPI 5."""
    return "open mpi" in _launcher_version()


@dataclass(frozen=True)
class Hosts:
    """Running hosts: by address, the process that holds each. relay: the process that carries their packets."""

    pids: dict[str, int]
    relay: int = 0

    def run(self, *args: str, timeout: float, ranks_each: int = 1) -> "subprocess.CompletedProcess[str]":
        """Run ``python ARGS`` as an MPI job, ``ranks_each`` on each host, between hosts over the emulated wire alone.

        After ``timeout`` seconds it ends the job and raises subprocess.TimeoutExpired.
        """
        argv, environment = self._job(args, ranks_each)
        return mpirun.command(argv, timeout=timeout, env=environment)

    def start(self, *args: str, log: Path, ranks_each: int = 1, options: Sequence[str] = ()) -> "subprocess.Popen[str]":
        """Start the same job, to be watched by the caller, who ends it with ``mpirun.stop``.

        log: the file of its output; a pipe would stay open as long as a daemon on a host that was cut off.
        options: further ones of the launcher.
        """
        argv, environment = self._job(args, ranks_each, options)
        with log.open("w") as file:
            return mpirun.start(argv, env=environment, stdout=file.fileno(), stderr=subprocess.STDOUT)

    def cut(self, address: str) -> None:
        """Cut the link of the host ``address`` for good."""
        program = "import namespaces; namespaces.bring_down('wan0')"
        argv = [sys.executable, "enter.py", address, shlex.join([sys.executable, "-c", program])]
        subprocess.run(argv, cwd=HERE, env=os.environ | self._environment(), timeout=START_S, check=True)

    def _environment(self) -> dict[str, str]:
        return {"LAB_HOSTS": json.dumps(self.pids)}

    def _job(
        self, args: Sequence[str], ranks_each: int, options: Sequence[str] = ()
    ) -> tuple[list[str], dict[str, str]]:
        """Return the command line of a job, and what its environment has besides this process's."""
        addresses, size = list(self.pids), str(len(self.pids) * ranks_each)
        if is_mpich():
            # Without the variable, UCX finds that the hosts share memory, and uses that.
            network = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "wan0"}
            launch = [
                mpirun.mpiexec(), "-launcher", "ssh", "-launcher-exec", str(HERE / "enter.py"),
                "-localhost", addresses[0], "-hosts", ",".join(addresses), "-ppn", str(ranks_each),
            ]  # fmt: skip
        elif is_intel():
            network = {"FI_PROVIDER": "tcp", "FI_TCP_IFACE": "wan0"}
            launch = [
                mpirun.mpiexec(), "-bootstrap", "ssh", "-bootstrap-exec", str(HERE / "enter.py"), "-iface", "wan0",
                "-localhost", addresses[0], "-hosts", ",".join(addresses), "-ppn", str(ranks_each),
            ]  # fmt: skip
        else:
            network = {
                "OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "tcp,self", "OMPI_MCA_btl_tcp_if_include": "wan0",
                "PRTE_MCA_plm_ssh_agent": str(HERE / "enter.py"), "PRTE_MCA_prte_if_include": "wan0",
            }  # fmt: skip
            launch = [
                mpirun.mpiexec(), "--host", ",".join(f"{address}:{ranks_each}" for address in addresses),
                "--bind-to", "none",
            ]  # fmt: skip
        launch += [*options, "-n", size, sys.executable, *args]
        first = [sys.executable, str(HERE / "enter.py"), addresses[0], shlex.join(launch)]
        return first, self._environment() | network

    def processes(self) -> list[int]:
        """The ids of all processes on the hosts."""
        ours = {Path(f"/proc/{pid}/ns/net").stat().st_ino for pid in self.pids.values()}
        found = []
        for path in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if path.name.isdigit() and (path / "ns/net").stat().st_ino in ours:
                    found.append(int(path.name))
        return found


@contextlib.contextmanager
def emulated_hosts(count: int, delay_us: float, rate_mbit: float, mtu: int = MTU) -> Iterator[Hosts]:
    """``count`` hosts; between any two, ``delay_us`` one way, and ``rate_mbit`` from each."""
    argv = [sys.executable, str(HERE / "relay.py"), str(count), str(delay_us), str(rate_mbit), str(mtu)]
    relay = mpirun.start(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    hosts = None
    try:
        assert relay.stdout is not None
        ready = select.select([relay.stdout], [], [], START_S)[0]
        line = relay.stdout.readline() if ready else ""
        if not line:
            relay.kill()
            raise OSError(f"the emulated hosts did not start: {relay.communicate()[1]}")
        hosts = Hosts(json.loads(line), relay.pid)
        yield hosts
    finally:
        if hosts is not None:
            for pid in hosts.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        mpirun.stop(relay)
