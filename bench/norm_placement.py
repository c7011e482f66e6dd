"""Figure 7 of the paper at a small size: BERT with its norms before and after the sums, at growing depth.

    mpiexec -n 2 python -m bench.norm_placement --data-path PREFIX_text_sentence --minutes 20 --save runs/figure7

The data set is one that pretrain_bert can read. For every depth two BERTs that differ in --norm-placement alone start
from the same weights and see the same samples: pre-LN (Figure 7 b) and post-LN (Figure 7 a, the first BERT's). All runs
take turns, --slice steps at a time. After --minutes, or when every run has --steps steps, the command writes the losses
to SAVE/losses.json, the picture to SAVE/losses.png, and prints a table; "largest gradient" is the largest norm of a
gradient before it is clipped. The same command line continues where it stopped, with the same losses as without the
stop.

All other options are pretrain_bert's; those of evaluation and logging have no effect. Without --config or --preset the
model is small: hidden size 64, 4 heads, sequence 64, batch 32, fp32, no dropout, a rate of 1e-3 after 50 steps of
warm-up.
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from bench.command.files import add_files, check_picture, check_writable
from bench.command.machine import environment, heading
from bench.command.parser import TrainerCommandParser, new_trainer_parser
from bench.command.start import progress, run_on_ranks
from bench.command.values import flag
from commengine import Communicator, UsageError
from commengine.rank_zero import on_every_rank, on_rank_zero
from trainers.checkpoints import run_state
from trainers.data.corpus import Corpus
from trainers.data.sentence_samples import open_masked_corpus
from trainers.files.reading import read_json
from trainers.options import COUNT, LAYERS, SECONDS, between, make_writable
from trainers.run.startup import read_config, watched
from trainers.tasks.bert import BERTTrainConfig, bert_trainer
from trainers.training.trainer import Trainer

COMMAND = "bench.norm_placement"
PLACEMENTS = ("pre", "post")
#: pretrain_bert's options without --config and --preset: a model that trains in minutes on two cores
SMALL = (
    "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "64", "--global-batch-size", "32",
    "--micro-batch-size", "16", "--hidden-dropout", "0", "--attention-dropout", "0", "--lr", "1e-3", "--min-lr", "1e-4",
    "--lr-warmup-iters", "50", "--make-vocab-size-divisible-by", "128",
)  # fmt: skip
#: settings that may differ when a study is continued: paths, and those that change no loss but for the order of sums
FREE = (
    "save", "load", "data_path", "tokenizer_model", "vocab_file", "micro_batch_size", "device",
    "distributed_timeout_minutes",
)  # fmt: skip
SAVE_SECONDS = 300.0  # between checkpoints of a study
WINDOW = 20  # steps of which the picture and the table show the mean


@dataclass
class DeepRun:
    """One BERT: its depth, its norms, the loss and the gradient's norm of each step so far.

    ended: the message of the error that ended it, such as a loss that is not finite; "" while it trains.
    """

    layers: int
    placement: str
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    ended: str = ""

    @property
    def name(self) -> str:
        """The run's folder in --save."""
        return f"{self.layers}-{self.placement}"

    def last(self) -> float:
        """The mean of the last WINDOW losses; NaN before the first step."""
        return statistics.fmean(self.losses[-WINDOW:]) if self.losses else math.nan


def parser() -> TrainerCommandParser:
    """The options that are not pretrain_bert's."""
    options = new_trainer_parser(COMMAND, __doc__)
    add = options.add_argument
    add(
        "--depths",
        type=int,
        valid=LAYERS,
        nargs="+",
        default=[2, 8, 24],
        metavar="L",
        help="layers of the models (default: 2 8 24)",
    )
    add("--steps", type=int, valid=between(1, 10**9), default=1000, help="steps of each run (default: %(default)s)")
    add("--minutes", type=float, valid=SECONDS, default=20.0, help="stop after so many minutes (default: %(default)s)")
    add(
        "--slice",
        type=int,
        valid=COUNT,
        default=5,
        help="steps of a run before the next one's turn (default: %(default)s)",
    )
    add("--save", metavar="DIR", required=True, help="the folder of the study, which a further call continues")
    add_files(options, json="write every loss, too", plot="draw the picture there, too")
    return options


