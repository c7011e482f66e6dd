"""BERT: the model, objective and batches of its training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from commengine import UsageError
from commengine.options.declared import given, require
from tplayers import BERT, BERTConfig, Randomness
from tplayers.host_copy import to_device
from trainers.data.batches import GlobalBatches, TextMicrobatch
from trainers.data.blend import blend_of
from trainers.data.corpus import Corpus, shared_tokenizer
from trainers.data.samples import IGNORED, Samples
from trainers.data.sentences.samples import SHORTEST_SEQUENCE, MaskedSample, SampleRules, open_masked_corpus
from trainers.data.stream import SampleStream
from trainers.data.tokenizer import Tokenizer
from trainers.data.wordpiece import SPECIAL, WordPieces
from trainers.run.evaluation import Mean, evaluate_sources
from trainers.run.masked_prediction import RightPredictions, filled, predict
from trainers.run.task import Remarks
from trainers.settings.commands import BERTSettings

from .transformer import TransformerTask, shape_of
from .unigram import unigram_entropy

#: the number of samples among which one with masks is looked for, to be shown in the report
SHOWN = 100


class BERTTask(TransformerTask[BERTSettings]):
    """The training of a BERT."""

    kind = "bert"
    settings = BERTSettings
    network_class = BERT

    def completed(self, ranks: int) -> BERTSettings:
        """See `TransformerTask.completed`. Raises UsageError, too, where the tokenizer is no vocabulary of BERT's."""
        config = self.config
        shortest = f"must be at least {SHORTEST_SEQUENCE}: [CLS], two parts and a [SEP] after each"
        require(config.seq_length >= SHORTEST_SEQUENCE, f"{given(config, 'seq_length')}: {shortest}")
        if config.mock_data:
            assert config.vocab_size is not None
            smallest = len(SPECIAL) + 1
            words = f"must be at least {smallest}: {', '.join(SPECIAL)} and a word"
            require(config.vocab_size >= smallest, f"{given(config, 'vocab_size')}: {words}")
        if config.vocab_file is not None:
            self.wordpieces()
            config = replace(config, tokenizer_model=config.vocab_file, vocab_file=None)
        path = shared_tokenizer(blend_of(config), config.tokenizer_model)
        require(
            config.mock_data or path is not None,
            "--vocab-file FILE: needed, as there is no --tokenizer-model and no tokenizer beside --data-path: samples "
            f"need the ids of {', '.join(SPECIAL)}",
        )
        found = super(BERTTask, BERTTask(replace(config, tokenizer_model=path))).completed(ranks)
        BERTTask(found).wordpieces()
        return found

    def model(self) -> BERTConfig:
        """The model's shape."""
        types: dict[str, Any] = {"num_tokentypes": 0} if self.config.bert_no_token_types else {}
        return BERTConfig(**shape_of(self.config, BERTConfig), binary_head=self.binary_head, **types)

    @property
    def binary_head(self) -> bool:
        """Whether the model learns the order of the parts of a sample."""
        return not self.config.bert_no_binary_head

    def open_corpus(self) -> Corpus:
        return open_masked_corpus(self.config, self.wordpieces(), self.rules())

    def objective(self) -> MaskedTokens:
        return MaskedTokens(binary_head=self.binary_head)

    @property
    def batches(self) -> Callable[..., MaskedBatches]:
        return partial(MaskedBatches, binary_head=self.binary_head, types=not self.config.bert_no_token_types)

    def wordpieces(self) -> WordPieces:
        """The tokens of the vocabulary by their use. Raises UsageError if [MASK], or one like it, is missing."""
        config = self.config
        if config.mock_data:
            assert config.vocab_size is not None
            return WordPieces.mock(config.vocab_size)
        path = config.vocab_file or config.tokenizer_model
        assert path is not None
        try:
            return Tokenizer.from_file(path).wordpieces()
        except (OSError, ValueError) as error:
            name = "--vocab-file" if config.vocab_file else "--tokenizer-model"
            raise UsageError(f"{name}: {error}" if path in str(error) else f"{name} {path}: {error}") from error

    def rules(self) -> SampleRules:
        """How samples are made."""
        config = self.config
        return SampleRules(
            config.seq_length, config.seed, config.mask_prob, config.short_seq_prob, self.binary_head,
            config.one_sentence_documents == "mlm",
        )  # fmt: skip

    def remarks(self, evaluated: Mapping[str, Mean] | None) -> Remarks:
        """The held-out losses and accuracies, a sample with its masks filled in, and the loss of a unigram model."""
        model, grid = self.trainer.model, self.trainer.grid
        assert isinstance(model, BERT)
        masked, completed = self._sample(model)
        if evaluated is None:
            return Remarks(None, masked, completed, completes=True)
        measures = {f"validation_{name}": mean.loss for name, mean in evaluated.items()}
        right = RightPredictions(binary_head=self.binary_head)
        with model.without_context():
            shares = evaluate_sources(model, right, self.held_out, grid, schedule=self.trainer.schedule).means
        measures |= {name: mean.loss for name, mean in shares.items()}
        size = model.config.vocab_size
        unigram = unigram_entropy(self.corpus, size, self.evaluated, grid.world)
        return Remarks(unigram, masked, completed, measures, completes=True)

    def _sample(self, model: BERT) -> tuple[str, str]:
        """The first held-out sample that has masks, or of training, and how the model fills them in."""
        samples = self.evaluated[0].held_out if self.evaluated else self.corpus.sources[0].training
        first: Iterator[MaskedSample] = (samples[n] for n in range(min(len(samples), SHOWN)))
        row = next((sample for sample in first if sample.labels[0] != IGNORED), samples[0])
        arrays = row.tokens, row.types, np.array(row.length), row.positions
        tokens, types, *others = (to_device(torch.from_numpy(one)[None], model.device) for one in arrays)
        predicted = self._predicted(model, tokens, types if model.config.num_tokentypes else None, *others)
        masked = row.labels != IGNORED
        positions = row.positions[masked].tolist()
        guesses = dict(zip(positions, self._words(predicted[0][torch.from_numpy(masked)]), strict=True))
        truth = dict(zip(positions, self._words(row.labels[masked]), strict=True))
        return filled(self._words(row.tokens[: row.length]), guesses, truth)

    def _predicted(
        self, model: BERT, tokens: Tensor, types: Tensor | None, lengths: Tensor, positions: Tensor
    ) -> Tensor:
        """What `predict` finds at ``positions``: int64 [1, K] on all ranks."""
        schedule, found = self.trainer.schedule, torch.zeros_like(positions)

        def best(model: BERT) -> Tensor:
            return found.copy_(predict(model, tokens, types, lengths, positions)[0])

        model.eval()
        with torch.no_grad(), model.without_context():
            schedule.evaluate(1, lambda _, at: schedule.call(model, at, best), lambda _: model.activations(tokens))
        model.train()
        schedule.pipeline.broadcast(found, schedule.pipeline.size - 1)
        return found

    def _words(self, ids: Tensor | np.ndarray[Any, Any]) -> list[str]:
        numbers = [int(number) for number in ids]
        tokenizer = self.corpus.tokenizer
        return [str(number) for number in numbers] if tokenizer is None else tokenizer.tokens(numbers)


