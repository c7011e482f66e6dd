"""FinetuneConfig: the settings of `trainers.finetune`, from its options, the model's run, and the task's files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

from commengine import UsageError
from commengine.options.declared import given, require, words_of
from tplayers import BERTConfig, TransformerConfig
from trainers.checkpoints import checkpoint, run_folder
from trainers.config import of_other_program
from trainers.tasks.transformer import require_split

from . import source
from .flags import SHAPE, TASKS, FinetuneFlags
from .formats import version_in

#: settings of a run that another use of its model does not have to repeat
_OF_THE_RUN = ("seed", "global_batch_size")


@dataclass(frozen=True)
class FinetuneConfig(FinetuneFlags):
    """The settings of `trainers.finetune`. A field is the flag of the same name, with dashes."""

    @property
    def trains(self) -> bool:
        """Whether the command trains, and does not only use what other runs have trained."""
        return self.save is not None or (self.predict is None and self.ensemble is None)

    @property
    def newest_kept(self) -> int | None:
        """How many of the newest checkpoints stay besides the best one."""
        return 1 if self.keep_last is None and self.save is not None else self.keep_last

    @property
    def members(self) -> list[str]:
        """The runs of ``--ensemble``."""
        return words_of(self.ensemble)

    def validate(self, ranks: int) -> None:
        """Raise UsageError, naming the option and what is valid, unless this run is possible on ``ranks`` ranks."""
        super().validate(ranks)
        require(self.data is not None, "--data: needed: the folder with the files of the task")
        folder = Path(self.data or "")
        require(folder.is_dir(), f"--data {folder}: there is no such folder")
        members = self.members
        if members:
            require(len(members) > 1, f"{given(self, 'ensemble')}: needs at least two runs")
            for name in ("load", "save", "pretrained_checkpoint"):
                require(getattr(self, name) is None, f"--ensemble: excludes --{name.replace('_', '-')}; leave it out")
            require(
                self.predict is None or self.output is not None, "--ensemble: needs --output DIR for its predictions"
            )
        elif self.load is None and self.pretrained_checkpoint is None:
            raise UsageError("--load: needed: a run of pretrain_bert to start from, or a run of finetune to go on with")
        else:
            require(self.task is not None or not self.trains, f"--task: needed: one of {', '.join(TASKS)}")
        used = self.trains or bool(members) or self.load is not None
        require(used, "--predict: needs --load RUN, a run of finetune, or --save DIR to train one")
        require(self.output is None or self.predict is not None, "--output: needs --predict dev or --predict test")
        several = "--seeds: needs --save DIR, for a folder of each run"
        require(self.seeds == 1 or self.save is not None, several)

    def completed(self, ranks: int) -> Self:
        """These settings with those of the model, the length of samples and the version of files. It reads files.

        A run of ``--load`` that pretrain_bert has made becomes ``--pretrained-checkpoint``. Raises UsageError, naming
        the option.
        """
        verify = self.verify_checkpoints
        if not self.trains:
            option, run = ("--ensemble", self.members[0]) if self.members else ("--load", self.load or "")
            best, words = source.best_checkpoint(run, option), f"{option} {run}"
            config = self.of_run(source.fine_tuned(best, words, verify=verify), words)
        elif (found := run_folder.checkpoint_to_load(self)) is None and not of_other_program(self.load):
            config = self.of_model(*source.pretrained(self.pretrained_checkpoint, verify=verify))
        elif found is not None and source.is_fine_tuned(checkpoint.saved_state(found, verify=verify).settings):
            words = given(self, "load")
            several = "with --seeds, --load is the folder of all of them (that of --save), and --pretrained-checkpoint"
            require(self.seeds == 1, f"{words}: is one run; {several} the run of pretrain_bert that they start from")
            config = self.of_run(source.fine_tuned(found, words, verify=verify), words)
        else:
            both = "--load and --pretrained-checkpoint: both name a model to start from; leave one of them out"
            require(self.pretrained_checkpoint is None, both)
            config = self.of_model(*source.pretrained(self.load, verify=verify))
            config = replace(config, load=None, pretrained_checkpoint=self.load)
        config = config.opened()
        config.shape(ranks)
        return config

    def of_seed(self, number: int) -> Self:
        """The settings of run ``number``, from 0, of several: the next seed, and a folder of its own in ``--save``."""
        assert self.save is not None
        name = f"seed_{self.seed + number}"
        folder = str(Path(self.save) / name)
        board = None if self.tensorboard_dir is None else str(Path(self.tensorboard_dir) / name)
        same = self.load is not None and Path(self.load).resolve() == Path(self.save).resolve()
        return replace(
            self, seed=self.seed + number, seeds=1, save=folder, load=folder if same else self.load,
            tensorboard_dir=board,
        )  # fmt: skip

    def of_model(self, saved: Mapping[str, Any], source: str) -> Self:
        """These settings with the shape, the tokenizer and the positions of a model.

        saved: the settings of the run that the model is from. source: the option that names it, for errors. Raises
        UsageError where an option says something else.
        """
        found: dict[str, Any] = {}
        for name in SHAPE:
            mine, theirs = getattr(self, name), _default_of(name, saved)
            if mine is not None and mine != theirs:
                raise UsageError(f"{given(self, name)}: the model of {source} has {theirs}")
            found[name] = theirs
        if self.tokenizer_model is None:
            found["tokenizer_model"] = saved.get("tokenizer_model")
        return replace(self, **found)

    def of_run(self, saved: Mapping[str, Any], source: str) -> Self:
        """These settings for a model that ``finetune`` has trained, with those that the run has fixed.

        To train on, an option with a default must be given again, as for every training command; to use the model, none
        must, and it has the run's precision; ``--race-level`` then says which questions are read. saved, source: as in
        `of_model`. Raises UsageError where an option that is given says something else.
        """
        config = self.of_model(saved, source)
        found: dict[str, Any] = {}
        for item in fields(self):
            name, mine = item.name, getattr(self, item.name)
            if not item.metadata["fixed"] or name in (*SHAPE, *_OF_THE_RUN) or name not in saved:
                continue
            if name == "race_level" and not self.trains and mine != item.default:
                continue  # the model answers the questions of each level, whichever it was trained on
            if mine not in (item.default, saved[name]):
                raise UsageError(f"{given(self, name)}: the run of {source} has {saved[name]}")
            if not self.trains or item.default is None:
                found[name] = saved[name]
        if not self.trains and not (self.bf16 or self.fp16):
            found |= {name: bool(saved.get(name)) for name in ("bf16", "fp16")}
        return replace(config, **found)

    def opened(self) -> Self:
        """These settings, of which the model is known, with the length of samples and the version of files.

        Raises UsageError where they do not fit the model or the folder.
        """
        assert self.task is not None and self.max_position_embeddings is not None
        require(self.tokenizer_model is not None, "--tokenizer-model: needed, as the pretrained run has no tokenizer")
        positions = self.max_position_embeddings
        length = self.seq_length or min(384 if self.task == "squad" else 512, positions)
        require(length <= positions, f"--seq-length {length}: must not exceed the {positions} positions of the model")
        tensor = self.tensor_model_parallel_size
        if self.sequence_parallel:
            fits = f"--seq-length {length}: with --sequence-parallel it must be a multiple of"
            require(length % tensor == 0, f"{fits} {given(self, 'tensor_model_parallel_size')}")
        version = self.squad_version
        if self.task == "squad":
            there = version_in(Path(self.data or ""))
            require(bool(there), f"--data {self.data}: has no train-v1.1.json, dev-v1.1.json, or one of version 2.0")
            require(
                version is not None or len(there) == 1,
                f"--data {self.data}: has files of versions {' and '.join(there)}; say which with --squad-version",
            )
            version = version or there[0]
            least = self.max_query_length + 4
            words = "must leave room for a text beside [CLS], two [SEP] and"
            require(length >= least, f"--seq-length {length}: {words} {given(self, 'max_query_length')}")
        else:
            require(length >= 5, f"--seq-length {length}: must be at least 5: [CLS], two texts and a [SEP] after each")
        return replace(self, seq_length=length, squad_version=version)

    def scheduled(self, samples: int, replicas: int) -> Self:
        """These settings with the steps that ``samples`` training samples give. An epoch is rounded up to whole steps.

        Raises UsageError if the warm-up does not end before the decay does.
        """
        batch = self.global_batch_size or self.micro_batch_size * replicas
        epoch = -(-samples // batch)
        steps = self.train_iters or self.epochs * epoch
        interval = self.eval_interval or min(epoch, steps)
        warmup = self.lr_warmup_iters
        if warmup is None:
            warmup = int(self.lr_warmup_fraction * steps)
            self.require_warmup(warmup, f"{given(self, 'lr_warmup_fraction')}: is {warmup} of {steps} steps, and they")
        saved: dict[str, Any] = {}
        if self.save is not None:
            saved = {"save_interval": self.save_interval or interval, "keep_last": self.newest_kept}
        return replace(
            self, train_iters=steps, eval_interval=interval, lr_warmup_iters=warmup, global_batch_size=batch, **saved
        )

    def shape(self, ranks: int) -> BERTConfig:
        """The model's shape, all of whose fields are known. Raises UsageError if it does not split over the ranks."""
        assert self.num_layers and self.hidden_size and self.num_attention_heads and self.vocab_size
        assert self.max_position_embeddings and self.make_vocab_size_divisible_by
        known = self.model_fields(BERTConfig)
        found = BERTConfig(**known | {"norm_epsilon": self.norm_epsilon or TransformerConfig.norm_epsilon})
        require_split(found, self, ranks)
        return found


def _default_of(name: str, saved: Mapping[str, Any]) -> Any:
    """The value of a setting of the model; a run leaves out what follows from another setting."""
    if name == "max_position_embeddings":
        return saved.get(name) or saved.get("seq_length")
    if name == "norm_epsilon":  # which older versions did not have
        return saved.get(name) or TransformerConfig.norm_epsilon
    return saved.get(name)
