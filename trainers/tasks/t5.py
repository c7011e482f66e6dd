"""T5: the model, objective and batches of its training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from commengine import ProcessGrid, UsageError
from commengine.errors import usage_errors
from commengine.options.declared import given, require
from tplayers import T5, Randomness, T5Config, generate, vocab_parallel_argmax
from trainers.data.batches import GlobalBatches, TextMicrobatch
from trainers.data.blend import blend_of
from trainers.data.corpus import Corpus, open_corpus, read_tokenizer, shared_tokenizer, token_samples
from trainers.data.indexed import IndexedDataset
from trainers.data.samples import IGNORED, NoSamplesError, TextSamples, ZipfSamples
from trainers.data.tokenizer import SENTINEL, Tokenizer
from trainers.run.evaluation import Mean, evaluate_sources
from trainers.run.task import Remarks
from trainers.settings.commands import T5Settings
from trainers.weights.export import SmallFiles

from .spans import SpanRules, SpanSample, SpanSamples
from .transformer import TransformerTask, shape_of

#: the end of a text of mock data
MOCK_END = 1


class T5Task(TransformerTask[T5Settings]):
    """The training of a T5."""

    kind = "t5"
    settings = T5Settings
    network_class = T5
    #: of the corpus, once it is open
    of_samples: SpanRules

    def completed(self, ranks: int) -> T5Settings:
        """See `TransformerTask.completed`. The vocabulary gets sentinels, if it has none."""
        config = self.config
        if not config.mock_data:
            path = shared_tokenizer(blend_of(config), config.tokenizer_model)
            require(
                path is not None,
                "--tokenizer-model FILE: needed, as there is none beside --data-path: a sample ends in its end of text",
            )
            assert path is not None
            with usage_errors(f"--tokenizer-model {path}: "):
                tokens = read_tokenizer(path).with_sentinels(config.vocab_extra_ids).vocab_size
            config = replace(config, tokenizer_model=path, vocab_size=config.vocab_size or tokens)
        found = super(T5Task, T5Task(config)).completed(ranks)
        T5Task(found).rules()
        return found

    def model(self) -> T5Config:
        """The model's shape."""
        config, only = self.config, T5Config.max_position_embeddings
        own = {"swiglu": config.gated_gelu, "scale_decoder_outputs": not config.disable_decoder_output_scale}
        return T5Config(**shape_of(config, T5Config) | own | {"max_position_embeddings": only})

    def groups(self, grid: ProcessGrid) -> dict[str, Any]:
        return {}

    def rules(self) -> SpanRules:
        """How samples are made. Raises UsageError where the lengths or the sentinels are too few."""
        config, end, sentinels = self.config, MOCK_END, self.config.vocab_extra_ids
        assert config.vocab_size is not None
        first = config.vocab_size - 1
        if config.tokenizer_model is not None:
            tokenizer = self.with_own_tokens(read_tokenizer(config.tokenizer_model))
            try:
                end = tokenizer.eod
            except ValueError as error:
                raise UsageError(f"--tokenizer-model {config.tokenizer_model}: {error}") from error
            ids = tokenizer.vocabulary()
            first = ids.get(SENTINEL.format(0), 0)
            sentinels = next(k for k in range(len(ids) + 1) if ids.get(SENTINEL.format(k)) != first - k)
        ordinary = config.vocab_size - sentinels
        require(
            config.tokenizer_model is not None or ordinary > MOCK_END,
            f"{given(config, 'vocab_size')}: has no token besides its {given(config, 'vocab_extra_ids')} sentinels",
        )
        rules = SpanRules(
            config.seq_length, config.decoder_seq_length, config.mask_prob, config.mean_noise_span_length, end, first,
            T5Config.decoder_start_token_id, config.seed,
        )  # fmt: skip
        lengths = f"{given(config, 'seq_length')}, {given(config, 'decoder_seq_length')}"
        require(rules.text > 0, f"{lengths}: too short for two tokens of text, a sentinel and the end")
        spans = rules.counts(rules.text)[1]
        require(
            spans <= sentinels,
            f"{lengths}: a sample of {rules.text} tokens has {spans} spans, and the vocabulary {sentinels} sentinels; "
            "valid: a larger --vocab-extra-ids, or a --vocab-size that has room for them",
        )
        return rules

    def open_corpus(self) -> Corpus:
        rules = self.of_samples = self.rules()
        config = self.config
        assert config.vocab_size is not None
        words = config.vocab_size - config.vocab_extra_ids

        def cut(dataset: IndexedDataset, documents: range) -> TextSamples:
            try:
                return SpanSamples(token_samples(dataset, documents, rules.text), rules)
            except NoSamplesError as error:
                said = str(error).replace(f"--seq-length {rules.text}", f"{rules.text} tokens of text")
                raise NoSamplesError(said) from error

        def mock(count: int, part: int) -> TextSamples:
            return SpanSamples(ZipfSamples(words, rules.text, config.seed, count, split=part), rules)

        found = open_corpus(config, cut, mock)
        own = None if found.tokenizer is None else self.with_own_tokens(found.tokenizer)
        return replace(found, tokenizer=own)

    def with_own_tokens(self, tokenizer: Tokenizer) -> Tokenizer:
        """See `TransformerTask.with_own_tokens`: its sentinels."""
        return tokenizer.with_sentinels(self.config.vocab_extra_ids, self.config.vocab_size)

    def small_files(self) -> SmallFiles:
        return replace(super().small_files(), sentinels=self.config.vocab_extra_ids)

    def objective(self) -> SpanTokens:
        return SpanTokens()

    @property
    def batches(self) -> type[SpanBatches]:
        return SpanBatches

    def remarks(self, evaluated: Mapping[str, Mean] | None) -> Remarks:
        """The input of a held-out sample, and what the model writes for it."""
        config, corpus, model = self.config, self.corpus, self.trainer.model
        assert isinstance(model, T5)
        measures = {}
        if evaluated is not None:
            grid, schedule = self.trainer.grid, self.trainer.schedule
            shares = evaluate_sources(model, RightSpans(), self.held_out, grid, schedule=schedule).means
            measures = {f"validation_{name}": mean.loss for name, mean in shares.items()}
        if self.trainer.grid.pipeline.size > 1:  # `generate` has no T5 in stages
            return Remarks(measures=measures)
        source = self.evaluated[0].held_out if self.evaluated else corpus.sources[0].training
        sample: SpanSample = source[0]
        prompt = [int(token) for token in sample.tokens[: sample.length]]
        (written,) = generate(model, [prompt], config.sample_tokens, stop_tokens=[self.of_samples.end], warn=False)
        return Remarks(None, corpus.decode(prompt), corpus.decode(written), measures)


