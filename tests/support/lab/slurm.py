"""A real Slurm on emulated hosts: a controller, and nodes that run its jobs.

    with slurm_cluster(2) as cluster:
        done = cluster.run("srun", cluster.mpi, "-N2", "-n2", "python", "-m", "some.program", timeout=60)
        job = cluster.submit("examples/slurm/one-node.sbatch")
        cluster.wait(job, ended, timeout=60)

The daemons are Debian's packages; ``install`` says which. Each host has its own name, network, IPC and /dev/shm, as a
node has. They share files and process ids. Nothing outlives the block, even if the process that entered it is killed.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support import mpirun
from tests.support.lab import hosts as lab_hosts
from tests.support.lab import reaper
from tests.support.lab.hosts import HERE, Hosts, emulated_hosts

PROGRAMS = ("srun", "sbatch", "scancel", "scontrol", "sinfo", "slurmctld", "slurmd", "munged")
PACKAGES = ("slurm-wlm", "slurm-wlm-basic-plugins", "slurm-client", "munge", "libpmix2", "libpmix-dev")
DEVICE = "wan0"
READY_S = 30.0
KILL_WAIT_S = 30  # Slurm's default: seconds from SIGTERM to SIGKILL
NODE_TIMEOUT_S = 10  # seconds without an answer after which a node is down; Slurm's default is 300
FINAL = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE")

SLURM_CONF = """\
ClusterName=lab
SlurmctldHost={head}({head_address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
KillWait={kill_wait}
KillOnBadExit=0
SlurmdTimeout={node_timeout}
JobRequeue=1
NodeName={names} NodeAddr={addresses} CPUs=2 Sockets=1 CoresPerSocket=2 ThreadsPerCore=1 RealMemory=4000 State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


def why_not() -> str | None:
    """The reason why this machine cannot run Slurm on emulated hosts, or None if it can."""
    if reason := lab_hosts.why_not():
        return reason
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        return f"there is no {', '.join(missing)}: `make test-slurm` installs Slurm where it can"
    return None


def install() -> str | None:
    """Install what is missing of Slurm. Returns the reason why that is not possible here, or None.

    Debian's and Ubuntu's packages; a Slurm that is already there is taken as it is.
    """
    if all(shutil.which(name) for name in PROGRAMS):
        return None
    if os.geteuid() != 0:
        return "installing Slurm needs root"
    if shutil.which("apt-get") is None:
        return f"there is no apt-get; install {', '.join(PROGRAMS)} yourself"
    wait = ["-qq", "-o", "DPkg::Lock::Timeout=600"]
    # RUNLEVEL=1 keeps invoke-rc.d from starting the daemons, which this lab starts itself.
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    for words in (["update"], ["install", "-y", "--no-install-recommends", *PACKAGES]):
        done = subprocess.run(["apt-get", *wait, *words], env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            return f"apt-get {words[0]} failed: {done.stderr.strip()[-300:]}"
    return None


def mpi_option() -> str:
    """The ``--mpi`` of srun that speaks to the MPI of this environment."""
    return "--mpi=pmix" if lab_hosts.is_open_mpi() else "--mpi=pmi2"


@dataclass(frozen=True)
class Job:
    """What ``scontrol show job`` says of a job."""

    number: int
    state: str  # such as PENDING, RUNNING, COMPLETED, FAILED
    status: int  # the exit status of the batch script
    signal: int  # the signal that ended the script, or 0
    restarts: int
    fields: dict[str, str]


def ended(job: Job) -> bool:
    """Whether a job is over; a requeued one is not."""
    return job.state in FINAL


@dataclass(frozen=True)
class SlurmCluster:
    """A running Slurm. Its users' commands run on the first host, which runs no jobs."""

    hosts: Hosts
    folder: Path
    mpi: str

    @property
    def nodes(self) -> dict[str, str]:
        """The address of each node, by its name."""
        return {f"lab{number}": address for number, address in enumerate(self.hosts.pids, 1) if number > 1}

    @property
    def environment(self) -> dict[str, str]:
        """Variables for the programs on the hosts, jobs included."""
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        network = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": DEVICE, "FI_PROVIDER": "tcp", "FI_TCP_IFACE": DEVICE}
        if self.mpi.endswith("pmix"):
            network = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "tcp,self", "OMPI_MCA_btl_tcp_if_include": DEVICE}
        return {
            "LAB_HOSTS": json.dumps(self.hosts.pids), "SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": path,
        } | network  # fmt: skip

    def run(
        self, *argv: str, timeout: float, env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command on the first host. After ``timeout`` seconds it is ended, and TimeoutExpired is raised."""
        first = next(iter(self.hosts.pids))
        return mpirun.command(self._on(first, argv), timeout=timeout, env={**self.environment, **(env or {})}, cwd=cwd)

    def submit(self, *argv: str, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> int:
        """``sbatch ARGV``: the job's number."""
        done = self.run("sbatch", "--parsable", *argv, timeout=READY_S, env=env, cwd=cwd)
        if done.returncode:
            raise OSError(f"sbatch failed: {done.stderr}")
        return int(done.stdout.split(";")[0])

    def job(self, number: int) -> Job:
        """The state of a job now."""
        done = self.run("scontrol", "show", "job", "--oneliner", str(number), timeout=READY_S)
        if done.returncode:
            raise OSError(f"scontrol failed: {done.stderr}")
        fields = dict(word.split("=", 1) for word in done.stdout.splitlines()[0].split() if "=" in word)
        status, _, sign = fields["ExitCode"].partition(":")
        return Job(number, fields["JobState"], int(status), int(sign), int(fields["Restarts"]), fields)

    def wait(self, number: int, until: Callable[[Job], bool], timeout: float) -> Job:
        """Wait until a job's state is as wanted. Raises TimeoutError, with the last state, if it does not come."""
        deadline = time.monotonic() + timeout
        while True:
            job = self.job(number)
            if until(job):
                return job
            if time.monotonic() > deadline:
                raise TimeoutError(f"after {timeout:g} s: {job}")
            time.sleep(0.2)

    def start_again(self, number: int, *changes: str) -> None:
        """Let a requeued job start now, changed like ``TimeLimit=5``. Slurm itself lets it wait for two minutes.

        A node refuses a job that starts within the second in which it was requeued ("Job credential revoked").
        """
        time.sleep(2)
        done = self.run("scontrol", "update", f"JobId={number}", "StartTime=now", *changes, timeout=READY_S)
        if done.returncode and self.job(number).state == "PENDING":  # otherwise it has started meanwhile
            raise OSError(f"scontrol failed: {done.stderr}")

    def ready(self) -> bool:
        """Whether all nodes are idle."""
        done = self.run("sinfo", "--noheader", "--Node", "--states=idle", "--format=%N", timeout=READY_S)
        return set(done.stdout.split()) == set(self.nodes)

    def kill(self, address: str) -> None:
        """Kill all that runs on a host, its daemons and the ranks of jobs."""
        holder = self.hosts.pids[address]
        for pid in set(reaper.inhabitants({reaper.namespace(holder)})) - {holder}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _on(self, address: str, argv: tuple[str, ...]) -> list[str]:
        return [sys.executable, str(HERE / "enter.py"), address, shlex.join(argv)]

    def _settle(self) -> None:
        """Give each host a /dev/shm and a table of hosts of its own, and its daemons."""
        names = {f"lab{number}": address for number, address in enumerate(self.hosts.pids, 1)}
        table = "".join(f"{address} {name}\n" for name, address in {"localhost": "127.0.0.1", **names}.items())
        (self.folder / "hosts").write_text(table)
        (self.folder / "state").mkdir()
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        (self.folder / "munge.key").touch(mode=0o600)
        (self.folder / "munge.key").write_bytes(os.urandom(1024))
        (self.folder / "slurm.conf").write_text(
            SLURM_CONF.format(
                folder=self.folder, head="lab1", head_address=names["lab1"], names=",".join(self.nodes),
                addresses=",".join(self.nodes.values()), kill_wait=KILL_WAIT_S, node_timeout=NODE_TIMEOUT_S,
            )
        )  # fmt: skip
        mounts = f"mount -t tmpfs -o size=1g tmpfs /dev/shm && mount --bind {self.folder}/hosts /etc/hosts"
        munged = (
            "munged", "--force", f"--socket={self.folder}/munge.sock", f"--pid-file={self.folder}/munged.pid",
            f"--log-file={self.folder}/munged.log", f"--seed-file={self.folder}/munged.seed",
            f"--key-file={self.folder}/munge.key",
        )  # fmt: skip
        for name, address in names.items():
            self._do(address, ("sh", "-c", mounts))
            if name == "lab1":
                self._do(address, munged)
                self._do(address, ("slurmctld",))
            else:
                (self.folder / f"spool-{name}").mkdir()
                self._do(address, ("slurmd",))
        deadline = time.monotonic() + READY_S
        while not self.ready():
            if time.monotonic() > deadline:
                raise OSError(f"Slurm did not start: {self.logs()}")
            time.sleep(0.1)

    def _do(self, address: str, argv: tuple[str, ...]) -> None:
        done = mpirun.command(self._on(address, argv), timeout=READY_S, env=self.environment)
        if done.returncode:
            raise OSError(f"{shlex.join(argv)} failed: {done.stdout}{done.stderr}{self.logs()}")

    def logs(self) -> str:
        """The ends of the daemons' logs."""
        return "".join(f"\n{path.name}: {path.read_text()[-1500:]}" for path in sorted(self.folder.glob("*.log")))


@contextlib.contextmanager
def slurm_cluster(nodes: int, delay_us: float = 50, rate_mbit: float = 2000) -> Iterator[SlurmCluster]:
    """A Slurm with ``nodes`` nodes, lab2 and on. Between any two hosts: ``delay_us`` one way, and ``rate_mbit``."""
    # A folder of its own, because the path of a socket may have 107 characters.
    with tempfile.TemporaryDirectory(prefix="lab-") as folder, emulated_hosts(nodes + 1, delay_us, rate_mbit) as hosts:
        ender = subprocess.Popen(
            [sys.executable, str(HERE / "reaper.py"), *map(str, hosts.pids.values())],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        assert ender.stdin is not None and ender.stdout is not None
        try:
            ender.stdout.readline()  # it has found the namespaces
            cluster = SlurmCluster(hosts, Path(folder), mpi_option())
            cluster._settle()
            yield cluster
        finally:
            ender.stdin.close()
            ender.wait()
            ender.stdout.close()


def output(path: Path) -> str:
    """The text of a job's output file, without the times that Slurm writes into it."""
    return re.sub(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", "TIME", path.read_text(errors="replace"))


if __name__ == "__main__":
    if reason := install():
        print(f"Slurm is not installed: {reason}", file=sys.stderr)
