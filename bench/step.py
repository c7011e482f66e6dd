"""Trace training steps: what each collective moved and took, beside the formulas.

    mpiexec -n 4 python -m bench.step --mock-data --vocab-size 8192 --tensor-model-parallel-size 2 --timeline step.png
    mpiexec -n 4 python -m bench.step --config trainers/configs/main.yaml --overlap-grad-reduce --json step.json
    mpiexec -n 2 python -m bench.step --preset bert-336m --mock-data --num-layers 4 --global-batch-size 4

The step is that of pretrain_gpt or pretrain_bert, as --model or --preset says, and all other options are those of the
same command; options of checkpoints, evaluation and logging have no effect. Times are medians over the traced steps.
"Exposed" is the time that the caller waited for a collective. "Skew" is the time that a rank spent in a collective
before the last rank of its group began; bandwidths (nccl-tests') leave it out. Counts and volumes are compared with the
formulas of commengine.cost, on every rank and in every step: if one differs, the table says so and the exit status is
1.
"""

from __future__ import annotations

from bench.command.start import answer_help, progress, run_on_ranks
from bench.step_study.options import step_parser

if __name__ == "__main__":  # before the other imports, which take seconds
    answer_help("bench.step", lambda: step_parser(__doc__))

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.command.files import publish
from bench.command.machine import environment, heading
from bench.step_study import recorder, step_tables, timeline, volumes
from bench.step_study.recorder import TracedConfig
from bench.step_study.stages import stage_rows, stage_table
from bench.step_study.traced_step import TracedStep, TracedSteps, trace_steps
from bench.traces import formats
from commengine import Communicator
from commengine.options.parser import OneLineParser
from commengine.rank_zero import on_rank_zero
from trainers.run.startup import watched
from trainers.settings import derived
from trainers.settings.commands import BERTSettings

COMMAND = "bench.step"
FORMAT = 1


def parser() -> OneLineParser:
    """The options that are not those of the training command."""
    return step_parser(__doc__)


def read(argv: Sequence[str] | None, world_size: int) -> dict[str, Any]:
    """The options and the trainer's settings, as JSON types. Raises ValueError or UsageError that names the option."""
    given, rest = parser().parse_known_args(argv)
    config = recorder.read_traceable(given.model, rest, f"python -m {COMMAND}", world_size)
    given.save_format = formats.chosen(given.save_format, "--save", given=bool(given.save))
    if given.save:
        new_recording(Path(given.save), "--save", overwrite=given.overwrite)
    return vars(given) | recorder.to_json(config)


def new_recording(folder: Path, option: str, *, overwrite: bool) -> None:
    """Make the folder of a recording in any format, on one rank (`recorder.make_folder`)."""
    recorder.make_folder(folder, option, formats.WRITTEN.values(), overwrite=overwrite)


def main(world: Communicator, argv: Sequence[str] | None = None) -> int:
    """Trace and compare; rank 0 prints and writes. Returns the exit status. Collective over ``world``."""
    surroundings = environment(COMMAND, argv)  # before measuring: the load average is that of other programs
    return int(run(world, surroundings, on_rank_zero(world, lambda: read(argv, world.size)), publish))


def run(world: Communicator, surroundings: dict[str, Any], options: dict[str, Any], put: Callable[..., None]) -> bool:
    """Trace and compare. Returns whether a formula and the trace differ. Collective over ``world``.

    options: as `read` returns them. put: writes the tables and the numbers, on rank 0: `publish`, or `write`.
    """
    config = recorder.from_json(options)
    with watched(config, world) as comm:
        data = world.size // derived.replica_size(config)
        config = replace(config, ddp_bucket_size=derived.bucket_size(config.ddp_bucket_size, comm.device, data))
        options |= recorder.to_json(config)  # the formulas need the size that the trainer's device decides on
        trainer = recorder.open_trainer(config, comm)
        total = options["warmup"] + options["steps"]
        with progress(world, total, "steps") as bar:
            traced = trace_steps(trainer, options["warmup"], options["steps"], bar.update)
        shown = on_rank_zero(world, lambda: median_step(traced.steps[0]))
        if options["save"]:
            about = (traced.recordings[shown], traced.bounds[shown])
            formats.save(world, options["save_format"] or formats.DEFAULT, Path(options["save"]), *about)
        trainer.close()
    different: bool = on_rank_zero(world, lambda: conclude(surroundings, options, traced, shown, put))
    return different


def median_step(steps: Sequence[TracedStep]) -> int:
    """The number of the step with the (lower) median time."""
    middle = statistics.median_low([step.seconds for step in steps])
    return next(number for number, step in enumerate(steps) if step.seconds == middle)


