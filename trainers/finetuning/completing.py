"""What the settings of `trainers.finetune` become: with those of the model's run, the task's files, and a schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from commengine import UsageError
from commengine.options.declared import flag_of, given, require, words_of
from tplayers import BERTConfig, TransformerConfig
from trainers import presets
from trainers.checkpoints import checkpoint, run_folder
from trainers.checkpoints.state_file import kind_of
from trainers.settings import derived
from trainers.settings.command import Command
from trainers.settings.rules import Faults, Rule, first, warmup
from trainers.settings.saving import of_other_program
from trainers.tasks.fitting import require_split
from trainers.tasks.transformer import model_fields

from . import source
from .formats import version_in
from .settings import SHAPE, TASKS, FinetuneSettings

#: settings of a run that another use of its model does not have to repeat
_OF_THE_RUN = ("seed", "global_batch_size")


def trains(config: FinetuneSettings) -> bool:
    """Whether the command trains, and does not only use what other runs have trained."""
    return config.save is not None or (config.predict is None and config.ensemble is None)


def members(config: FinetuneSettings) -> list[str]:
    """The runs of ``--ensemble``."""
    return words_of(config.ensemble)


def implied(value: Callable[[str], Any]) -> Mapping[str, Any]:
    """What ``--preset NAME`` sets. value: the value of another option, by name."""
    if (name := value("preset")) is None:
        return {}
    task, version, folder = value("task"), value("squad_version"), value("data")
    if task == "squad" and version is None:
        there = version_in(Path(folder)) if folder else []
        version = there[0] if len(there) == 1 else None
    return presets.finetuning_settings(name, f"squad-{version}" if task == "squad" else task)


def _faults(s: FinetuneSettings, _: int) -> Faults:
    runs, does_train = members(s), trains(s)
    yield s.data is None, "--data: needed: the folder with the files of the task"
    yield not Path(s.data or "").is_dir(), f"--data {s.data}: there is no such folder"
    if runs:
        yield len(runs) < 2, f"{given(s, 'ensemble')}: needs at least two runs"
        for name in ("load", "save", "pretrained_checkpoint"):
            yield getattr(s, name) is not None, f"--ensemble: excludes {flag_of(name)}; leave it out"
        yield s.predict is not None and s.output is None, "--ensemble: needs --output DIR for its predictions"
    elif s.load is None and s.pretrained_checkpoint is None:
        yield True, "--load: needed: a run of pretrain_bert to start from, or a run of finetune to go on with"
    else:
        yield s.task is None and does_train, f"--task: needed: one of {', '.join(TASKS)}"
    yield (
        not (does_train or runs or s.load is not None),
        "--predict: needs --load RUN, a run of finetune, or --save DIR to train one",
    )
    yield s.output is not None and s.predict is None, "--output: needs --predict dev or --predict test"
    yield s.seeds > 1 and s.save is None, "--seeds: needs --save DIR, for a folder of each run"


def completed(config: FinetuneSettings, ranks: int) -> FinetuneSettings:
    """The settings with those of the model, the length of samples and the version of files. It reads files.

    A run of ``--load`` that pretrain_bert has made becomes ``--pretrained-checkpoint``. Raises UsageError, naming the
    option.
    """
    verify = config.verify_checkpoints
    if not trains(config):
        option, run = ("--ensemble", members(config)[0]) if members(config) else ("--load", config.load or "")
        best, words = source.best_checkpoint(run, option), f"{option} {run}"
        config = of_run(config, source.fine_tuned(best, words, verify=verify), words)
    elif (found := run_folder.checkpoint_to_load(config)) is None and not of_other_program(config.load):
        config = of_model(config, *source.pretrained(config.pretrained_checkpoint, verify=verify))
    elif found is not None and kind_of(checkpoint.saved_state(found, verify=verify)) == "finetune":
        words = given(config, "load")
        several = "with --seeds, --load is the folder of all of them (that of --save), and --pretrained-checkpoint"
        require(config.seeds == 1, f"{words}: is one run; {several} the run of pretrain_bert that they start from")
        config = of_run(config, source.fine_tuned(found, words, verify=verify), words)
    else:
        both = "--load and --pretrained-checkpoint: both name a model to start from; leave one of them out"
        require(config.pretrained_checkpoint is None, both)
        config = of_model(config, *source.pretrained(config.load, verify=verify))
        config = replace(config, load=None, pretrained_checkpoint=config.load)
    config = opened(config)
    shape(config, ranks)
    return config


def of_seed(config: FinetuneSettings, number: int) -> FinetuneSettings:
    """The settings of run ``number``, from 0, of several: the next seed, and a folder of its own in ``--save``."""
    assert config.save is not None
    name = f"seed_{config.seed + number}"
    folder = str(Path(config.save) / name)
    board = None if config.tensorboard_dir is None else str(Path(config.tensorboard_dir) / name)
    same = config.load is not None and Path(config.load).resolve() == Path(config.save).resolve()
    return replace(
        config, seed=config.seed + number, seeds=1, save=folder, load=folder if same else config.load,
        tensorboard_dir=board,
    )  # fmt: skip


def of_model(config: FinetuneSettings, saved: Mapping[str, Any], source: str) -> FinetuneSettings:
    """These settings with the shape, the tokenizer and the positions of a model.

    saved: the settings of the run that the model is from. source: the option that names it, for errors. Raises
    UsageError where an option says something else.
    """
    found: dict[str, Any] = {}
    for name in SHAPE:
        mine, theirs = getattr(config, name), _default_of(name, saved)
        if mine is not None and mine != theirs:
            raise UsageError(f"{given(config, name)}: the model of {source} has {theirs}")
        found[name] = theirs
    if config.tokenizer_model is None:
        found["tokenizer_model"] = saved.get("tokenizer_model")
    return replace(config, **found)


def of_run(config: FinetuneSettings, saved: Mapping[str, Any], source: str) -> FinetuneSettings:
    """These settings for a model that ``finetune`` has trained, with those that the run has fixed.

    To train on, an option with a default must be given again, as for every training command; to use the model, none
    must, and it has the run's precision; ``--race-level`` then says which questions are read. saved, source: as in
    `of_model`. Raises UsageError where an option that is given says something else.
    """
    config = of_model(config, saved, source)
    found: dict[str, Any] = {}
    for item in fields(config):
        name, mine = item.name, getattr(config, item.name)
        if not item.metadata["fixed"] or name in (*SHAPE, *_OF_THE_RUN) or name not in saved:
            continue
        if name == "race_level" and not trains(config) and mine != item.default:
            continue  # the model answers the questions of each level, whichever it was trained on
        if mine not in (item.default, saved[name]):
            raise UsageError(f"{given(config, name)}: the run of {source} has {saved[name]}")
        if not trains(config) or item.default is None:
            found[name] = saved[name]
    if not trains(config) and not (config.bf16 or config.fp16):
        found |= {name: bool(saved.get(name)) for name in ("bf16", "fp16")}
    return replace(config, **found)


def opened(config: FinetuneSettings) -> FinetuneSettings:
    """These settings, of which the model is known, with the length of samples and the version of files.

    Raises UsageError where they do not fit the model or the folder.
    """
    assert config.task is not None and config.max_position_embeddings is not None
    require(config.tokenizer_model is not None, "--tokenizer-model: needed, as the pretrained run has no tokenizer")
    positions = config.max_position_embeddings
    length = config.seq_length or min(384 if config.task == "squad" else 512, positions)
    require(length <= positions, f"--seq-length {length}: must not exceed the {positions} positions of the model")
    tensor = config.tensor_model_parallel_size
    if config.sequence_parallel:
        fits = f"--seq-length {length}: with --sequence-parallel it must be a multiple of"
        require(length % tensor == 0, f"{fits} {given(config, 'tensor_model_parallel_size')}")
    version = config.squad_version
    if config.task == "squad":
        there = version_in(Path(config.data or ""))
        require(bool(there), f"--data {config.data}: has no train-v1.1.json, dev-v1.1.json, or one of version 2.0")
        require(
            version is not None or len(there) == 1,
            f"--data {config.data}: has files of versions {' and '.join(there)}; say which with --squad-version",
        )
        version = version or there[0]
        least = config.max_query_length + 4
        words = "must leave room for a text beside [CLS], two [SEP] and"
        require(length >= least, f"--seq-length {length}: {words} {given(config, 'max_query_length')}")
    else:
        require(length >= 5, f"--seq-length {length}: must be at least 5: [CLS], two texts and a [SEP] after each")
    return replace(config, seq_length=length, squad_version=version)


def scheduled(config: FinetuneSettings, samples: int, replicas: int) -> FinetuneSettings:
    """These settings with the steps that ``samples`` training samples give. An epoch is rounded up to whole steps.

    Raises UsageError if the warm-up does not end before the decay does.
    """
    batch = derived.batch_size(config, replicas)
    epoch = -(-samples // batch)
    steps = config.train_iters or config.epochs * epoch
    interval = config.eval_interval or min(epoch, steps)
    rising = config.lr_warmup_iters
    if rising is None:
        rising = int(config.lr_warmup_fraction * steps)
        words = f"{given(config, 'lr_warmup_fraction')}: is {rising} of {steps} steps, and they"
        late, fault = warmup(config, rising, words)
        require(not late, fault)
    saved: dict[str, Any] = {}
    if config.save is not None:
        saved = {"save_interval": config.save_interval or interval, "keep_last": derived.newest_kept(config)}
    return replace(
        config, train_iters=steps, eval_interval=interval, lr_warmup_iters=rising, global_batch_size=batch, **saved
    )


def shape(config: FinetuneSettings, ranks: int) -> BERTConfig:
    """The model's shape, all of whose fields are known. Raises UsageError if it does not split over the ranks."""
    assert config.num_layers and config.hidden_size and config.num_attention_heads and config.vocab_size
    assert config.max_position_embeddings and config.make_vocab_size_divisible_by
    known = model_fields(config, BERTConfig)
    found = BERTConfig(**known | {"norm_epsilon": config.norm_epsilon or TransformerConfig.norm_epsilon})
    require_split(found, config, ranks)
    return found


def _default_of(name: str, saved: Mapping[str, Any]) -> Any:
    """The value of a setting of the model; a run leaves out what follows from another setting."""
    if name == "max_position_embeddings":
        return saved.get(name) or saved.get("seq_length")
    if name == "norm_epsilon":  # which older versions did not have
        return saved.get(name) or TransformerConfig.norm_epsilon
    return saved.get(name)


COMMAND = Command(
    "finetune", FinetuneSettings, megatron="finetune", rules=[Rule("task seeds ensemble", first(_faults))],
    implied=implied, complete=completed,
)  # fmt: skip
