"""Fine-tune a BERT: ``mpiexec -n 2 python -m trainers.finetune --task mnli --load RUN --data DIR --save RUN2``.

The tasks are those of the paper's section 5.3: mnli, qqp, squad and race. ``--predict`` writes predictions, ``--seeds``
trains several times, ``--ensemble`` averages what several runs predict.
"""

from __future__ import annotations

import sys

from .run import signals

if __name__ == "__main__":  # before the other imports, which take seconds
    signals.end_on_signals(sys.argv[1:])

    from .finetuning.settings import FinetuneSettings
    from .settings.command import answer_help

    answer_help(FinetuneSettings, "finetune")

from collections.abc import Sequence
from pathlib import Path

from commengine import Communicator, launch
from commengine.options.declared import make_writable
from commengine.rank_zero import on_rank_zero

from .finetuning.completing import COMMAND, of_seed, scheduled, trains
from .finetuning.predict import predict
from .finetuning.settings import FinetuneSettings
from .finetuning.source import seeds_text, summarize
from .finetuning.task import FinetuneTask, read_files
from .run.loop import train
from .run.startup import job_settings, tell, watched
from .run.stopping import TEMPORARY, StopRequests
from .settings import derived


def main(world: Communicator) -> int:
    """One rank of the command, collective over ``world``: the exit status (`trainers.run.loop.train`)."""
    with StopRequests(world) as stopping:
        said = list[str]()
        config = job_settings(world, COMMAND, said.append)
        stopping.configure(config)
        with watched(config, world) as comm:
            if not trains(config):
                for line in said:
                    tell(line)
                predict(config, comm)
                return 0
            status, folder = _train(config, comm, stopping, said)
            if status == 0 and config.predict is not None:
                predict(config, comm, folder)
            return status


def _train(
    config: FinetuneSettings, world: Communicator, stopping: StopRequests, said: Sequence[str]
) -> tuple[int, str | None]:
    """Train with one seed or several. Returns the exit status, and the folder of the run, or of the median one.

    said: at the start of the first run.
    """
    files = read_files(config, world)
    if world.rank == 0:
        unkept = "without --save DIR no checkpoint is kept: the run prints its measures, and its model is lost"
        for line in [*files.task.remarks, *([unkept] if config.save is None else [])]:
            print(line, file=sys.stderr, flush=True)
    config = scheduled(config, len(files.train.samples), world.size // derived.replica_size(config))
    if config.seeds == 1:
        return train(
            config, world, lambda one, comm: FinetuneTask(one, comm, files), stopping, remarks=said
        ), config.save
    folder = Path(config.save or "")
    on_rank_zero(world, lambda: make_writable("--save", folder))
    runs = [of_seed(config, number) for number in range(config.seeds)]
    go_on = f"--load {folder} --pretrained-checkpoint {config.pretrained_checkpoint}"
    for number, one in enumerate(runs, start=1):
        status = train(
            one,
            world,
            lambda one, comm: FinetuneTask(one, comm, files),
            stopping,
            go_on=go_on,
            remarks=said if number == 1 else (),
        )
        if status:
            return status, None
        if stopping.forgot and number < len(runs):
            if world.rank == 0:
                left = f"{number} of {len(runs)} runs are done; go on with {go_on} (exit status {TEMPORARY})"
                print(left, file=sys.stderr, flush=True)
            return TEMPORARY, None

    def report() -> str:
        summary = summarize(folder, [Path(one.save or "") for one in runs], files.task.kept_by)
        print("\n" + seeds_text(summary), flush=True)
        return str(folder / summary["median_run"])

    return 0, on_rank_zero(world, report)


if __name__ == "__main__":
    launch.run(main, device="cpu")
