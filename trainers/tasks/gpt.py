"""GPT: the model, objective and batches of its training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from commengine import ProcessGrid
from tplayers import GPT, GPTConfig, Randomness, RopeScaling, Sampling, generate
from trainers.data.batches import GlobalBatches, TextMicrobatch
from trainers.data.corpus import Corpus, open_corpus
from trainers.data.samples import IGNORED
from trainers.run.evaluation import Mean
from trainers.run.task import Remarks
from trainers.settings.commands import GPTSettings

from .transformer import TransformerTask, shape_of
from .unigram import unigram_entropy

#: The number of tokens of held-out text that the report's sample continues.
PROMPT_TOKENS = 16

#: How that text is drawn.
SAMPLING = Sampling(temperature=0.8, top_k=40)


class GPTTask(TransformerTask[GPTSettings]):
    """The training of a GPT."""

    kind = "gpt"
    settings = GPTSettings
    network_class = GPT

    def model(self) -> GPTConfig:
        """The model's shape."""
        config = self.config
        groups = (config.num_query_groups or 1) if config.group_query_attention else None
        own = {"rope_scaling": rope_scaling(config), "num_query_groups": groups}
        return GPTConfig(**shape_of(config, GPTConfig) | own, add_bias_linear=not config.disable_bias_linear)

    def groups(self, grid: ProcessGrid) -> dict[str, Any]:
        return {**super().groups(grid), "expert_group": grid.expert}

    def open_corpus(self) -> Corpus:
        return open_corpus(self.config)

    def objective(self) -> NextToken:
        return NextToken()

    @property
    def batches(self) -> type[TokenBatches]:
        return TokenBatches

    def remarks(self, evaluated: Mapping[str, Mean] | None) -> Remarks:
        """A text that the model continues, and the loss of a unigram model on the held-out samples."""
        config, corpus, model = self.config, self.corpus, self.trainer.model
        assert isinstance(model, GPT)
        source = self.evaluated[0].held_out if self.evaluated else corpus.sources[0].training
        prompt = [int(token) for token in source[0][: min(PROMPT_TOKENS, config.seq_length)]]
        (sample,) = generate(
            model, [prompt], config.sample_tokens, sampling=SAMPLING, seed=config.seed, warn=False,
            pipeline=self.trainer.grid.pipeline,
        )  # fmt: skip
        unigram = None
        if evaluated is not None:
            world = self.trainer.grid.world
            unigram = unigram_entropy(corpus, model.config.vocab_size, self.evaluated, world)
        return Remarks(unigram, corpus.decode(prompt), corpus.decode(sample, before=prompt))


def rope_scaling(config: GPTSettings) -> RopeScaling | None:
    """The scaling of rotary positions; None for none."""
    if not config.use_rope_scaling:
        return None
    return RopeScaling(
        config.rope_scaling_type, config.rope_scaling_factor, config.rope_low_freq_factor, config.rope_high_freq_factor,  # type: ignore[arg-type]
        config.rope_original_max_position_embeddings,
    )  # fmt: skip


@dataclass(frozen=True)
class TokenMicrobatch(TextMicrobatch):
    """tokens, labels: int64 [b, s]. numbers: the global number of each sample. vocab_size: without padding."""

    tokens: Tensor
    labels: Tensor
    numbers: tuple[int, ...]
    vocab_size: int

    @property
    def counts(self) -> tuple[int]:
        """The labels that the loss counts."""
        return (int((self.labels != IGNORED).sum()),)


class TokenBatches(GlobalBatches[TokenMicrobatch]):
    """Global batches of samples of s + 1 tokens; the label of each token is the token after it."""

    def microbatch(
        self, rows: Sequence[np.ndarray[Any, Any]], numbers: range, past_end: Sequence[bool]
    ) -> TokenMicrobatch:
        data = torch.from_numpy(np.stack(rows))
        labels = data[:, 1:].clone()
        labels[torch.tensor(past_end, dtype=torch.bool, device="cpu")] = IGNORED
        return TokenMicrobatch(data[:, :-1].contiguous(), labels, tuple(numbers), self.vocab_size)


class NextToken:
    """GPT's objective: the cross-entropy of the next token, in nats per token that counts."""

    names = ("lm_loss",)
    unit = "nats/token"

    def __call__(self, model: GPT, batch: TokenMicrobatch, randomness: Randomness | None) -> tuple[Tensor]:
        return (model(batch.tokens, batch.labels, randomness),)
