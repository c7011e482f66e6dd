"""The options of `trainers.finetune`, under Megatron-LM's flag names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tplayers.attention.self_attention import DROPOUT_MASKS
from tplayers.block import NORM_PLACEMENTS
from tplayers.mlp import GELUS
from trainers import presets
from trainers.config import RATE, TrainConfig
from trainers.options import (
    ABOVE_ZERO,
    AT_LEAST_ONE,
    FRACTION,
    HEADS,
    LAYERS,
    LENGTH,
    NOT_EMPTY,
    NOT_NEGATIVE,
    VOCABULARY,
    WIDTH,
    ValidRange,
    between,
    option,
)

from .formats.race import LEVELS
from .formats.squad import VERSIONS, version_in

#: the values of ``--task``
TASKS = ("mnli", "qqp", "squad", "race")
#: the settings that the model has from its pretraining
SHAPE = (
    "num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "max_position_embeddings", "vocab_size",
    "make_vocab_size_divisible_by", "norm_placement", "gelu", "norm_epsilon",
)  # fmt: skip
FINITE = ValidRange(math.isfinite, "must be a finite number")
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
class FinetuneFlags(TrainConfig):
    """The options of `trainers.finetune`; `FinetuneConfig` says what they mean together."""

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
        "--predict with its best checkpoint; or an iter_* folder of either; or hf:FOLDER, a BERT of Hugging Face",
        valid=NOT_EMPTY,
    )
    pretrained_checkpoint: str | None = option(
        None,
        "a run of pretrain_bert, or hf:FOLDER, to start from, where --load is the folder of --save",
        valid=NOT_EMPTY,
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
    min_lr: float | None = option(0.0, "learning rate at the end of the decay", valid=RATE)
    lr_decay_style: str = option("linear", "how lr decays to min-lr", choices=("constant", "linear", "cosine"))
    lr_warmup_fraction: float = option(
        0.06, "share of the steps over which lr rises from 0; --lr-warmup-iters wins", valid=FRACTION
    )
    hidden_dropout: float = option(
        0.1, "dropout on the embedding, after each branch, and on the pooled vector", valid=FRACTION
    )
    attention_dropout: float = option(0.1, "dropout on attention probabilities", valid=FRACTION)
    attention_dropout_mask: str = option("position", "as in pretrain_bert", choices=DROPOUT_MASKS)
    pad_attention_heads: bool = option(False, "as in pretrain_bert")
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
        valid=FINITE,
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
    num_layers: int | None = option(None, "must be the pretrained model's, as the next nine", valid=LAYERS, fixed=True)
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
    # Not fixed: checkpoints of older versions lack it, and `FinetuneConfig.of_model` compares it.
    norm_epsilon: float | None = option(None, "added to the variance in all norms", valid=ABOVE_ZERO)
