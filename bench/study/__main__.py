"""Study the machine at hand in one command: what collectives cost, alone, in a training step, and on more ranks.

    mpiexec -n 2 python -m bench.study runs/here --minutes 10
    srun --mpi=pmi2 -N 2 --ntasks-per-node=4 python -m bench.study runs/two-nodes --preset gpt-355m --mock-data

It runs what bench.collectives, bench.step and bench.replay do, fits alpha and beta, and writes all of their files to
DIR. The first screen of DIR/report.html answers: what does a collective cost here, which way is fastest from which
size on, what share of a step is communication, what would 8, 64 and 512 ranks do? DIR/study.json has the answers, too.
SIGTERM and Ctrl-C stop a study at any time (exit status 75 or 130), and so may a failure; the same command on as many
ranks goes on with what is left.

All other options are those of pretrain_gpt or pretrain_bert, as for bench.step, and describe the step; without any it
is a small GPT's. The collectives are measured in the step's dtype.

Two parts also run alone, in one process, on files that are there; each has a --help of its own:

    python -m bench.study --only fit results.json --output model.json    # alpha and beta, of bench.collectives' results
    python -m bench.study --only report DIR --output report.html         # one page of all results in a folder
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench import replay, step
from bench.collective_study.fitted_series import as_json, draw, tables
from bench.collective_study.memory import free_memory
from bench.collective_study.points import model_of_points
from bench.collective_study.results import measurements
from bench.collective_study.results import read as read_results
from bench.collective_study.shown_states import all_tables
from bench.collective_study.tables import draw as draw_rows
from bench.command.files import add_files, replace_json, write
from bench.command.machine import environment, heading
from bench.command.parser import new_parser, part_alone
from bench.command.start import progress, run_alone, run_on_ranks
from bench.report_page.page import page
from bench.step_study import recorder
from bench.timing.starting import neighbours
from commengine import Communicator
from commengine.cost import FittedModel, Link
from commengine.files.reading import read_json
from commengine.job_end import say_once_and_abort
from commengine.options.parser import OneLineParser
from commengine.options.ranges import ABOVE_ZERO, NOT_NEGATIVE, SECONDS
from commengine.rank_zero import on_rank_zero
from trainers.run import signals

from . import answers, fitting, folder, reporting, sizes
from .projection import MeasuredMachine

COMMAND = "bench.study"
#: the step without other options: it runs in a tenth of a second on two cores
SMALL = (
    "--mock-data", "--vocab-size", "8192", "--num-layers", "4", "--hidden-size", "512", "--num-attention-heads", "8",
    "--seq-length", "256", "--micro-batch-size", "2",
)  # fmt: skip
#: the parts that run alone
ALONE = {"fit": fitting.main, "report": reporting.main}
#: the parts of a study after the collectives
STAGES = ("fit", "step", "replay", "fit")
#: the exit statuses of a study that a signal stopped: after AGAIN a launcher may start the same command again
AGAIN, INTERRUPTED = os.EX_TEMPFAIL, 130
#: the load of other programs, in cores, beside which the ranks no longer have their cores to themselves. The start of
#: the study's own ranks counts for up to 0.4 in the average over a minute.
FREE = 0.5
#: replays that do not count, and those that do
REPLAYS = 3, 7
#: steps at first, and at most; the share of the study's time that goes to them
FEWEST, MOST, STEP_SHARE = 5, 100, 0.25


def parser() -> OneLineParser:
    """The options that are not those of the training command."""
    options = new_parser(COMMAND, __doc__, passes_on=True)
    recorder.add_model(options)
    add = options.add_argument
    add("--only", choices=tuple(ALONE), help="run this part alone; it has other options")
    add("folder", metavar="DIR", help="the folder of the study: a new one, or one that goes on")
    add("--minutes", type=float, valid=SECONDS, default=10.0,
        help="time of the whole study, all its calls together; a few sizes and steps are always measured")  # fmt: skip
    add("--device", choices=("cpu",), default="cpu", help="the collectives and the step are those of the host")
    add("--max-bytes", metavar="SIZE", help="largest size (default: 64M, or less if the memory is small)")
    add("--between-alpha-us", type=float, valid=NOT_NEGATIVE, default=2.0, metavar="US",
        help="for more ranks: latency between nodes, if the job has one node")  # fmt: skip
    add("--between-gb-per-s", type=float, valid=ABOVE_ZERO, default=12.5, metavar="GB",
        help="and the rate of a node's network card (default: %(default)s, a link of 100 Gbit/s)")  # fmt: skip
    add("--overwrite", action="store_true", help="begin the study in DIR anew")
    add_files(options, output="write the answers as markdown here, too", json="write the answers as JSON here, too")
    return options


def read(argv: Sequence[str] | None, world_size: int, node: int, memory: dict[str, int]) -> dict[str, Any]:
    """The options, the step's settings and the study so far, as JSON types. Raises ValueError or UsageError."""
    given, rest = parser().parse_known_args(argv)
    if world_size < 2:
        raise ValueError("a study needs 2 ranks or more: start it with mpiexec -n 2, or srun")
    words = rest or [*SMALL, "--tensor-model-parallel-size", str(math.gcd(world_size, node, 8))]
    on_host = [*words, "--device", given.device]  # a step on a GPU would not have the collectives that are measured
    config = recorder.read_traceable(given.model, on_host, f"python -m {COMMAND}", world_size)
    dtype = "bfloat16" if config.bf16 else "float16" if config.fp16 else "float32"
    settings = {"ranks": world_size, "model": given.model, "step": words, "--max-bytes": given.max_bytes}
    largest = sizes.largest_size(given.max_bytes, memory)
    record = folder.open_record(Path(given.folder), settings, overwrite=given.overwrite)
    # Going on, the memory that is free now may be less.
    largest = record.numbers.setdefault("largest", largest)
    return (
        vars(given)
        | recorder.to_json(config)
        | {"dtype": dtype, "node": node, "largest": largest, "record": asdict(record)}
    )


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGINT and SIGTERM end all ranks at once, because all that is finished is on the disk. Afterwards they do not."""

    def end(number: signal.Signals) -> None:
        status = INTERRUPTED if number == signal.SIGINT else AGAIN
        say_once_and_abort(f"{number.name}: ended at once; the same command goes on (exit status {status})", status)

    listener = signals.SignalListener(end)
    ended = False
    try:
        yield
        ended = True
    finally:
        listener.close(ignore=ended)


def main(world: Communicator, argv: Sequence[str] | None = None) -> int:
    """Run what is left of a study. Returns the exit status. Collective over ``world``."""
    surroundings = environment(COMMAND, argv)  # before measuring: the load average is that of other programs
    memory, node = free_memory(world), min(map(len, neighbours(world.mpi)))  # of the smallest node
    options = on_rank_zero(world, lambda: read(argv, world.size, node, memory))
    given, record = Namespace(**options), folder.StudyRecord(**options["record"])
    place, budget = Path(given.folder), sizes.Budget(record.spent_s, 60 * given.minutes)
    rows = place / "collectives.json"
    plan = len([*sizes.units(given.largest)])
    with ended_by_signals(), progress(world, plan + len(STAGES), piped=True) as bar:

        def save() -> None:
            record.spent_s = budget.spent
            folder.save(place, record)

        def finish(name: str, run: Callable[[], None]) -> None:
            key = on_rank_zero(world, lambda: fit_key(rows)) if name == "fit" else name
            bar.set_description(name)
            if key not in record.finished:
                run()
                record.finished.append(key)
                on_rank_zero(world, save)
            bar.update()

        on_rank_zero(world, save)
        sweep = sizes.Sweep(world, rows, surroundings, given.dtype, given.largest, budget, save, bar)
        sweep.measure()

        def fit() -> None:
            on_rank_zero(world, lambda: fit_rows(rows, surroundings))

        finish("fit", fit)
        finish("step", lambda: trace_steps(world, given, surroundings, budget))
        finish("replay", lambda: replay_step(world, place, surroundings))
        sweep.measure_again()
        finish("fit", fit)
        on_rank_zero(world, save)
        text = on_rank_zero(world, lambda: conclude(given, record, surroundings, several=node < world.size))
    if world.rank == 0:
        print(text, flush=True)
    return 0


# ---- the parts after the collectives


def fit_key(results: Path) -> str:
    """The name of the fit of these results: another one if more was measured than at the last call. On rank 0."""
    found = read_json(results)
    again = sum(count for *_, count in found.get("again", []))
    return f"fit of {len(found['units'])}" + (f" and {again} again" if again else "")


def fit_rows(results: Path, surroundings: dict[str, Any]) -> None:
    """Fit what was measured, and draw it. On rank 0."""
    series, source = read_results(results)
    fitted, _ = fitting.fit_all([one for one in series if one.ranks > 1])
    rows = measurements(read_json(results)["rows"])
    measured = "\n\n".join(["# Collectives", *(f"```\n{text}\n```" for text in all_tables(rows)), ""])
    results.with_suffix(".md").write_text(measured, encoding="utf-8")
    draw_rows(rows).savefig(results.with_suffix(".png"), dpi=110)
    if fitted:
        model = results.with_name("model")
        model.with_suffix(".md").write_text("\n".join(["# Fit", "", *tables(fitted), ""]), encoding="utf-8")
        draw(fitted).savefig(model.with_suffix(".png"), dpi=110)
    replace_json(results.with_name("model.json"), as_json(fitted, source, Path(results.name), surroundings))


def trace_steps(world: Communicator, given: Namespace, surroundings: dict[str, Any], budget: sizes.Budget) -> None:
    """Trace FEWEST steps, and then as many as there is time for, as bench.step does. Collective."""
    place = Path(given.folder)
    files = {"json": "step.json", "output": "step.md", "timeline": "step.png", "save": folder.RECORDING}
    options = {name: str(place / file) for name, file in files.items()} | {
        "chrome": None,
        "save_format": None,
    }
    options |= {"model": given.model, "config": given.config}

    def again() -> int:
        seconds, _ = answers.step_here(read_json(place / "step.json"))
        room = min(budget.left / 2, STEP_SHARE * budget.whole)
        return min(MOST, int(room / seconds))

    def trace(warmup: int, steps: int) -> None:
        recording = place / folder.RECORDING
        on_rank_zero(world, lambda: step.new_recording(recording, "DIR", overwrite=True))
        step.run(world, surroundings, options | {"warmup": warmup, "steps": steps}, write)

    trace(2, FEWEST)
    if (count := on_rank_zero(world, again)) >= 2 * FEWEST:
        trace(3, count)


def replay_step(world: Communicator, place: Path, surroundings: dict[str, Any]) -> None:
    """Run the step's collectives without the compute, as bench.replay does. Collective."""
    recording = place / folder.RECORDING
    data = on_rank_zero(world, lambda: replay.contents(str(recording)))
    options = {"trace": str(recording), "data": data, "warmup": REPLAYS[0], "rounds": REPLAYS[1], "scale": False}
    files = {"json": str(place / "replay.json"), "output": str(place / "replay.md")}
    replay.run(world, surroundings, options | files, write)