def read(argv: Sequence[str] | None, ranks: int) -> dict[str, Any]:
    """The options and pretrain_bert's settings, as JSON types. Raises ValueError or UsageError that names the option.

    If --save holds a study, its settings must be the same.
    """
    given, rest = parser().parse_known_args(argv)
    if len(set(given.depths)) < len(given.depths):
        raise ValueError(f"--depths {' '.join(map(str, given.depths))}: must be different numbers")
    check_writable(output=given.output, json=given.json)
    if given.plot:
        check_picture("plot", given.plot)
    for option in ("--num-layers", "--norm-placement", "--train-iters"):
        if any(word.split("=")[0] == option for word in rest):
            raise ValueError(f"{option}: is the study's own; give --depths or --steps")
    small = () if any(word.split("=")[0] in ("--config", "--preset") for word in rest) else SMALL
    own = ("--train-iters", str(given.steps), "--eval-iters", "0")
    config = read_config(BERTTrainConfig, [*small, *rest, *own], f"python -m {COMMAND}", ranks)
    if config.compile:
        raise ValueError("--compile: every depth would be compiled; leave it out")
    make_writable("--save", Path(given.save))
    settings = {name: value for name, value in config.to_json().items() if name not in FREE}
    settings |= {"depths": given.depths, "steps": given.steps}
    older = load(Path(given.save))
    if older is not None:
        changed = [name for name in settings if older["settings"].get(name) != settings[name]]
        if changed:
            was = ", ".join(f"{flag(name)} {older['settings'].get(name)}" for name in changed)
            raise UsageError(f"--save {given.save}: holds a study with other settings ({was}); give another folder")
    runs = older["runs"] if older else [asdict(DeepRun(n, one)) for n in given.depths for one in PLACEMENTS]
    return vars(given) | {"config": config.to_json(), "settings": settings, "runs": runs}


def load(folder: Path) -> dict[str, Any] | None:
    """The study in a folder; None if there is none. Raises ValueError for a file that is not one of this command."""
    path = folder / "losses.json"
    if not path.exists():
        return None
    found = read_json(path)
    if not isinstance(found, dict) or not {"settings", "runs"} <= found.keys():
        raise ValueError(f"--save {folder}: losses.json is not a study of {COMMAND}")
    return found


def main(world: Communicator, argv: Sequence[str] | None = None) -> None:
    """Train, draw and print. Collective over ``world``."""
    surroundings = environment(COMMAND)
    options = on_rank_zero(world, lambda: read(argv, world.size))
    config = BERTTrainConfig(**options["config"])
    runs = [DeepRun(**one) for one in options["runs"]]
    with watched(config, world) as comm:
        corpus = on_every_rank(comm, lambda: open_masked_corpus(config, config.wordpieces(), config.rules()))
        trained = [(run, open_run(run, config, comm, corpus, Path(options["save"]))) for run in runs if not run.ended]
        end = time.monotonic() + 60 * options["minutes"]
        done = False
        while not done:
            train(trained, comm, options, min(end, time.monotonic() + SAVE_SECONDS))
            for run, trainer in trained:
                save(run, trainer)
            study = {"settings": options["settings"], "runs": [asdict(run) for run in runs]}
            # After the checkpoints: a study that is killed before it continues from those of the older file.
            on_rank_zero(comm, partial(write, Path(options["save"]), study))
            done = on_rank_zero(comm, lambda: time.monotonic() >= end) or not left(runs, options["steps"])
        found = surroundings | {"ranks": comm.size} | study
        on_rank_zero(comm, lambda: publish(found, runs, options))
        for _, trainer in trained:
            trainer.close()


def open_run(run: DeepRun, config: BERTTrainConfig, comm: Communicator, corpus: Corpus, folder: Path) -> Trainer:
    """The trainer of a run, at the step where its losses end. Collective over ``comm``."""
    place = str(folder / run.name)
    own = replace(config, num_layers=run.layers, norm_placement=run.placement, save=place, load=place)
    if run.losses:
        own = replace(own, load=str(folder / run.name / f"iter_{len(run.losses):07d}"))
    on_rank_zero(comm, lambda: make_writable("--save", Path(place)))
    trainer = bert_trainer(own, comm, corpus)
    if run.losses:
        run_state.resume(trainer)
    return trainer


def left(runs: Sequence[DeepRun], steps: int) -> list[int]:
    """The number of steps, above 0, that each run still has to do; a run that has ended has none."""
    return [steps - len(run.losses) for run in runs if not run.ended and len(run.losses) < steps]


def train(runs: Sequence[tuple[DeepRun, Trainer]], comm: Communicator, options: dict[str, Any], end: float) -> None:
    """Let the runs take turns until all have their steps, or rank 0's clock is at ``end``. Collective over ``comm``."""
    steps = options["steps"]
    with progress(comm, sum(left([run for run, _ in runs], steps)), "steps") as bar:
        while left([run for run, _ in runs], steps):
            for run, trainer in runs:
                for _ in range(min(options["slice"], steps - len(run.losses))):
                    if not run.ended:
                        one_step(run, trainer)
                        bar.update()
            if on_rank_zero(comm, lambda: time.monotonic() >= end):
                return


def one_step(run: DeepRun, trainer: Trainer) -> None:
    """One step of a run; an error, which every rank has, ends the run: it has diverged. Collective over its world."""
    try:
        step = trainer.step()
    except UsageError as error:
        run.ended = str(error)
        return
    run.losses.append(step.losses["mlm_loss"])
    run.norms.append(step.norm)


