"""FinetuneConfig: the settings of `trainers.finetune`, under Megatron-LM's flag names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

from commengine import UsageError
from tplayers import BERTConfig
from tplayers.attention import DROPOUT_MASKS
from tplayers.block import NORM_PLACEMENTS
from tplayers.mlp import GELUS
from trainers import presets
from trainers.config import RATE, TrainConfig
from trainers.options import (
    AT_LEAST_ONE,
    FRACTION,
    HEADS,
    LAYERS,
    LENGTH,
    NOT_EMPTY,
    NOT_NEGATIVE,
    VOCABULARY,
    WIDTH,
    as_flags,
    between,
    given,
    option,
    require,
)

from .race import LEVELS
from .squad import VERSIONS, version_in

#: the values of ``--task``
TASKS = ("mnli", "qqp", "squad", "race")
#: the settings that the model has from its pretraining
_SHAPE = (
    "num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "max_position_embeddings", "vocab_size",
    "make_vocab_size_divisible_by", "norm_placement", "gelu",
)  # fmt: skip
#: tokens of a sample by default
_LENGTHS = {"mnli": 512, "qqp": 512, "squad": 384, "race": 512}
#: settings of a run that another use of its model does not have to repeat
_OF_THE_RUN = ("seed", "global_batch_size")
#: tokens of an answer, of a question and the like
_COUNT = between(1, 10**5)


def _of_preset(_: Any, name: str, value: Any) -> Mapping[str, Any]:
    """What ``--preset name`` sets. value: the value of another option, by name."""
    task, version, folder = value("task"), value("squad_version"), value("data")
    if task == "squad" and version is None:
        there = version_in(Path(folder)) if folder else []
        version = there[0] if len(there) == 1 else None
    return presets.finetuning_settings(name, f"squad-{version}" if task == "squad" else task)


@dataclass(frozen=True)
class FinetuneConfig(TrainConfig):
    """The settings of `trainers.finetune`. A field is the flag of the same name, with dashes."""

    task: str | None = option(None, "what the model learns", choices=TASKS, fixed=True)
    data: str | None = option(
        None,
        "folder of the task's files under their original names: train.tsv, dev_matched.tsv, ... (mnli), train.tsv, "
        "dev.tsv, ... (qqp), train-v1.1.json, dev-v1.1.json or those of v2.0 (squad), train/middle/*.txt, ... (race)",
        valid=NOT_EMPTY,
    )
    load: str | None = option(
        None,
        "a run of pretrain_bert, to start from its newest checkpoint; or a run of this command, to go on with it or to "
        "--predict with its best checkpoint; or an iter_* folder of either",
        valid=NOT_EMPTY,
    )
    pretrained_checkpoint: str | None = option(
        None, "a run of pretrain_bert to start from, where --load is the folder of --save", valid=NOT_EMPTY
    )
    preset: str | None = option(
        None, "a model of the paper with its recipe for the task (Table 6); other flags and --config win. list prints "
        "the table",
        sets=_of_preset,
    )  # fmt: skip
    epochs: int = option(3, "times that the training data is read, in whole steps", valid=between(1, 10**4))
    train_iters: int = option(0, "steps of the run (0: those of --epochs)", valid=NOT_NEGATIVE)
    eval_interval: int = option(0, "steps between evaluations on the dev data (0: an epoch)", valid=NOT_NEGATIVE)
    eval_iters: int = option(1, "0 turns evaluation off; otherwise it reads all dev data", valid=NOT_NEGATIVE)
    save_interval: int | None = option(
        None, "steps between checkpoints (default: those of an evaluation)", valid=AT_LEAST_ONE
    )
    keep_last: int | None = option(
        None, "newest checkpoints that stay besides the best one (default 1; --keep-every 1 keeps all)",
        valid=AT_LEAST_ONE,
    )  # fmt: skip
    lr: float = option(2e-5, "highest learning rate", valid=RATE)
    min_lr: float = option(0.0, "learning rate at the end of the decay", valid=RATE)
    lr_decay_style: str = option("linear", "how lr decays to min-lr", choices=("constant", "linear", "cosine"))
    lr_warmup_fraction: float = option(
        0.06, "share of the steps over which lr rises from 0; --lr-warmup-iters wins", valid=FRACTION
    )
    hidden_dropout: float = option(
        0.1, "dropout on the embedding, after each branch, and on the pooled vector", valid=FRACTION
    )
    attention_dropout: float = option(0.1, "dropout on attention probabilities", valid=FRACTION)
    attention_dropout_mask: str = option("position", "as in pretrain_bert", choices=DROPOUT_MASKS)
    recompute_granularity: str | None = option(
        None, "as in pretrain_bert (default none)", choices=("full", "selective", "none")
    )
    init_method_std: float = option(
        0.02, "standard deviation of the initial weights of the head", valid=(NOT_NEGATIVE, between(0, 1000))
    )
    # samples
    seq_length: int | None = option(
        None, "tokens of a sample (default 512, squad 384, at most the model's positions)", valid=LENGTH, fixed=True
    )
    tokenizer_model: str | None = option(None, "a tokenizer.json, or BERT's vocab.txt (default: the pretrained run's)")
    skip_damaged_rows: bool = option(
        False, "mnli, qqp: leave out rows without all columns, texts or a valid label, and say which"
    )
    race_level: str = option(
        "both", "race: the questions of middle schools, high schools, or both", choices=("both", *LEVELS), fixed=True
    )
    max_qa_length: int = option(128, "race: most tokens of a question with an option", valid=_COUNT, fixed=True)
    squad_version: str | None = option(
        None, "squad: version of the files (default: that of which --data has files)", choices=VERSIONS, fixed=True
    )
    max_query_length: int = option(64, "squad: most tokens of a question", valid=_COUNT, fixed=True)
    doc_stride: int = option(128, "squad: tokens from one window of a text to the next one", valid=_COUNT, fixed=True)
    max_answer_length: int = option(30, "squad: most tokens of an answer", valid=_COUNT)
    n_best_size: int = option(20, "squad: answers to a question that are kept", valid=_COUNT)
    null_score_diff_threshold: float | None = option(
        None, "squad 2.0: no answer where its score exceeds the best answer's by more than this (default: the best "
        "threshold on the dev data)",
    )  # fmt: skip
    # several runs, and what is done with them
    seeds: int = option(1, "runs with --seed, --seed + 1, ..., of which the median is reported", valid=between(1, 1000))
    predict: str | None = option(
        None, "write predictions in the task's submission format, from the best checkpoint", choices=("dev", "test")
    )
    ensemble: str | Sequence[str] | None = option(
        None, "runs of this command whose probabilities are averaged", words=True
    )
    output: str | None = option(
        None, "folder for predictions (default predictions_dev or predictions_test in the run's folder)",
        valid=NOT_EMPTY,
    )  # fmt: skip
    # the model: from the pretrained run
    num_layers: int | None = option(None, "must be the pretrained model's, as the next eight", valid=LAYERS, fixed=True)
    hidden_size: int | None = option(None, "width of the residual stream", valid=WIDTH, fixed=True)
    num_attention_heads: int | None = option(None, "attention heads", valid=HEADS, fixed=True)
    ffn_hidden_size: int | None = option(None, "width of the feed-forward block", valid=WIDTH, fixed=True)
    max_position_embeddings: int | None = option(None, "positions that the model knows", valid=LENGTH, fixed=True)
    vocab_size: int | None = option(None, "tokens of the vocabulary", valid=VOCABULARY, fixed=True)
    make_vocab_size_divisible_by: int | None = option(
        None, "the vocabulary is padded to a multiple of this", valid=VOCABULARY, fixed=True
    )
    norm_placement: str | None = option(None, "place of the layer norms", choices=NORM_PLACEMENTS, fixed=True)
    gelu: str | None = option(None, "GELU by the error function or not", choices=tuple(GELUS), fixed=True)

    @property
    def trains(self) -> bool:
        """Whether the command trains, and does not only use what other runs have trained."""
        return self.save is not None or (self.predict is None and self.ensemble is None)

    @property
    def members(self) -> list[str]:
        """The runs of ``--ensemble``."""
        return [self.ensemble] if isinstance(self.ensemble, str) else list(self.ensemble or [])

    def validate(self, ranks: int) -> None:
        """Raise UsageError, naming the option and what is valid, unless this run is possible on ``ranks`` ranks."""
        if self.preset is not None:
            presets.require_ranks(self.preset, ranks, self.tensor_model_parallel_size)
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
        require(self.output is None or self.predict is not None, "--output: needs --predict dev or --predict test")
        several = "--seeds: needs --save DIR, for a folder of each run"
        require(self.seeds == 1 or self.save is not None, several)
        limits = self.attention_dropout_mask == "position" or self.attention_dropout == 0 or not self.compile
        require(limits, "--attention-dropout-mask fused: excludes --compile, as in pretrain_bert")

    def of_model(self, saved: Mapping[str, Any], source: str) -> Self:
        """These settings with the shape, the tokenizer and the positions of a model.

        saved: the settings of the run that the model is from. source: the option that names it, for errors. Raises
        UsageError where an option says something else.
        """
        found: dict[str, Any] = {}
        for name in _SHAPE:
            mine, theirs = getattr(self, name), _default_of(name, saved)
            if mine is not None and mine != theirs:
                own = given(self, name)
                said = f"{own}: the model of {source} has {theirs}"
                raise UsageError(f"{said}{presets.origin(self.preset, f'{own}:')}")
            found[name] = theirs
        if self.tokenizer_model is None:
            found["tokenizer_model"] = saved.get("tokenizer_model")
        return replace(self, **found)

    def of_run(self, saved: Mapping[str, Any], source: str) -> Self:
        """These settings for a model that ``finetune`` has trained: all that the run has fixed, and its precision.

        saved, source: as in `of_model`. Raises UsageError where an option without a default says something else.
        """
        config = self.of_model(saved, source)
        found: dict[str, Any] = {}
        for item in fields(self):
            name, mine = item.name, getattr(self, item.name)
            if item.metadata["fixed"] and name not in _SHAPE and name in saved:
                if item.default is None and name not in _OF_THE_RUN and mine not in (None, saved[name]):
                    raise UsageError(f"{given(self, name)}: the run of {source} has {saved[name]}")
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
        length = self.seq_length or min(_LENGTHS[self.task], positions)
        require(length <= positions, f"--seq-length {length}: must not exceed the {positions} positions of the model")
        tensor = self.tensor_model_parallel_size
        if self.sequence_parallel:
            fits = f"--seq-length {length}: with --sequence-parallel it must be a multiple of"
            require(length % tensor == 0, f"{fits} {given(self, 'tensor_model_parallel_size')}")
        version = self.squad_version
        if self.task == "squad":
            least = self.max_query_length + 4
            words = "must leave room for a text beside [CLS], two [SEP] and"
            require(length >= least, f"--seq-length {length}: {words} {given(self, 'max_query_length')}")
            there = version_in(Path(self.data or ""))
            require(bool(there), f"--data {self.data}: has no train-v1.1.json, dev-v1.1.json, or one of version 2.0")
            require(
                version is not None or len(there) == 1,
                f"--data {self.data}: has files of versions {' and '.join(there)}; say which with --squad-version",
            )
            version = version or there[0]
        else:
            require(length >= 5, f"--seq-length {length}: must be at least 5: [CLS], two texts and a [SEP] after each")
        return replace(self, seq_length=length, squad_version=version)

    def scheduled(self, samples: int, replicas: int) -> Self:
        """These settings with the steps that ``samples`` training samples give. An epoch is rounded up to whole steps.

        Raises UsageError as `validate` does.
        """
        batch = self.global_batch_size or self.micro_batch_size * replicas
        epoch = -(-samples // batch)
        steps = self.train_iters or self.epochs * epoch
        interval = self.eval_interval or min(epoch, steps)
        warmup = self.lr_warmup_iters or int(self.lr_warmup_fraction * steps)
        saved: dict[str, Any] = {}
        if self.save is not None:
            saved = {"save_interval": self.save_interval or interval, "keep_last": self.keep_last or 1}
        return replace(
            self, train_iters=steps, eval_interval=interval, lr_warmup_iters=warmup, global_batch_size=batch, **saved
        )

    def shape(self, ranks: int) -> BERTConfig:
        """The model's shape, all of whose fields are known. Raises UsageError if it does not split over the ranks."""
        assert self.num_layers and self.hidden_size and self.num_attention_heads and self.vocab_size
        assert self.max_position_embeddings and self.make_vocab_size_divisible_by
        recompute = None if self.recompute_granularity == "none" else self.recompute_granularity
        found = BERTConfig(
            self.num_layers, self.hidden_size, self.num_attention_heads, self.vocab_size,
            self.max_position_embeddings, ffn_hidden_size=self.ffn_hidden_size, hidden_dropout=self.hidden_dropout,
            attention_dropout=self.attention_dropout, init_method_std=self.init_method_std,
            make_vocab_size_divisible_by=self.make_vocab_size_divisible_by, sequence_parallel=self.sequence_parallel,
            recompute=recompute, attention_dropout_mask=self.attention_dropout_mask,  # type: ignore[arg-type]
            norm_placement=self.norm_placement, gelu=self.gelu,  # type: ignore[arg-type]
        )  # fmt: skip
        try:
            found.require_parallel(self.tensor_model_parallel_size, ranks=ranks)
        except ValueError as error:
            words = str(error).replace("tensor-model-parallel size", "--tensor-model-parallel-size")
            words = words.replace("padded_vocab_size=", "the padded vocabulary: ").replace("ranks=", "ranks: ")
            raise UsageError(as_flags(words, type(self))) from error
        return found


def _default_of(name: str, saved: Mapping[str, Any]) -> Any:
    """The value of a setting of the model; a run leaves out what follows from another setting."""
    if name == "max_position_embeddings":
        return saved.get(name) or saved.get("seq_length")
    return saved.get(name)
