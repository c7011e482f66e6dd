"""BERT: a tensor-parallel encoder with the heads of masked tokens and of sentence order (paper, section 5.3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commengine import Communicator
from tplayers.checks import require_within
from tplayers.context.group import ContextGroup
from tplayers.cross_entropy import IGNORED, class_cross_entropy
from tplayers.linear import ReplicatedLinear
from tplayers.mlp import GELUS, Gelu
from tplayers.norm import LayerNorm
from tplayers.placement import Normal, Placement, add_parameter, require_one_of
from tplayers.regions import reduce_own_from_tensor_parallel_region, reduce_scatter_to_sequence_parallel_region
from tplayers.rng import Randomness

from .block import first_row
from .config import NormPlacement, TransformerConfig
from .part import StageInput
from .transformer import Transformer

#: the fields of `TransformerConfig` that only a GPT may change
_OF_DECODERS = (
    "normalization", "swiglu", "position_embedding_type", "rope_scaling", "num_query_groups", "kv_channels",
    "add_bias_linear", "add_qkv_bias", "untie_embeddings_and_output_weights",
)  # fmt: skip


@dataclass(frozen=True)
class BERTConfig(TransformerConfig):
    """The shape of a BERT; the defaults are the paper's. The fields that GPT has, too, are in `TransformerConfig`.

    num_tokentypes: token types, of which the model has an embedding each; 0 for none.
    norm_placement: as in `TransformerBlock`. "pre" is the paper's (Figure 7 b). "post" (Figure 7 a) is that of the
        first BERT and of Hugging Face's ``BertModel``.
    gelu: of the layers, as in `MLP`. head_gelu: of the head of masked tokens; None for that of the layers. By default
        Megatron-LM has "tanh" in the layers and "erf" in the head.
    binary_head: whether the model has the pooler and the sentence-order head.

    Raises ValueError for another ``norm_placement`` or ``recompute``, and if a field of which only a GPT has a choice,
    such as ``swiglu``, has not its default.
    """

    causal = False
    num_tokentypes: int = 2
    norm_placement: NormPlacement = "pre"
    gelu: Gelu = "erf"
    head_gelu: Gelu | None = None
    binary_head: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in _OF_DECODERS:
            value, default = getattr(self, name), getattr(TransformerConfig, name)
            if value != default:
                raise ValueError(f"{name}={value!r}: a BERT has {default!r}; only a GPT may differ")


class BERTEncoder(Transformer):
    """BERT's embedding and layers over ``comm``, the tensor group, without a head: what all models of BERT share.

    A subclass adds its heads in `add_heads`, and calls `add_pooler` if one of them reads the whole sample (`pooled`).
    The arguments are those of `BERT`.
    """

    config: BERTConfig
    pooler: ReplicatedLinear

    @property
    def head_context(self) -> ContextGroup | None:
        """The ranks of which each has some of the rows that the heads see; None if all have all."""
        return self.context

    def add_pooler(self, dtype: torch.dtype | None = None) -> None:
        """Give the model the layer of `pooled`."""
        hidden = self.config.hidden_size
        self.pooler = ReplicatedLinear(hidden, hidden, init=Normal(self.config.init_method_std), dtype=dtype)

    def pooled(self, hidden: Tensor) -> Tensor:
        """tanh(W h + b) of each sample's first token [b, h], equal on all ranks. hidden: from `hidden_states`."""
        first = self.rows(hidden, torch.zeros(1, hidden.shape[1], dtype=torch.int64, device=hidden.device))
        if self.config.sequence_parallel:
            first = reduce_own_from_tensor_parallel_region(first, self.comm)
        if self.head_context is not None:  # of which the first rank has it
            first = reduce_own_from_tensor_parallel_region(first, self.head_context.comm)
        return torch.tanh(self.pooler(first[0]))

    def rows(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """The rows [K, b, h] of ``hidden`` at ``positions`` [K, b].

        With sequence_parallel or a context group ``hidden`` is this rank's part, and the rows of other ranks are 0.
        """
        s, b, h = hidden.shape
        elsewhere = None
        if self.config.sequence_parallel or self.head_context is not None:
            first = first_row(hidden, self.comm, self.config.sequence_parallel, self.head_context)
            # Without a causal mask a rank's positions follow each other.
            positions = positions - (first if isinstance(first, int) else first[0])
            elsewhere = (positions < 0) | (positions >= s)
            positions = positions.masked_fill(elsewhere, 0)
        numbers = (positions * b + torch.arange(b, dtype=torch.int64, device=hidden.device)).reshape(-1)
        rows = hidden.reshape(s * b, h).index_select(0, numbers).view(*positions.shape, h)
        return rows if elsewhere is None else rows.masked_fill(elsewhere.unsqueeze(-1), 0.0)


class BERT(BERTEncoder):
    """An encoder over ``comm``, the tensor group. Call `tplayers.initialize(model, seed)`, or load a checkpoint.

    forward without labels -> (this rank's logits of masked tokens [b, s, padded vocabulary / comm.size], the logits of
    sentence order [b, 2], equal on all ranks, or None without ``binary_head``);
    forward with labels -> (per-token losses [b, s], per-sample losses [b] or None), in nats, float32 (float64 of a
    float64 model), equal on all ranks, 0 where a label is -100.

    tokens: int64 [b, s], equal on all ranks of ``comm`` as all arguments are, s at most ``max_position_embeddings``.
    token_types: int64 [b, s], 0 to num_tokentypes - 1; None for type 0 everywhere.
    padding: the number of real tokens of each sample, int64 [b], which come first; or bool [b, s], True where a token
        is real. No token attends to the others. None: all are real.
    labels: int64 [b, s], the tokens that were masked; -100: not counted.
    order_labels: int64 [b], 1 for swapped sentences; -100: the sample has no such label. None: no sample has one.
    positions: int64 [b, K]: the head of masked tokens runs at these positions only, and has K for s in the shapes of
        labels, logits and losses. For samples of fewer positions, any position with the label -100 fills the rest.
    randomness: needed in a training pass with dropout. Every rank must run forward and backward, of the sum of both
        losses: each parameter then gets a gradient, also if nothing counts.
    overlap_stream: a stream of ``comm`` on which the backward of column-parallel layers communicates
        (`column_parallel_linear`).
    part: the layers that this rank has. at: where in them a pass begins. A chunk without the output layer returns (its
    activations [s, b, h], or this rank's shard of them, None) for the next one.
    context: the ranks that share each sequence (`Transformer`). Without ``positions`` the results of masked tokens are
    those of this rank's positions. With them all K are there, and losses of other ranks' positions are 0. Losses of
    sentence order are 0 on all ranks but the first of the group.
    config, expert_group, dtype: as in `Transformer`, with its errors.

    Raises ValueError for a shape that does not fit and, on the host if not compiled, for a number outside its range.

    With sequence_parallel, ``comm.size`` must divide s (else ValueError), and after a backward the gradients of some
    parameters are partial: call `sum_partial_gradients(model, comm)`.
    """

    def add_heads(self, dtype: torch.dtype | None) -> None:
        config = self.config
        self.mlm_head = MaskedTokenHead(config, self.comm, dtype=dtype)
        if config.binary_head:
            self.add_pooler(dtype)
            self.order_head = ReplicatedLinear(config.hidden_size, 2, init=Normal(config.init_method_std), dtype=dtype)

    def forward(
        self,
        tokens: Tensor,
        token_types: Tensor | None = None,
        padding: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        order_labels: Tensor | None = None,
        positions: Tensor | None = None,
        randomness: Randomness | None = None,
        at: StageInput | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        self._require_labels(tokens, labels, order_labels, positions)
        hidden = self.hidden_states(tokens, randomness, token_types, padding, at=at)
        if not self.part.ends(at or StageInput()):
            return hidden, None
        context = self.head_context
        rows, asked = hidden, tokens.shape[1] if context is None else context.part(tokens.shape[1])
        if positions is not None:
            rows, asked = self._at_positions(hidden, positions), positions.shape[1]
        scores = (self.logits if labels is None else self._scores)(self.mlm_head(rows), self.mlm_head.bias)
        order = self.order_head(self.pooled(hidden)) if self.config.binary_head else None
        if labels is None:
            return scores[:asked].transpose(0, 1), order
        labels, order_labels = self._of_own_positions(labels, order_labels, positions, tokens.shape[1])
        wanted = F.pad(labels.t(), (0, 0, 0, scores.shape[-3] - asked), value=IGNORED)
        losses = self._losses(scores, wanted)
        return losses[:asked].t(), None if order is None else _order_losses(order, order_labels)

    def _of_own_positions(
        self, labels: Tensor, order_labels: Tensor | None, positions: Tensor | None, s: int
    ) -> tuple[Tensor, Tensor | None]:
        """The labels that this rank of the context group counts: those of its positions, and of its first tokens."""
        if (context := self.head_context) is None:
            return labels, order_labels
        if context.comm.rank > 0:
            order_labels = None
        if positions is None:
            return self.own_labels(labels), order_labels
        mine = positions // context.part(s) == context.comm.rank
        return labels.masked_fill(~mine, IGNORED), order_labels

    def _at_positions(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """The rows [K, b, h] of ``hidden`` at ``positions`` [b, K].

        K is filled up to a `_positions_multiple`. With sequence_parallel this rank's shard of them.
        """
        found = self.rows(hidden, F.pad(positions.t(), (0, 0, 0, -positions.shape[1] % self._positions_multiple)))
        return reduce_scatter_to_sequence_parallel_region(found, self.comm) if self.sequence_parallel else found

    @property
    def _positions_multiple(self) -> int:
        """A number that divides the positions at which the head of masked tokens runs."""
        return self.comm.size if self.sequence_parallel else 1

    def _require_labels(
        self, tokens: Tensor, labels: Tensor | None, order_labels: Tensor | None, positions: Tensor | None
    ) -> None:
        b, s = tokens.shape
        if positions is not None:
            if positions.dim() != 2 or positions.shape[0] != b:
                raise ValueError(f"positions {list(positions.shape)} must be [{b}, K]")
            require_within(positions, s, "a position")
        expected = list(tokens.shape if positions is None else positions.shape)
        if labels is not None and list(labels.shape) != expected:
            raise ValueError(f"labels {list(labels.shape)} must be {expected}")
        if order_labels is None:
            return
        if labels is None or not self.config.binary_head:
            raise ValueError("order_labels need labels, and a model with binary_head=True")
        if list(order_labels.shape) != [b]:
            raise ValueError(f"order_labels {list(order_labels.shape)} must be [{b}]")
        require_within(order_labels, 2, "a label of sentence order", IGNORED)


class MaskedTokenHead(nn.Module):
    """The dense layer, GELU and norm before the output layer of masked tokens, and this rank's part of its bias.

    The output layer is the tied embedding (`VocabParallelEmbedding.logits`); its bias is split by vocabulary.

    forward: x [s, b, h], equal on all ranks -> the same. With sequence_parallel: this rank's shard -> the same.
    """

    bias: nn.Parameter

    def __init__(self, config: BERTConfig, comm: Communicator, *, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        split: dict[str, Any] = {"sequence_parallel": config.sequence_parallel, "dtype": dtype}
        self.gelu = config.head_gelu or config.gelu
        require_one_of(GELUS, gelu=self.gelu)
        self.dense = ReplicatedLinear(
            config.hidden_size, config.hidden_size, init=Normal(config.init_method_std), **split
        )
        self.norm = LayerNorm(config.hidden_size, config.norm_epsilon, **split)
        columns = Placement((config.padded_vocab_size,), dim=0, index=comm.rank, count=comm.size)
        add_parameter(self, "bias", columns, dtype)

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = self.norm(F.gelu(self.dense(x), approximate=GELUS[self.gelu]))
        return normed


def _order_losses(logits: Tensor, labels: Tensor | None) -> Tensor:
    """Cross-entropy [b] of logits [b, 2]."""
    if labels is None:
        labels = torch.full(logits.shape[:1], IGNORED, dtype=torch.int64, device=logits.device)
    return class_cross_entropy(logits, labels)
