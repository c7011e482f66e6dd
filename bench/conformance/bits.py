"""Ask what the bits of a sum depend on, in each library that adds up numbers of several ranks.

    python -m bench.conformance bits --output bits.md
    srun -n 8 python -m bench.conformance bits --transports mpi4py engine --json two-nodes.json --beside one-node.json

Without a launcher it starts a job for each library that is installed here. Under one it asks the MPI of that job.
A float has no exact sum, so the order of additions decides its last bits. A library may choose another order for
another size, address or placement. A program that compares checksums, or goes on from a checkpoint on other nodes,
must know. The page has a table of yes and no, and the smallest example that was found of each no.

"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import torch

from bench.command.files import add_files, publish
from bench.command.machine import environment, heading
from bench.command.parser import new_parser
from bench.command.start import run_alone, run_on_ranks, user_errors
from bench.command.values import size_of
from bench.conformance.bits_page import page
from bench.conformance.sums import FLOATS, OPERATIONS, Sums, ask
from bench.timing.starting import neighbours
from bench.transports.environments import environment_of, free_port, launcher
from bench.transports.in_process import LOCAL, LocalTransport
from commengine import CollectiveError, Communicator, UsageError
from commengine.mpi import load_mpi
from commengine.options.parser import OneLineParser
from commengine.options.ranges import between
from commengine.rank_zero import gather_json, on_rank_zero
from commengine.startup.tasks import number_of_tasks

COMMAND = "bench.conformance bits"
#: what a job asks by itself: by name the transport of `LOCAL`, and the order of the engine's reductions
IN_JOB: dict[str, tuple[str, Any]] = {
    "mpi4py": ("mpi4py", None),
    "engine": ("engine", None),
    "engine-rank": ("engine", "rank"),
    "engine-tree": ("engine", "tree"),
    "shared": ("shared", None),
    "shared-tree": ("shared", "tree"),
    "nccl": ("nccl", None),
    "staged": ("staged", None),
}
#: by name, the environment of `bench.transports.environments` and the transport that its job asks
JOBS = {name: ("", name) for name in IN_JOB} | {"openmpi": ("openmpi", "mpi4py"), "intel": ("intel", "mpi4py")}
#: by name, the backend of torch.distributed
PEERS = {"gloo": "gloo", "torch-nccl": "nccl"}
#: by it MPICH, and Intel's MPI, see a node's ranks as those of several nodes
TWO_NODES = {"MPIR_CVAR_NUM_CLIQUES": "2"}
JOB_SECONDS = 900.0


def parser() -> OneLineParser:
    """The command line."""
    options = new_parser(COMMAND, __doc__)
    default = [name for name in (*JOBS, *PEERS) if "nccl" not in name and name != "staged"]
    if torch.cuda.is_available():
        default = [*JOBS, *PEERS]
    options.add_argument("--transports", nargs="+", choices=[*JOBS, *PEERS], default=default, help="whom to ask")
    options.add_argument("--operations", nargs="+", choices=OPERATIONS, default=list(OPERATIONS), help="of what")
    options.add_argument("--ranks", type=int, valid=between(3, 64), default=4,
                         help="of the jobs that it starts; two operands have one sum only")  # fmt: skip
    options.add_argument("--dtype", choices=list(FLOATS), default="float32", help="of the elements")
    options.add_argument("--max-bytes", default="4M", help="of the largest message")
    options.add_argument("--beside", metavar="FILE",
                         help="the --json of the same transports on another number of nodes")  # fmt: skip
    add_files(options, output="write the page as markdown", json="write all answers")
    return options


def most_of(given: Mapping[str, Any]) -> int:
    """The elements of the largest message. Raises ValueError for a size that is none."""
    return max(64, size_of("--max-bytes", given["max_bytes"]) // FLOATS[given["dtype"]].itemsize)


def in_job(world: Communicator) -> int:
    """Ask the transports of this job; rank 0 prints and writes. Collective over ``world``."""
    surroundings = environment(COMMAND)

    def read() -> dict[str, Any]:
        given = vars(parser().parse_args())
        names = [name for name in given["transports"] if name in IN_JOB]
        if not names:
            raise UsageError(f"--transports: a job asks {', '.join(IN_JOB)}; the others are asked without a launcher")
        return given | {"transports": names, "most": most_of(given), "before": before(given["beside"], nodes)}

    nodes = len({one[0] for one in neighbours(world.mpi)})
    given = on_rank_zero(world, read)
    dtype = FLOATS[given["dtype"]]
    asked, problems = [], {}
    most, operations = given["most"], given["operations"]
    for name in given["transports"]:
        try:
            with opened(name, world, Sums.capacity(world.size, dtype, most)) as transport:
                found = ask(transport, world.rank, world.size, dtype, most, operations)
        except CollectiveError as error:
            problems[name] = str(error)
            continue
        asked += [{"transport": name, **one} for rank in gather_json(world, found) for one in rank]
    library = " ".join(load_mpi().Get_library_version().replace("Version:", "").split())
    library = re.sub(r"(\d[\w.]*).*", r"\1", library)  # its name and its version
    result = surroundings | {
        "ranks": world.size, "nodes": nodes, "library": library, "answers": asked, "problems": problems
    }  # fmt: skip

    def told() -> int:
        tables = page(asked, problems, given, world.size, beside=given["before"])
        text = "\n".join([*heading("What the bits of a sum depend on", surroundings), *tables, ""])
        publish(text, result, output=given["output"], json_file=given["json"])
        return 0

    return int(on_rank_zero(world, told))


@contextmanager
def opened(name: str, world: Communicator, capacity: int) -> Iterator[LocalTransport]:
    """A transport of `IN_JOB`. Collective over ``world``."""
    kind, order = IN_JOB[name]
    with (
        closing(Communicator(world.mpi, device="cpu", order=order, name=name)) as group,
        closing(LOCAL[kind](group, capacity)) as transport,
    ):
        yield transport


def alone(argv: Sequence[str] | None = None) -> int:
    """Start a job for each transport, and print one page. Returns the exit status."""
    surroundings = environment(COMMAND, argv)
    with user_errors(COMMAND):
        given = vars(parser().parse_args(argv))
        most_of(given)
        elsewhere = before(given["beside"], 1)
    answers: list[dict[str, Any]] = []
    problems: dict[str, str] = {}
    libraries: dict[str, str] = {}
    for name in given["transports"]:
        print(f"{name}: asked", file=sys.stderr, flush=True)
        try:
            found = job(name, given, {})
        except UsageError as error:
            problems[name] = str(error)
            continue
        answers += found["answers"]
        libraries[name] = found["library"]
        if name in JOBS and not any(one["transport"] == name for one in elsewhere):
            with suppress(UsageError):  # shared memory ends at the node
                again = job(name, given, TWO_NODES)
                elsewhere += again["answers"] if again["nodes"] == 2 else []  # other MPIs do not know the variable
    lines = heading("What the bits of a sum depend on", surroundings)
    lines += [f"- libraries: {', '.join(f'{name}: {one}' for name, one in libraries.items())}"]
    text = "\n".join([*lines, *page(answers, problems, given, given["ranks"], beside=elsewhere), ""])
    result = surroundings | {"ranks": given["ranks"], "libraries": libraries, "answers": answers, "problems": problems}
    publish(text, result, output=given["output"], json_file=given["json"])
    return 0


def job(name: str, given: Mapping[str, Any], variables: Mapping[str, str]) -> dict[str, Any]:
    """The result of a job of its own. Raises UsageError with the end of its output if it fails."""
    environ, kind = JOBS.get(name, ("", ""))
    python, more = environment_of(environ) if environ else (sys.executable, {})
    with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
        if name in PEERS:
            most = str(most_of(given))
            module = ["bench.peers.summed", PEERS[name], given["dtype"], most, folder, *given["operations"]]
            more |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        else:
            module = [
                COMMAND.split()[0], "bits", "--transports", kind, "--operations", *given["operations"],
                "--dtype", given["dtype"], "--max-bytes", given["max_bytes"], "--json", f"{folder}/0.json",
            ]  # fmt: skip
        words = [*launcher(python, given["ranks"]), python, "-m", *module]
        environment = {**os.environ, **more, **variables}
        try:
            done = subprocess.run(
                words, env=environment, capture_output=True, text=True, timeout=JOB_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            raise UsageError(f"its job did not end in {JOB_SECONDS:g} s") from None
        files = sorted(Path(folder).glob("*.json"))
        if done.returncode or not files:
            raise UsageError((done.stderr.strip().splitlines() or [f"its job ended with status {done.returncode}"])[-1])
        found = [json.loads(file.read_text()) for file in files]
    if name in PEERS:
        answers = [one for rank in found for one in rank]
        result = {"answers": answers, "library": f"torch {torch.__version__}"}
    else:
        result = found[0]
        if result["problems"]:
            raise UsageError(next(iter(result["problems"].values())))
    return result | {"answers": [one | {"transport": name} for one in result["answers"]]}


def before(file: str | None, nodes: int) -> list[dict[str, Any]]:
    """The answers of an earlier run. Raises ValueError for a file without, or of a job on as many ``nodes``."""
    if file is None:
        return []
    try:
        found = json.loads(Path(file).read_text(encoding="utf-8"))
        answers: list[dict[str, Any]] = found["answers"]
        same = found.get("nodes", 1) == nodes
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--beside {file}: is no --json of this command: {error}") from None
    if same:
        raise ValueError(f"--beside {file}: its ranks were on as many nodes ({nodes}); want those of another placement")
    return answers


def start() -> NoReturn:
    """Run the command, as one rank of a job or by itself."""
    if (number_of_tasks() or ("", 1))[1] > 1:
        run_on_ranks(COMMAND, in_job, parser)
    run_alone(alone)