# ---- the answers


def conclude(given: Namespace, record: folder.StudyRecord, surroundings: dict[str, Any], *, several: bool) -> str:
    """Write the answers and the page. Returns the answers for people. On rank 0."""
    place = Path(given.folder)
    parts = ("collectives", "step", "replay", "model")
    results, stepped, replayed, model = (read_json(place / f"{name}.json") for name in parts)
    rows, states = measurements(results["rows"]), " ".join(results.get("states", [])).removeprefix("- ")
    priced = answers.cost(rows, states)
    load = record.numbers["load"] = max(record.numbers.get("load", 0.0), surroundings["load_average_before"])
    cores = os.cpu_count() or 1
    if load + given.node > cores + FREE:
        priced["answer"] = (
            f"**The machine was busy**: the load average before the study was {load:.1f}, beside {given.node} ranks on "
            f"{cores} cores. The times below contain waits for other programs; repeat the study on an idle machine "
            f"before you compare them.\n\n{priced['answer']}"
        )
    about = step.describe(recorder.from_json(stepped), stepped["ranks"])
    record.answers = [priced, answers.ways(rows), answers.share(stepped, replayed, about)]
    if model["collectives"]:
        link = Link(given.between_alpha_us / 1e6, 1e-9 / given.between_gb_per_s)
        network = (
            "collectives as measured on these nodes, scaled as a ring's" if several else
            f"nodes like this one, with {given.node} ranks, on an assumed network of {given.between_gb_per_s:g} GB/s "
            f"and {given.between_alpha_us:g} us"
        )  # fmt: skip
        machine = MeasuredMachine(model_of_points(rows), FittedModel.from_json(model), given.node, several, link)
        answer, record.numbers["projection"] = answers.more(stepped, machine, given.largest, network)
    else:
        answer, record.numbers["projection"] = answers.no_answer("no operation has three sizes to fit a line")
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
    (place / "report.html").write_text(page(place, []), encoding="utf-8")
    return f"{text}\n{place / 'report.html'}"


if __name__ == "__main__":
    part, words = part_alone(ALONE)
    if part:
        run_alone(lambda: ALONE[part](words))
    run_on_ranks(COMMAND, main, parser)