def save(run: DeepRun, trainer: Trainer) -> None:
    """Write a checkpoint of the run's last step; the one before it is kept. Collective over the trainer's world."""
    if run.ended or not run.losses:
        return
    assert trainer.config.save is not None
    folder = Path(trainer.config.save)
    if (folder / f"iter_{len(run.losses):07d}" / "state.json").exists():
        return
    run_state.save(trainer)

    def clean() -> None:
        for old in sorted(folder.glob("iter_*"))[:-2]:
            shutil.rmtree(old)

    on_rank_zero(trainer.grid.world, clean)


def write(folder: Path, study: dict[str, Any]) -> None:
    """Write the study's settings and losses, all of them or nothing. On rank 0."""
    (folder / "losses.json.tmp").write_text(json.dumps(study, indent=1), encoding="utf-8")
    (folder / "losses.json.tmp").replace(folder / "losses.json")


def publish(study: dict[str, Any], runs: Sequence[DeepRun], options: dict[str, Any]) -> None:
    """Draw the pictures, print the table, and write the files that were asked for. On rank 0."""
    pictures = [Path(options["save"]) / "losses.png", *([Path(options["plot"])] if options["plot"] else [])]
    for path in pictures:
        draw(path, runs)
    settings = study["settings"]
    lines = [
        f"- {study['ranks']} ranks; BERT of hidden size {settings['hidden_size']}, {settings['num_attention_heads']} "
        f"heads, sequence {settings['seq_length']}, batch {settings['global_batch_size']}, vocabulary "
        f"{settings['vocab_size']}; rate {settings['lr']:g} after {settings['lr_warmup_iters']} steps of warm-up, "
        f"{settings['lr_decay_style']} decay over {settings['steps']} steps; dropout {settings['hidden_dropout']:g}; "
        f"seed {settings['seed']}",
        f"- losses: of masked tokens, in training, in nats; means of {WINDOW} steps",
        "",
        *table(runs),
    ]
    print("\n".join(lines), flush=True)
    behind = left(runs, settings["steps"])
    if behind:
        print(
            f"{settings['steps'] - max(behind)} of {settings['steps']} steps are done: the same command line goes on",
            flush=True,
        )
    if options["output"]:
        title = "Norm placement at growing depth (Figure 7 of the paper)"
        Path(options["output"]).write_text("\n".join([*heading(title, study), *lines, ""]), encoding="utf-8")
    if options["json"]:
        Path(options["json"]).write_text(json.dumps(study, indent=1), encoding="utf-8")


def table(runs: Sequence[DeepRun]) -> list[str]:
    """Markdown: a row for each depth, pre-LN beside post-LN."""
    lines = [
        "| layers | steps | pre-LN: loss | largest gradient | post-LN: loss | largest gradient | post - pre |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for depth in dict.fromkeys(run.layers for run in runs):
        pre, post = (next(r for r in runs if (r.layers, r.placement) == (depth, one)) for one in PLACEMENTS)
        cells = [str(depth), str(min(len(pre.losses), len(post.losses)))]
        for run in (pre, post):
            loss = f"ended at step {len(run.losses) + 1}" if run.ended else f"{run.last():.3f}"
            cells += [loss, f"{max(run.norms):.1f}" if run.norms else "-"]
        known = not (pre.ended or post.ended) and pre.losses and post.losses
        cells.append(f"{post.last() - pre.last():+.3f}" if known else "-")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def smoothed(losses: Sequence[float], window: int = WINDOW) -> list[float]:
    """For each step the mean of its loss and of up to ``window - 1`` losses before it."""
    return [statistics.fmean(losses[max(0, n + 1 - window) : n + 1]) for n in range(len(losses))]


def draw(path: Path, runs: Sequence[DeepRun]) -> None:
    """Draw the losses: one panel for each depth, as the paper's figure has one for each size."""
    from matplotlib.figure import Figure  # here: it takes a second to load

    depths = list(dict.fromkeys(run.layers for run in runs))
    figure = Figure(figsize=(4.2 * len(depths), 3.6), layout="constrained")
    panels = figure.subplots(1, len(depths), sharey=True, squeeze=False)[0]
    names = {"pre": "pre-LN (Figure 7 b)", "post": "post-LN (Figure 7 a)"}
    for axes, depth in zip(panels, depths, strict=True):
        for run in runs:
            if run.layers == depth:
                axes.plot(smoothed(run.losses), label=names[run.placement] + (", diverged" if run.ended else ""))
        axes.set_title(f"{depth} layers")
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), frameon=False)  # below: it covers no line
    panels[0].set_ylabel(f"training loss of masked tokens (mean of {WINDOW})")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    run_on_ranks(COMMAND, main, parser)
