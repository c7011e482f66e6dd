"""The settings of `trainers.finetune`, under Megatron-LM's flag names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from commengine.options.declared import option
from commengine.options.ranges import (
    AtLeastOne,
    Heads,
    Layers,
    Length,
    Natural,
    Positive,
    Share,
    Text,
    ValidRange,
    Vocabulary,
    Width,
    between,
)
from trainers.settings.commands import TrainSettings
from trainers.settings.model import LayerOptions
from trainers.settings.steps import Rate

#: of schools, in RACE; and of SQuAD's files
LEVELS, VERSIONS = ("middle", "high"), ("1.1", "2.0")
#: the values of ``--task``
TASKS = ("mnli", "qqp", "squad", "race")
#: the settings that the model has from its pretraining
SHAPE = (
    "num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "max_position_embeddings", "vocab_size",
    "make_vocab_size_divisible_by", "norm_placement", "gelu", "norm_epsilon",
)  # fmt: skip
FINITE = ValidRange(math.isfinite, "must be a finite number")
#: tokens of an answer, of a question and the like
_Count = Annotated[int, between(1, 10**5)]


@dataclass(frozen=True)
class FinetuneSettings(LayerOptions, TrainSettings):
    """The settings of `trainers.finetune`. A run keeps its best checkpoint besides the newest ones."""

    kind: ClassVar[str] = "finetune"
    keeps_best: ClassVar[bool] = True

    task: str | None = option(None, "what the model learns", choices=TASKS, fixed=True)
    data: Text | None = option(
        None,
        "folder of the task's files under their original names: train.tsv, dev_matched.tsv, ... (mnli), train.tsv, "
        "dev.tsv, ... (qqp), train-v1.1.json, dev-v1.1.json or those of v2.0 (squad), train/middle/*.txt, ... (race)",
    )  # fmt: skip
    load: Text | None = option(
        None,
        "a run of pretrain_bert, to start from its newest checkpoint; or a run of this command, to go on with it or to "
        "--predict with its best checkpoint; or an iter_* folder of either; or hf:FOLDER, a BERT of Hugging Face",
    )  # fmt: skip
    pretrained_checkpoint: Text | None = option(
        None, "a run of pretrain_bert, or hf:FOLDER, to start from, where --load is the folder of --save"
    )
    preset: str | None = option(
        None, "a model of the paper with its recipe for the task (Table 6); other flags and --config win. list prints "
        "the table",
    )  # fmt: skip
    epochs: Annotated[int, between(1, 10**4)] = option(3, "times that the training data is read, in whole steps")
    train_iters: Natural = option(0, "steps of the run (0: those of --epochs)")
    eval_interval: Natural = option(0, "steps between evaluations on the dev data (0: an epoch)")
    eval_iters: Natural = option(1, "0 turns evaluation off; otherwise it reads all dev data")
    save_interval: AtLeastOne | None = option(None, "steps between checkpoints (default: those of an evaluation)")
    keep_last: AtLeastOne | None = option(
        None, "newest checkpoints that stay besides the best one (default 1; --keep-every 1 keeps all)"
    )
    lr: Rate = option(2e-5, "highest learning rate")
    min_lr: Rate | None = option(0.0, "learning rate at the end of the decay")
    lr_decay_style: str = option("linear", "how lr decays to min-lr", choices=("constant", "linear", "cosine"))
    lr_warmup_fraction: Share = option(0.06, "share of the steps over which lr rises from 0; --lr-warmup-iters wins")
    lr_warmup_iters: Natural | None = option(
        None, "steps over which lr rises from 0 (default: those of --lr-warmup-fraction)"
    )
    # samples
    seq_length: Length | None = option(
        None, "tokens of a sample (default 512, squad 384, at most the model's positions)", fixed=True
    )
    tokenizer_model: str | None = option(None, "a tokenizer.json, or BERT's vocab.txt (default: the pretrained run's)")
    skip_damaged_rows: bool = option(
        False, "mnli, qqp: leave out rows without all columns, texts or a valid label, and say which"
    )
    race_level: str = option(
        "both", "race: the questions of middle schools, high schools, or both", choices=("both", *LEVELS), fixed=True
    )
    max_qa_length: _Count = option(128, "race: most tokens of a question with an option", fixed=True)
    squad_version: str | None = option(
        None, "squad: version of the files (default: that of which --data has files)", choices=VERSIONS, fixed=True
    )
    max_query_length: _Count = option(64, "squad: most tokens of a question", fixed=True)
    doc_stride: _Count = option(128, "squad: tokens from one window of a text to the next one", fixed=True)
    max_answer_length: _Count = option(30, "squad: most tokens of an answer")
    n_best_size: _Count = option(20, "squad: answers to a question that are kept")
    null_score_diff_threshold: Annotated[float, FINITE] | None = option(
        None, "squad 2.0: no answer where its score exceeds the best answer's by more than this (default: the best "
        "threshold on the dev data)",
    )  # fmt: skip
    # several runs, and what is done with them
    seeds: Annotated[int, between(1, 1000)] = option(
        1, "runs with --seed, --seed + 1, ..., of which the median is reported"
    )
    predict: str | None = option(
        None, "write predictions in the task's submission format, from the best checkpoint", choices=("dev", "test")
    )
    ensemble: str | Sequence[str] | None = option(
        None, "runs of this command whose probabilities are averaged", words=True
    )
    output: Text | None = option(
        None, "folder for predictions (default predictions_dev or predictions_test in the run's folder)"
    )
    # the model: from the pretrained run
    num_layers: Layers | None = option(None, "must be the pretrained model's, as the next nine", fixed=True)
    hidden_size: Width | None = option(None, "width of the residual stream", fixed=True)
    num_attention_heads: Heads | None = option(None, "attention heads", fixed=True)
    ffn_hidden_size: Width | None = option(None, "width of the feed-forward block", fixed=True)
    max_position_embeddings: Length | None = option(None, "positions that the model knows", fixed=True)
    vocab_size: Vocabulary | None = option(None, "tokens of the vocabulary", fixed=True)
    make_vocab_size_divisible_by: Vocabulary | None = option(
        None, "the vocabulary is padded to a multiple of this", fixed=True
    )
    norm_placement: str | None = option(None, "place of the layer norms", choices=("pre", "post"), fixed=True)
    gelu: str | None = option(None, "GELU by the error function or not", choices=("erf", "tanh"), fixed=True)
    # Not fixed: checkpoints of older versions lack it, and `FinetuneSettings.of_model` compares it.
    norm_epsilon: Positive | None = option(None, "added to the variance in all norms")
