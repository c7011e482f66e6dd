"""GPT: a tensor-parallel decoder; the paper's (sections 3 and 4), and with other settings the Llama family's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from commengine import Communicator, Stream
from tplayers.attention.key_value_cache import KeyValueCache
from tplayers.canonical.cross_entropy import cross_entropy
from tplayers.cross_entropy import vocab_parallel_cross_entropy
from tplayers.embedding import VocabParallelEmbedding
from tplayers.linear import ColumnParallelLinear
from tplayers.placement import Normal
from tplayers.rng import Randomness

from .config import TransformerConfig
from .transformer import Transformer


@dataclass(frozen=True)
class GPTConfig(TransformerConfig):
    """The shape of a GPT: see `TransformerConfig`."""


class GPT(Transformer):
    """A decoder over ``comm``, the tensor group. Call `tplayers.initialize(model, seed)`, or load a checkpoint.

    forward(tokens) -> this rank's logits [b, s, padded vocabulary / comm.size];
    forward(tokens, labels) -> per-token losses float32 [b, s], equal on all ranks, 0 where a label is -100.

    tokens, labels: int64 [b, s], equal on all ranks of ``comm``, s at most ``max_position_embeddings``.
    randomness: needed in a training pass with dropout. Every rank must run forward and backward.
    cache: the tokens before ``tokens``, which go through the model without them (`Transformer.hidden_states`).
    overlap_stream: a stream of ``comm`` on which the backward of column-parallel layers communicates
        (`column_parallel_linear`).

    Layers are pre-LN, and GELU is the tanh form. The output layer is tied to the embedding, unless the configuration
    says otherwise. Inside, activations are [s, b, h], so that a sequence shard is
    contiguous.

    With sequence_parallel, ``comm.size`` must divide s (else ValueError), and after a backward the gradients of some
    parameters are partial: call `sum_partial_gradients(model, comm)`.
    """

    output: ColumnParallelLinear  # if it is not tied

    def __init__(
        self,
        config: GPTConfig,
        comm: Communicator,
        *,
        overlap_stream: Stream | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(config, comm, causal=True, overlap_stream=overlap_stream, dtype=dtype)
        self.config = config
        if config.untie_embeddings_and_output_weights:
            self.output = ColumnParallelLinear(
                config.hidden_size, config.padded_vocab_size, comm, bias=False, init=Normal(config.init_method_std),
                sequence_parallel=config.sequence_parallel, overlap_stream=overlap_stream, dtype=dtype,
            )  # fmt: skip

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        randomness: Randomness | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        hidden = self.hidden_states(tokens, randomness, cache=cache)
        if self.canonical is not None and labels is not None:
            return cross_entropy(
                self._logit_shards(hidden), labels.t(), self.canonical, vocab_size=self.config.vocab_size
            ).t()
        logits = self.logits(hidden)  # [s, b, v / p]
        if labels is None:
            return logits.transpose(0, 1)
        losses = vocab_parallel_cross_entropy(
            logits, labels.t(), self.comm, vocab_size=self.config.vocab_size, overwrite=True
        )
        return losses.t()

    def _logit_shards(self, hidden: Tensor) -> Tensor:
        """The canonical shards of `logits`, [own, s, b, padded vocabulary / C]."""
        if self.config.untie_embeddings_and_output_weights:
            return self.output.shards(hidden)
        return self.embedding.logit_shards(hidden)

    @property
    def output_layer(self) -> ColumnParallelLinear | VocabParallelEmbedding:
        """The layer of which the weight [padded vocabulary / comm.size, h] gives this rank's logits."""
        return self.output if self.config.untie_embeddings_and_output_weights else self.embedding

    def logits(self, hidden: Tensor) -> Tensor:
        """This rank's logits [..., padded vocabulary / comm.size] of the result of `hidden_states` [..., h].

        With sequence_parallel ``hidden`` is this rank's shard [s / comm.size, ..., h], and the logits are of all s
        positions. Collective as `VocabParallelEmbedding.logits` is.
        """
        if self.config.untie_embeddings_and_output_weights:
            found: Tensor = self.output(hidden)
            return found
        return self.embedding.logits(hidden)