@dataclass(frozen=True)
class SpanMicrobatch(TextMicrobatch):
    """A micro-batch of `SpanSample`.

    tokens: int64 [b, s]. padding: int64 [b], the tokens of each that are not filled up; None: all. decoder_tokens,
    labels: int64 [b, n]. numbers: the global number of each sample. vocab_size: without padding.
    """

    tokens: Tensor
    padding: Tensor | None
    decoder_tokens: Tensor
    labels: Tensor
    numbers: tuple[int, ...]
    vocab_size: int

    @property
    def counts(self) -> tuple[int]:
        """The labels that the loss counts."""
        return (int((self.labels != IGNORED).sum()),)

    @property
    def read(self) -> tuple[Tensor, Tensor]:
        return self.tokens, self.decoder_tokens


class SpanBatches(GlobalBatches[SpanMicrobatch]):
    """Global batches of `SpanSample`; the decoder reads its labels one place later, after the start token."""

    def microbatch(self, rows: Sequence[SpanSample], numbers: range, past_end: Sequence[bool]) -> SpanMicrobatch:
        tokens, labels = (
            torch.from_numpy(np.stack(one)) for one in zip(*((r.tokens, r.labels) for r in rows), strict=True)
        )
        start = T5Config.decoder_start_token_id
        before = F.pad(labels[:, :-1], (1, 0), value=start)
        decoder_tokens = before.masked_fill(before == IGNORED, start)
        labels[torch.tensor(past_end, dtype=torch.bool, device="cpu")] = IGNORED
        lengths = torch.tensor([row.length for row in rows], dtype=torch.int64, device="cpu")
        padding = None if bool((lengths == tokens.shape[1]).all()) else lengths
        return SpanMicrobatch(tokens, padding, decoder_tokens, labels, tuple(numbers), self.vocab_size)


class SpanTokens:
    """T5's objective: the cross-entropy of the spans, their sentinels and the end, in nats per token that counts."""

    names = ("lm_loss",)
    unit = "nats/token"

    def __call__(self, model: T5, batch: SpanMicrobatch, randomness: Randomness | None) -> tuple[Tensor]:
        losses = model(batch.tokens, batch.decoder_tokens, batch.labels, padding=batch.padding, randomness=randomness)
        return (losses,)


class RightSpans:
    """Not to be minimized: 1 for each token that the model's best guess names, and for each sample without an error.

    The model writes a sample's labels by greedy decoding if and only if its best guess after each of them is the next
    one, so no text is generated. Every sample has equally many labels, so the second share, too, is one of labels.
    """

    names = ("token_accuracy", "exact_match")
    unit = "share"

    def __call__(self, model: T5, batch: SpanMicrobatch, randomness: Randomness | None) -> tuple[Tensor, Tensor]:
        del randomness
        logits = model(batch.tokens, batch.decoder_tokens, padding=batch.padding)
        best = vocab_parallel_argmax(logits, model.comm, model.config.vocab_size)
        counted = batch.labels != IGNORED
        right = (best == batch.labels) & counted
        whole = (right == counted).all(dim=1, keepdim=True) & counted
        return right.float(), whole.float()
