"""Run training, DataParallel, ZeRO-1, fields and the examples where /dev/shm has 64, 32 or 20 MB."""

import shlex
import subprocess
import sys

from tests.support import mpirun
from tests.support.faults.parts import Case
from tests.support.lab import small_shm

TRIES, TRIES_AT_20 = 12, 3
BARE_TRIES = 30  # MPICH dies in 1 of 16 tries, 2 ranks in 20 MB
SHORT_RUN = "--train-iters 3 --eval-iters 1 --save FOLDER/run"  # the memory is taken in the first step
MADE = [path.name for path in (mpirun.ROOT / ".venv").glob(".installed-*")]
PYTHON = shlex.join([sys.executable])


def _mpiexec(ranks: int, words: str) -> str:
    return f"{shlex.quote(mpirun.mpiexec())} -n {ranks} {PYTHON} {words}"


def _make(words: str) -> str:
    """A command of the Makefile, which takes the MPI that .venv has."""
    mpi = "".join(name.removeprefix(".installed-") for name in MADE)
    return f"make --no-print-directory MPI={mpi} {words}"


JOB = _mpiexec(4, "tests/jobs/shared_memory.py")
#: (ranks, command, words that each job prints at its end); FOLDER is the case's
PROGRAMS = {
    "training": (
        2,
        _mpiexec(2, f"-m trainers.pretrain_gpt --config trainers/configs/main.yaml --device cpu {SHORT_RUN}"),
        "written to",
    ),
    "DataParallel": (4, JOB, "right"),
    "two jobs": (4, f"{{ {JOB} & first=$!; {JOB}; second=$?; wait $first && exit $second; }}", "right"),
    "fields": (4, _mpiexec(4, "examples/shallow_water/surrogate.py --steps 2 --output FOLDER/a.gif"), "animation: "),
    "make train": (2, _make(f"train ARGS='{SHORT_RUN}'"), "token perplexity"),
    "ZeRO-1, bf16": (
        4, _make(f"train NP=4 ARGS='{SHORT_RUN} --bf16 --use-distributed-optimizer'"), "token perplexity",
    ),
    "make examples": (2, _make("examples"), "picture: runs/examples"),
}  # fmt: skip
#: (program, megabytes of /dev/shm)
KINDS = [(name, size) for size in (64, 32) for name in ("DataParallel", "training") for _ in range(TRIES)]
KINDS += [("two jobs", 64)] * TRIES
KINDS += [(name, 20) for name in ("DataParallel", "training") for _ in range(TRIES_AT_20)]
KINDS += [(name, size) for name in list(PROGRAMS)[3:] for size in (64, 32)]

TITLE = (
    "a /dev/shm of 64, 32 or 20 MB: the training of `make train`, its whole with evaluation, and with ZeRO-1; "
    "DataParallel with tensor 2 x data 2, two such jobs side by side; fields; `make examples`"
)
DEMAND = (
    "status 0 and the results; at 20 MB no death that mpi4py alone does not die on as many ranks, and then one line "
    "says how much MPI needs"
)
CASES = len(KINDS)
SHORT = [KINDS.index(("two jobs", 64))]
LIMIT_S = 900


def why_not() -> str | None:
    """Whether this user may mount, and whether make has made the environment."""
    if not MADE:
        return "no .venv of make"
    return small_shm.why_not() or None


def run(case: Case) -> str:
    name, size = KINDS[case.number]
    ranks, command, last = PROGRAMS[name]
    mpirun.command(_make("runs/data/stdlib.bin").split(), timeout=LIMIT_S)  # which is no part of the trial
    done = started(size, command.replace("FOLDER", shlex.quote(str(case.folder))))
    if done.returncode == 0:
        assert done.stdout.count(last) >= 1 + (name == "two jobs"), done.stdout[-1500:]
        return f"{name} in {size} MB"
    assert size < 32, f"status {done.returncode}: {(done.stdout + done.stderr)[-1500:]}"
    bare = (started(size, _mpiexec(ranks, f"-c {shlex.quote(small_shm.BARE)}")) for _ in range(BARE_TRIES))
    assert any(one.returncode for one in bare), f"mpi4py alone never dies with {size} MB, and this did: {done}"
    assert done.stderr.count("of /dev/shm are free") == 1, f"no line says how much MPI needs: {done.stderr[-1500:]}"
    return f"MPI needs more, {name} in {size} MB"


def started(megabytes: int, command: str) -> "subprocess.CompletedProcess[str]":
    """Run the command of a shell to its end."""
    return mpirun.command(small_shm.in_small_shm(megabytes, command), timeout=LIMIT_S, env={"MAKEFLAGS": ""})
