"""GPT: the settings, model, objective and batches of its training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from commengine import Communicator, ProcessGrid, Stream
from commengine.options.declared import given, option, require
from commengine.options.ranges import Heads, Length, Positive, Width, at_least, between
from tplayers import GPT, GPTConfig, ModelPart, Randomness, RopeScaling, Sampling, generate
from tplayers.attention.rotary import SCALING_KINDS
from tplayers.models.config import POSITION_EMBEDDINGS
from tplayers.norm import NORMS
from trainers.data.batches import GlobalBatches, TextMicrobatch
from trainers.data.corpus import Corpus, open_corpus
from trainers.data.samples import IGNORED
from trainers.run.evaluation import Mean
from trainers.run.task import Remarks

from .experts import ExpertsConfig
from .training import TransformerTask
from .transformer import TransformerTrainConfig
from .unigram import unigram_entropy

#: The number of tokens of held-out text that the report's sample continues.
PROMPT_TOKENS = 16

#: How that text is drawn.
SAMPLING = Sampling(temperature=0.8, top_k=40)


@dataclass(frozen=True)
class GPTTrainConfig(TransformerTrainConfig, ExpertsConfig):
    """The settings of `trainers.pretrain_gpt`. A field is the flag of the same name, with dashes."""

    task = megatron = "gpt"
    causal = True

    sample_tokens: Annotated[int, between(0, 2**16)] = option(
        64, "length of the text that continues the report's sample"
    )

    # the Llama family
    normalization: str = option("LayerNorm", "the norm of all layers", choices=tuple(NORMS), fixed=True)
    swiglu: bool = option(False, "the feed-forward block is SwiGLU instead of GELU", fixed=True)
    position_embedding_type: str = option(
        "learned_absolute", "positions: a table that is added to the embedding, or rotary positions",
        choices=POSITION_EMBEDDINGS, fixed=True,
    )  # fmt: skip
    rotary_base: Annotated[float, at_least(1)] = option(10000.0, "theta of rotary positions", fixed=True)
    use_rope_scaling: bool = option(False, "scale the frequencies of rotary positions", fixed=True)
    rope_scaling_type: str = option(
        "llama3", "with --use-rope-scaling: divide all frequencies, or the low ones alone as Llama 3.1 does",
        choices=SCALING_KINDS, fixed=True,
    )  # fmt: skip
    rope_scaling_factor: Annotated[float, at_least(1)] = option(
        8.0, "with --use-rope-scaling: what frequencies are divided by", fixed=True
    )
    rope_low_freq_factor: Positive = option(
        1.0, "with llama3: waves longer than the original positions by this are divided", fixed=True
    )
    rope_high_freq_factor: Positive = option(
        4.0, "with llama3: waves shorter than the original positions by this stay", fixed=True
    )
    rope_original_max_position_embeddings: Length = option(
        8192, "with llama3: the positions before the context was made longer", fixed=True
    )
    group_query_attention: bool = option(False, "several query heads share a head of keys and values", fixed=True)
    num_query_groups: Heads | None = option(
        None, "with --group-query-attention: the heads of keys and values (default 1)", fixed=True
    )
    kv_channels: Width | None = option(
        None, "size of an attention head (default hidden-size / num-attention-heads)", fixed=True
    )
    disable_bias_linear: bool = option(False, "no biases in linear layers", fixed=True)
    add_qkv_bias: bool = option(
        False, "biases in the layers of queries, keys and values, also with --disable-bias-linear", fixed=True
    )
    qk_layernorm: bool = option(False, "normalise the queries and keys of each head", fixed=True)
    untie_embeddings_and_output_weights: bool = option(False, "the output layer has a weight of its own", fixed=True)

    def validate(self, ranks: int) -> None:
        """Raise UsageError, naming the option and what is valid, unless this run is possible on ``ranks`` ranks."""
        super().validate(ranks)
        rope = self.position_embedding_type == "rope"
        require(
            self.group_query_attention or self.num_query_groups is None,
            f"{given(self, 'num_query_groups')}: needs --group-query-attention",
        )
        require(rope or not self.use_rope_scaling, "--use-rope-scaling: needs --position-embedding-type rope")
        if self.num_experts is not None:
            experts = given(self, "num_experts")
            require(self.disable_bias_linear, f"{experts}: needs --disable-bias-linear, as experts have no biases")
            require(
                not self.deterministic or self.canonical_parts == 1,
                f"{experts}: excludes --deterministic with a --context-parallel-size or --deterministic-parts above 1, "
                "because an expert computes all rows of a sample at once",
            )
        require(not (self.deterministic and self.qk_layernorm), "--deterministic: excludes --qk-layernorm")
        low, high = given(self, "rope_low_freq_factor"), given(self, "rope_high_freq_factor")
        require(self.rope_low_freq_factor < self.rope_high_freq_factor, f"{low}: must be below {high}")

    def rope_scaling(self) -> RopeScaling | None:
        """The scaling of rotary positions; None for none."""
        if not self.use_rope_scaling:
            return None
        return RopeScaling(
            self.rope_scaling_type, self.rope_scaling_factor, self.rope_low_freq_factor, self.rope_high_freq_factor,  # type: ignore[arg-type]
            self.rope_original_max_position_embeddings,
        )  # fmt: skip

    def model(self) -> GPTConfig:
        """The model's shape. ``vocab_size`` must be known."""
        groups = (self.num_query_groups or 1) if self.group_query_attention else None
        own = {"rope_scaling": self.rope_scaling(), "num_query_groups": groups}
        return GPTConfig(**self.shape(GPTConfig) | own, add_bias_linear=not self.disable_bias_linear)

    def network(
        self, tensor: Communicator, dtype: torch.dtype, overlap: Stream | None = None, part: ModelPart | None = None,
        **groups: Any,
    ) -> GPT:  # fmt: skip
        return GPT(self.model(), tensor, dtype=dtype, overlap_stream=overlap, part=part, **groups)

    def groups(self, grid: ProcessGrid) -> dict[str, Any]:
        return {**super().groups(grid), "expert_group": grid.expert}

    def open_corpus(self) -> Corpus:
        return open_corpus(self)

    def objective(self) -> NextToken:
        return NextToken()

    @property
    def batches(self) -> type[TokenBatches]:
        return TokenBatches


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


class GPTTask(TransformerTask[GPTTrainConfig]):
    """The training of a GPT as `trainers.run.loop.train` runs it."""

    def remarks(self, evaluated: Mapping[str, Mean] | None) -> Remarks:
        """A text that the model continues, and the loss of a unigram model on the held-out samples."""
        config, corpus, model = self.config, self.corpus, self.trainer.model
        assert isinstance(model, GPT)
        source = self._evaluated[0].held_out if self._evaluated else corpus.sources[0].training
        prompt = [int(token) for token in source[0][: min(PROMPT_TOKENS, config.seq_length)]]
        (sample,) = generate(
            model, [prompt], config.sample_tokens, sampling=SAMPLING, seed=config.seed, warn=False,
            pipeline=self.trainer.grid.pipeline,
        )  # fmt: skip
        unigram = None
        if evaluated is not None:
            world = self.trainer.grid.world
            unigram = unigram_entropy(corpus, model.config.vocab_size, self._evaluated, world)
        return Remarks(unigram, corpus.decode(prompt), corpus.decode(sample, before=prompt))
