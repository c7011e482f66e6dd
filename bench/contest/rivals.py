"""The engine beside its strongest rivals on this machine.

    python -m bench.contest rivals --install     # once; so does make rivals
    python -m bench.contest rivals --folder runs/rivals --output rivals.md --plot rivals.png

For each operation it starts one job of bench.collectives, in which all ways alternate at each size: the engine over
three MPIs, on private and on shared tensors; each MPI by mpi4py; oneCCL, DeepSpeed and gloo; and loops in C over the
same shared memory, the limit. The results of an operation are a file of the folder. An operation that has its file is
not measured again, so a run that was stopped goes on where it stopped. A rival that is not there, or gives wrong
results, is named in one line. The exit status is 1 if a result of the engine was wrong or an operation failed.

The table has medians in microseconds of the slower rank. A time with ~ is of another state of the machine than the
others of its row: a rival's counts all the same, which can only speak against the engine, and the engine's does not.
Below the table every size is named at which a rival is faster.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.collective_study.measurement import Measurement, comparable
from bench.collective_study.results import measurements
from bench.collective_study.tables import size_label
from bench.command.files import writable
from bench.contest.parts.base import Case, Contest
from bench.contest.parts.jobs import failed
from bench.transports.environments import PACKAGES, VERSION_OF, install, versions
from bench.transports.operations import OPERATIONS
from commengine.options.ranges import SECONDS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLLECTIVES = "bench.collectives"
#: the engine's ways: on private tensors, on tensors of Communicator.empty, and both over the two other MPIs
WAYS = ("engine", "shared", "engine@openmpi", "shared@openmpi", "engine@intel", "shared@intel")
#: mpi4py is that of the environment of the job: MPICH's
RIVALS = ("mpi4py", "openmpi", "intel", "oneccl", "deepspeed", "gloo")
LIMIT = "c-loop"
RANKS = 2
DTYPES = ("float32", "bfloat16")
#: seconds after which the job of one operation is ended
MOST_SECONDS = 1200


def measure(given: Any, operation: str) -> str:
    """Measure one operation into its file of the folder. Returns the reason why that failed, or nothing."""
    result = given.folder / f"{operation}.json"
    part = result.with_suffix(".part")
    part.unlink(missing_ok=True)
    words = [
        COLLECTIVES, "--operations", operation, "--dtypes", *DTYPES, "--transports", *WAYS, *RIVALS, LIMIT,
        "--min-bytes", "8", "--max-bytes", given.max_bytes, "--step-factor", "8", "--no-out-of-place", "--time-limit",
        str(given.time_limit), "--json", str(part),
    ]  # fmt: skip
    problem = failed(RANKS, words, given.folder / f"{operation}.log", MOST_SECONDS)
    if not part.exists():
        return problem
    part.write_text(json.dumps(json.loads(part.read_text()) | {"rivals": versions()}))
    part.replace(result)
    return ""


def cases_of(operation: str, rows: Sequence[Measurement]) -> Iterator[Case]:
    """Yield a case for each dtype and size: one row of all ways. Rows count that may be compared.

    The row is of the state of the machine in which most ways were measured, and of those the one with most calls. A way
    that has no time of this state has one of another, which is marked, and counts for a rival alone.
    """
    found: dict[tuple[str, int], dict[Any, dict[str, Measurement]]] = {}
    for row in comparable(rows):
        states = found.setdefault((str(row.dtype), row.bytes), {})
        states.setdefault(row.state, {})[row.transport] = row

    def weight(ways: dict[str, Measurement]) -> tuple[int, int]:
        return len(ways), sum(row.calls for row in ways.values())

    for dtype, nbytes in sorted(found, key=lambda key: (key[0] != "float32", key)):
        *others, most = sorted(found[dtype, nbytes].values(), key=weight)
        seconds = {name: row.p50 for ways in (*others, most) for name, row in ways.items()}
        mine = min((name for name in WAYS if name in most), key=seconds.__getitem__, default=None)
        theirs = min((name for name in RIVALS if name in seconds), key=seconds.__getitem__, default=None)
        ratio = seconds[theirs] / seconds[mine] if mine and theirs else None
        size = "-" if operation == "barrier" else size_label(nbytes)
        case = Case({"operation": operation, "dtype": dtype, "size": size})
        case.numbers = {"bytes": nbytes, "best": [mine, theirs], "ratio": ratio}
        shown = {}
        for name in (one for one in (*WAYS, *RIVALS, LIMIT) if one in seconds):
            text = f"{1e6 * seconds[name]:.{2 if seconds[name] < 1e-4 else 0}f}{'' if name in most else '~'}"
            shown[name] = f"**{text}**" if name in (mine, theirs) else text
        case.facts = {"us": shown | {"rival / engine": f"{ratio:.2f}" if ratio else "-"}}
        yield case


def draw(cases: Sequence[Case]) -> Figure:
    """The picture: the rivals' best time over the engine's, by size, a line for each operation in float32."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    lines: dict[str, list[tuple[int, float]]] = {}
    for case in cases:
        if case.labels.get("dtype") == "float32" and case.numbers["ratio"]:
            lines.setdefault(case.labels["operation"], []).append((case.numbers["bytes"], case.numbers["ratio"]))
    for operation, points in lines.items():
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=operation)
    axes.axhline(1.0, color="black", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set(xlabel="size in bytes", ylabel="time of the best rival / time of the engine's best way",
             title="Above the line the engine is faster than every rival (float32)")  # fmt: skip
    axes.legend(fontsize=8, ncols=2)
    return figure


def remarks_on(operation: str, result: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each rival that is absent, refuses the operation, or gives wrong results."""
    yield from (f"- not measured: {one['transport']}: {one['reason']}" for one in result["skipped"])
    wrong: Counter[tuple[str, str]] = Counter()
    for row in result["rows"]:
        wrong[row["transport"], row["dtype"]] += row["wrong"]
    for (name, dtype), count in wrong.items():
        if count:
            yield f"- {operation}: {name} gave {count} wrong elements of {dtype}, so its times there do not count"


class RivalsContest(Contest):
    """The engine beside other libraries."""

    title = "Rivals"
    rounds = 0
    remarks: Sequence[str] = ()

    def add_options(self, add: Callable[..., Any]) -> None:
        """The operations and sizes."""
        add("--install", nargs="*", choices=list(PACKAGES),
            help="measure nothing, but make these environments (default: all)")  # fmt: skip
        add("--folder", type=Path, default="runs/rivals", metavar="FOLDER", help="of the results of each operation")
        add("--operations", nargs="+", choices=OPERATIONS, default=list(OPERATIONS), help="(default: all)")
        add("--max-bytes", default="64M", metavar="SIZE", help="largest size; the least is 8")
        add(
            "--plot",
            metavar="FILE",
            valid=writable("plot"),
            file="written",
            help="draw the ratio over the size: .png, .svg or .pdf",
        )
        add("--time-limit", type=float, valid=SECONDS, default=0.25, help="seconds for one way at one size")

    def measure(self, given: Any, world: Any) -> Sequence[Case]:
        """Measure what is missing. Returns a case for each operation, dtype and size, and one for each error."""
        if given.install is not None:
            return [Case(errors=install(given.install or list(PACKAGES)))]
        given.folder.mkdir(parents=True, exist_ok=True)
        cases, results = [], {}
        for operation in given.operations:
            path: Path = given.folder / f"{operation}.json"
            if not path.exists():
                print(f"{operation}: measuring", file=sys.stderr, flush=True)
                if problem := measure(given, operation):
                    cases.append(Case(errors=[f"{operation}: {problem}"]))
            if path.exists():
                results[operation] = found = json.loads(path.read_text())
                cases += cases_of(operation, measurements(found["rows"]))
                if wrong := sum(row["wrong"] for row in found["rows"] if row["transport"] in WAYS):
                    cases.append(Case(errors=[f"{operation}: the engine gave {wrong} wrong elements"]))
        known = {name: text for one in results.values() for name, text in one["rivals"].items()}
        dates = [f"- first measured: {one['date']}" for one in results.values()]
        versions_of = [f"- {name}: {known.get(name, 'not installed')}" for name in VERSION_OF]
        told = (line for operation, result in results.items() for line in remarks_on(operation, result))
        self.remarks = [*dates[:1], *versions_of, *dict.fromkeys(told)]
        return cases

    def notes(self, given: Any, cases: Sequence[Case]) -> list[str]:
        """The columns, the date and the versions of the measurement, and the rivals that do not count."""
        return [
            "- engine, shared: the engine over the MPI of the job, on private tensors and on shared ones",
            "- mpi4py, openmpi, intel: mpi4py over the MPI of the job and over these; engine@ and shared@ these: the "
            "engine over them",
            "- oneccl: over Intel MPI, called and timed in C++; deepspeed: its all-reduce in shared memory, called "
            "from Python; gloo: torch.distributed",
            "- c-loop: the limit, a loop in C over buffers that all ranks have mapped, without Python or a library",
            *self.remarks,
        ]

    def below(self, given: Any, cases: Sequence[Case]) -> list[str]:
        """A line for each loss."""
        lost = [case for case in cases if (case.numbers.get("ratio") or 1) < 1]
        return [
            f"- {', '.join(case.labels.values())}: {case.numbers['best'][1]} is {1 / case.numbers['ratio']:.2f} times "
            f"as fast as {case.numbers['best'][0]}"
            for case in lost
        ]

    def page(self, given: Any, cases: Sequence[Case]) -> list[str]:
        """Nothing where environments were made."""
        return super().page(given, cases) if given.install is None else []

    def files(self, given: Any, cases: Sequence[Case]) -> None:
        """Draw the picture."""
        if given.plot:
            draw(cases).savefig(given.plot, dpi=120)


CONTEST = RivalsContest()
