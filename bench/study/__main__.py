"""Study the machine at hand in one command: what collectives cost, alone, in a training step, and on more ranks.

    mpiexec -n 2 python -m bench.study runs/here --minutes 10
    srun --mpi=pmi2 -N 2 --ntasks-per-node=4 python -m bench.study runs/two-nodes --preset gpt-355m --mock-data

It runs what bench.collectives, bench.fit, bench.step, bench.replay and bench.report do, and writes all of their files
to DIR. The first screen of DIR/report.html answers: what does a collective cost here, which way is fastest from which
size on, what share of a step is communication, what would 8, 64 and 512 ranks do? DIR/study.json has the answers, too.
SIGTERM and Ctrl-C stop a study at any time (exit status 75 or 130), and so may a failure; the same command on as many
ranks goes on with what is left.

All other options are those of pretrain_gpt or pretrain_bert, as for bench.step, and describe the step; without any it
is a small GPT's. The collectives are measured in the step's dtype.
"""

from __future__ import annotations

import contextlib
import io
import math
import signal
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from tqdm import tqdm

from bench import fit, replay, step
from bench.collective_study import piecewise
from bench.collective_study.fitted_series import as_json
from bench.collective_study.memory import free_memory
from bench.collective_study.results import read as read_results
from bench.command.files import add_files, check_writable, replace_json
from bench.command.machine import environment, heading
from bench.command.parser import TrainerCommandParser, new_trainer_parser
from bench.command.start import run_on_ranks
from bench.report_page.page import page
from bench.step_study import recorder
from bench.timing.starting import spans_nodes
from commengine import Communicator
from commengine.cost import FittedModel, Link
from commengine.mpi import load_mpi
from commengine.rank_zero import on_rank_zero
from trainers.files.reading import read_json
from trainers.options import ABOVE_ZERO, NOT_NEGATIVE, SECONDS

from . import answers, busy, folder, sizes
from .halting import AGAIN, Halting
from .projection import MeasuredMachine, through_points

COMMAND = "bench.study"
#: the step without other options: it runs in a tenth of a second on two cores
SMALL = (
    "--mock-data", "--vocab-size", "8192", "--num-layers", "4", "--hidden-size", "512", "--num-attention-heads", "8",
    "--seq-length", "256", "--micro-batch-size", "2",
)  # fmt: skip
#: the parts of a study after the collectives
STAGES = ("fit", "step", "replay")
#: steps at first, and at most; the share of the study's time that goes to them
FEWEST, MOST, STEP_SHARE = 5, 100, 0.25


def parser() -> TrainerCommandParser:
    """The options that are not those of the training command."""
    options = new_trainer_parser(COMMAND, __doc__)
    recorder.add_model(options)
    add = options.add_argument
    add("folder", metavar="DIR", help="the folder of the study: a new one, or one that goes on")
    add("--minutes", type=float, valid=SECONDS, default=10.0,
        help="time of the whole study, all its calls together; a few sizes and steps are always measured "
        "(default: %(default)s)")  # fmt: skip
    add("--device", choices=("cpu",), default="cpu", help="the collectives and the step are those of the host")
    add("--max-bytes", metavar="SIZE", help="largest size (default: 64M, or less if the memory is small)")
    add("--between-alpha-us", type=float, valid=NOT_NEGATIVE, default=2.0, metavar="US",
        help="for more ranks: latency between nodes, if the job has one node (default: %(default)s)")  # fmt: skip
    add("--between-gb-per-s", type=float, valid=ABOVE_ZERO, default=12.5, metavar="GB",
        help="and the rate of a node's network card (default: %(default)s, a link of 100 Gbit/s)")  # fmt: skip
    add("--overwrite", action="store_true", help="begin the study in DIR anew")
    add_files(options, output="write the answers as markdown here, too", json="write the answers as JSON here, too")
    return options