@dataclass(frozen=True)
class BERTMicrobatch(TextMicrobatch):
    """A micro-batch of samples of s tokens, of which at most K are masked; see `MaskedSample`.

    tokens, token_types: int64 [b, s]; token_types is None for a model without them. padding: int64 [b], the real tokens
    of each sample. labels: int64 [b, K].
    order_labels: int64 [b], or None without a sentence-order head. positions: int64 [b, K], or None for all s, and then
    K is s. numbers: the global number of each sample. vocab_size: without padding.
    """

    tokens: Tensor
    token_types: Tensor | None
    padding: Tensor
    labels: Tensor
    order_labels: Tensor | None
    positions: Tensor | None
    numbers: tuple[int, ...]
    vocab_size: int

    @property
    def counts(self) -> tuple[int, ...]:
        """The masked tokens, and the samples that have a label of order."""
        labels = (self.labels,) if self.order_labels is None else (self.labels, self.order_labels)
        return tuple(int((of_term != IGNORED).sum()) for of_term in labels)


class MaskedBatches(GlobalBatches[BERTMicrobatch]):
    """Global batches of `MaskedSample`.

    binary_head: whether the model learns the order of the parts. types: whether it has token types. The other arguments
    are `GlobalBatches`'s.
    """

    def __init__(
        self, samples: Samples | SampleStream, *, binary_head: bool, types: bool = True, **arguments: Any
    ) -> None:
        super().__init__(samples, **arguments)
        self.binary_head, self.types = binary_head, types

    def microbatch(self, rows: Sequence[MaskedSample], numbers: range, past_end: Sequence[bool]) -> BERTMicrobatch:
        tokens, types, positions, labels = (
            torch.from_numpy(np.stack(column))
            for column in zip(*((row.tokens, row.types, row.positions, row.labels) for row in rows), strict=True)
        )
        order = torch.tensor([row.order for row in rows], dtype=torch.int64, device="cpu")
        padding = torch.tensor(past_end, dtype=torch.bool, device="cpu")
        labels[padding] = IGNORED
        order[padding] = IGNORED
        lengths = torch.tensor([row.length for row in rows], dtype=torch.int64, device="cpu")
        return BERTMicrobatch(
            tokens, types if self.types else None, lengths, labels, order if self.binary_head else None,
            positions, tuple(numbers), self.vocab_size,
        )  # fmt: skip


class MaskedTokens:
    """BERT's objective: the cross-entropy of masked tokens, and that of the order of a sample's parts, unweighted.

    binary_head: False for masked tokens alone.
    """

    unit = "nats/masked token"

    def __init__(self, *, binary_head: bool = True) -> None:
        self.names = ("mlm_loss", "sop_loss") if binary_head else ("mlm_loss",)

    def __call__(self, model: BERT, batch: BERTMicrobatch, randomness: Randomness | None) -> tuple[Tensor, ...]:
        masked, order = model(
            batch.tokens, batch.token_types, batch.padding, labels=batch.labels, order_labels=batch.order_labels,
            positions=batch.positions, randomness=randomness,
        )  # fmt: skip
        return (masked,) if order is None else (masked, order)