def conclude(
    surroundings: dict[str, Any], options: dict[str, Any], traced: TracedSteps, shown: int, put: Callable[..., None]
) -> bool:
    """Put out the tables, and write the files. Returns whether a formula and the trace differ."""
    config, ranks = recorder.from_json(options), traced.steps
    rows = step_tables.collective_rows(ranks)
    phases, sums = step_tables.phase_rows(ranks), step_tables.summary(ranks)
    stages = stage_rows(config, ranks)
    compared = compare(config, ranks)
    wrong = [(rank, number) for rank, number, found in compared if not all(row["equal"] for row in found)]
    title = describe(config, len(ranks))
    if wrong:
        first = "the first on rank {}, step {}".format(*wrong[0])
        verdict = f"**{len(wrong)} of {len(compared)} tables, one a rank and step, differ**: {first} (shown)"
    else:
        verdict = f"equal on all {len(ranks)} ranks in all {options['steps']} steps (rank 0's are shown)"
    clocks = f"the clocks of two ranks, and so the skew, are known within +-{1e6 * traced.uncertainty:.1f} us"
    if traced.uncertainty == 0:
        clocks = "all ranks read one clock"
    table_of = next(found for rank, number, found in compared if not wrong or (rank, number) == wrong[0])
    lines = [
        f"- {title}",
        f"- medians of {options['steps']} steps after {options['warmup']}; {clocks}",
        *step_tables.summary_lines(sums), "", *step_tables.phase_table(phases),
        *(["", "## Stages", "", *stage_table(stages)] if stages else []),
        "", "## By group", "", *(step_tables.group_table(rows) if rows else ["One rank communicates nothing."]),
        *(["", "## By part of the step", "", *step_tables.table(rows)] if rows else []),
        "", f"## Formulas: {verdict}", "", *step_tables.volume_table(table_of), "", volumes.SOURCES,
    ]  # fmt: skip
    result = surroundings | {
        "format": FORMAT, "kind": "step", "ranks": len(ranks), **recorder.to_json(config),
        "clock_uncertainty": traced.uncertainty, "median_step": shown, "seconds": sums, "phases": phases,
        "stages": stages, "parts": rows, "formulas_hold": not wrong, "formulas": table_of,
    }  # fmt: skip
    text = "\n".join([*heading("Traced training step", surroundings), *lines, ""])
    put(text, result, output=options["output"], json_file=options["json"])
    steps = [of_rank[shown] for of_rank in ranks]
    if options["timeline"]:
        timeline.write_picture(Path(options["timeline"]), steps, title)
    if options["chrome"]:
        timeline.write_chrome(Path(options["chrome"]), steps)
    return bool(wrong)


def describe(config: TracedConfig, ranks: int) -> str:
    """The model, and how it is spread over the ranks, in one line."""
    recompute = config.recompute_granularity
    split = {
        "tensor": config.tensor_model_parallel_size, "data": ranks // derived.replica_size(config),
        "context": config.context_parallel_size, "pipeline": config.pipeline_model_parallel_size,
    }  # fmt: skip
    bert = config if isinstance(config, BERTSettings) else None
    options = {
        "post-LN": bert is not None and bert.norm_placement == "post",
        "masked tokens alone": bert is not None and bert.bert_no_binary_head,
        "sequence-parallel": config.sequence_parallel,
        f"recompute {recompute}": recompute not in (None, "none"),
        f"attention by {derived.context_method(config)}": config.context_parallel_size > 1,
        f"{derived.chunks(config)} stretches of layers a stage": derived.chunks(config) > 1,
        "distributed optimizer": config.use_distributed_optimizer,
    }
    return ", ".join([
        f"{config.kind.upper()} of {config.num_layers} layers", f"hidden {config.hidden_size}",
        f"sequence {config.seq_length}",
        f"micro-batch {config.micro_batch_size}", "bf16" if config.bf16 else "fp16" if config.fp16 else "fp32",
        " x ".join(f"{axis} {size}" for axis, size in split.items() if axis in ("tensor", "data") or size > 1),
        *(name for name, chosen in options.items() if chosen),
    ])  # fmt: skip


def compare(config: TracedConfig, ranks: Sequence[Sequence[TracedStep]]) -> list[tuple[int, int, list[dict[str, Any]]]]:
    """For every rank and step: (rank, step, rows that hold the formula beside the trace)."""
    found = []
    for rank, steps in enumerate(ranks):
        for number, step in enumerate(steps):
            formulas = volumes.expected(config, len(ranks), rank, updated=not step.skipped)
            events = [(one.part, one.phase, one.group, one.operation, one.bytes) for one in step.events]
            found.append((rank, number, volumes.compared(formulas, events)))
    return found


if __name__ == "__main__":
    run_on_ranks(COMMAND, main, parser)