def read(argv: Sequence[str] | None, world_size: int, node: int, memory: dict[str, int]) -> dict[str, Any]:
    """The options, the step's words and the study so far, as JSON types. Raises ValueError or UsageError."""
    given, rest = parser().parse_known_args(argv)
    check_writable(output=given.output, json=given.json)
    if world_size < 2:
        raise ValueError("a study needs 2 ranks or more: start it with mpiexec -n 2, or srun")
    words = rest or [*SMALL, "--tensor-model-parallel-size", str(math.gcd(world_size, node, 8))]
    on_host = [*words, "--device", given.device]  # a step on a GPU would not have the collectives that are measured
    config = recorder.read_traceable(given.model, on_host, f"python -m {COMMAND}", world_size)
    dtype = "bfloat16" if config.bf16 else "float16" if config.fp16 else "float32"
    settings = {"ranks": world_size, "model": given.model, "step": words, "--max-bytes": given.max_bytes}
    found = vars(given) | {"words": on_host, "dtype": dtype, "node": node}
    found["largest"] = sizes.largest_size(given.max_bytes, dtype, world_size, memory)
    record = folder.open_record(Path(given.folder), settings, overwrite=given.overwrite)
    # Going on, the memory that is free now may be less.
    found["largest"] = record.numbers.setdefault("largest", found["largest"])
    return found | {"record": asdict(record)}


def main(world: Communicator, argv: Sequence[str] | None = None) -> int:
    """Run what is left of a study. Returns the exit status. Collective over ``world``."""
    surroundings = environment(COMMAND, argv)  # before measuring: the load average is that of other programs
    memory, node = free_memory(world), ranks_of_a_node(world)
    options = on_rank_zero(world, lambda: read(argv, world.size, node, memory))
    given, record = Namespace(**options), folder.StudyRecord(**options["record"])
    place = Path(given.folder)
    plan = len([*sizes.units(given.largest)])
    with Halting(world, record.spent_s, 60 * given.minutes) as halting, progress_of(world, plan + len(STAGES)) as bar:

        def save() -> None:
            record.spent_s = halting.spent
            folder.save(place, record)

        on_rank_zero(world, save)
        several = spans_nodes(world.mpi)
        rows = place / "collectives.json"
        sweep = sizes.Sweep(world, rows, surroundings, given.dtype, given.largest, memory, halting, save, bar)

        def ended_by(stopped: signal.Signals) -> int:
            on_rank_zero(world, lambda: conclude(given, record, surroundings, several=several))
            if world.rank == 0:
                print(f"stopped by {stopped.name}: the same command goes on (exit status {AGAIN})", flush=True)
            return AGAIN

        if (stopped := sweep.measure()) is not None:
            return ended_by(stopped)
        parts: dict[str, Callable[[], None]] = {
            "fit": lambda: on_rank_zero(world, lambda: fit_rows(rows, place / "model.json", surroundings)),
            "step": lambda: trace_steps(world, given, halting),
            "replay": lambda: replay_step(world, place),
        }

        def finish(name: str) -> None:
            key = on_rank_zero(world, lambda: fit_key(rows)) if name == "fit" else name
            bar.set_description(name)
            if key not in record.finished:
                parts[name]()
                record.finished.append(key)
                on_rank_zero(world, save)

        for name in STAGES:
            finish(name)
            bar.update()
        if (stopped := sweep.measure_again()) is not None:
            return ended_by(stopped)
        finish("fit")
        on_rank_zero(world, save)
        text = on_rank_zero(world, lambda: conclude(given, record, surroundings, several=several))
    if world.rank == 0:
        print(text, flush=True)
    return 0


def progress_of(world: Communicator, total: int) -> tqdm[NoReturn]:
    """A progress bar on rank 0's standard error, also through a launcher's pipe, where it is drawn less often."""
    often = 0.1 if sys.stderr.isatty() else 2.0
    shape = "{desc}{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}]"
    return tqdm(
        total=total,
        disable=world.rank != 0,
        file=sys.stderr,
        ncols=80,
        mininterval=often,
        bar_format=shape,
        leave=False,
    )


def ranks_of_a_node(world: Communicator) -> int:
    """The ranks of the smallest node. Collective."""
    mpi = load_mpi()
    node = world.mpi.Split_type(mpi.COMM_TYPE_SHARED)
    ranks = int(world.mpi.allreduce(node.size, mpi.MIN))
    node.Free()
    return ranks


# ---- the parts after the collectives


def fit_key(results: Path) -> str:
    """The name of the fit of these results: another one if more was measured than at the last call. On rank 0."""
    found = read_json(results)
    again = sum(count for *_, count in found.get("again", []))
    return f"fit of {len(found['units'])}" + (f" and {again} again" if again else "")


def fit_rows(results: Path, model: Path, surroundings: dict[str, Any]) -> None:
    """Fit what was measured, as bench.fit does. On rank 0."""
    series, source = read_results(results)
    fitted, _ = fit.fit_all([one for one in series if one.ranks > 1], piecewise.MOST_SEGMENTS)
    replace_json(model, as_json(fitted, source, Path(results.name), surroundings))


def trace_steps(world: Communicator, given: Namespace, halting: Halting) -> None:
    """Trace FEWEST steps, and then as many as there is time for, as bench.step does. Collective."""
    place = Path(given.folder)
    files = ["--json", str(place / "step.json"), "--timeline", str(place / "step.png")]
    kind = ["--model", given.model] if given.model else []
    files += ["--save", str(place / folder.RECORDING), "--overwrite", *kind, *given.words]

    def again() -> int:
        seconds, _ = answers.step_here(read_json(place / "step.json"))
        room = min(halting.left / 2, STEP_SHARE * (halting.spent + halting.left))
        return min(MOST, int(room / seconds))

    quietly(lambda: step.main(world, ["--warmup", "2", "--steps", str(FEWEST), *files]))
    count = on_rank_zero(world, again)
    if count >= 2 * FEWEST:
        quietly(lambda: step.main(world, ["--warmup", "3", "--steps", str(count), *files]))


def replay_step(world: Communicator, place: Path) -> None:
    """Run the step's collectives without the compute, as bench.replay does. Collective."""
    files = ["--json", str(place / "replay.json"), "--output", str(place / "replay.md")]
    quietly(lambda: replay.main(world, [str(place / folder.RECORDING), *files]))


def quietly(run: Callable[[], object]) -> None:
    """Run another command without its tables, which the page shows."""
    with contextlib.redirect_stdout(io.StringIO()):
        run()


# ---- the answers


def conclude(given: Namespace, record: folder.StudyRecord, surroundings: dict[str, Any], *, several: bool) -> str:
    """Write the answers and the page, of what there is so far. Returns the answers for people. On rank 0."""
    place = Path(given.folder)

    def there(name: str) -> Any:
        return read_json(place / name) if (place / name).exists() else None

    results, stepped, model = there("collectives.json"), there("step.json"), there("model.json")
    rows = [row for row in (results or {"rows": []})["rows"] if row["ranks"] > 1]
    record.answers = [answers.cost(rows, " ".join(results.get("states", []))), answers.ways(rows)] if rows else []
    load = record.numbers["load"] = max(record.numbers.get("load", 0.0), surroundings["load_average_before"])
    if rows and (said := busy.remark(load, given.node, rows)):
        record.answers[0]["answer"] = f"{said}\n\n{record.answers[0]['answer']}"
    if stepped:
        about = step.describe(recorder.from_json(stepped), stepped["ranks"])
        record.answers.append(answers.share(stepped, there("replay.json"), about))
    if stepped and model and model["collectives"]:
        link = Link(given.between_alpha_us / 1e6, 1e-9 / given.between_gb_per_s)
        network = (
            "collectives as measured on these nodes, scaled as a ring's" if several else
            f"nodes like this one, with {given.node} ranks, on an assumed network of {given.between_gb_per_s:g} GB/s "
            f"and {given.between_alpha_us:g} us"
        )  # fmt: skip
        points = through_points(rows)
        machine = MeasuredMachine(points, FittedModel.from_json(model), given.node, several, link)
        answer, record.numbers["projection"] = answers.more(stepped, machine, given.largest, network)
        record.answers.append(answer)
    record.title = f"Collectives on {record.settings['ranks']} ranks: {surroundings['hardware'].split(',')[0]}"
    record.about = (
        f"{surroundings['date'][:16].replace('T', ' ')} UTC; {surroundings['hardware']}; load average before "
        f"{surroundings['load_average_before']:.2f}; {record.spent_s / 60:.1f} minutes; `{surroundings['command']}`"
    )
    folder.save(place, record)
    text = "\n".join(f"## {one['question']}\n\n{one['answer']}\n" for one in record.answers)
    (place / "study.md").write_text("\n".join([*heading(record.title, surroundings), "", text]), encoding="utf-8")
    for name, also in (("study.md", given.output), ("study.json", given.json)):
        if also:
            Path(also).write_bytes((place / name).read_bytes())
    (place / "report.html").write_text(page(place), encoding="utf-8")
    return f"{text}\n{place / 'report.html'}"


if __name__ == "__main__":
    run_on_ranks(COMMAND, main, parser)
