"""GPT: a tensor-parallel decoder; the paper's (sections 3 and 4), and with other settings the Llama family's."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tplayers.attention.key_value_cache import KeyValueCache
from tplayers.rng import Randomness

from .config import TransformerConfig
from .part import StageInput
from .transformer import Transformer


@dataclass(frozen=True)
class GPTConfig(TransformerConfig):
    """The shape of a GPT: see `TransformerConfig`. Raises ValueError for relative positions, which a `T5` has."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.position_embedding_type == "relative":
            raise ValueError(
                "position_embedding_type='relative': a GPT has learned_absolute or rope; a T5 has relative"
            )


class GPT(Transformer):
    """A decoder over ``comm``, the tensor group. Call `tplayers.initialize(model, seed)`, or load a checkpoint.

    forward(tokens) -> this rank's logits [b, s, padded vocabulary / comm.size];
    forward(tokens, labels) -> per-token losses [b, s] in nats, float32 (float64 of a float64 model), equal on all
    ranks, 0 where a label is -100.

    tokens, labels: int64 [b, s], equal on all ranks of ``comm``, s at most ``max_position_embeddings``.
    randomness: needed in a training pass with dropout. Every rank must run forward and backward.
    cache: the tokens before ``tokens``, which go through the model without them (`Transformer.hidden_states`).
    overlap_stream: a stream of ``comm`` on which the backward of column-parallel layers communicates
        (`column_parallel_linear`).
    part: the layers that this rank has. at: where in them a pass begins. A chunk without the output layer returns its
    activations [s, b, h], or this rank's shard of them, for the next one.
    context: the ranks that share each sequence (`Transformer`). ``labels`` are of whole sequences, and the results are
    of this rank's positions.

    config, expert_group, dtype: as in `Transformer`, with its errors.

    Layers are pre-LN, and GELU is the tanh form. The output layer is tied to the embedding, unless the configuration
    says otherwise. Raises ValueError for a shape that does not fit and, on the host if not compiled, for a number
    outside its range.

    With sequence_parallel, ``comm.size`` must divide s (else ValueError), and after a backward the gradients of some
    parameters are partial: call `sum_partial_gradients(model, comm)`.
    """

    config: GPTConfig

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        randomness: Randomness | None = None,
        cache: KeyValueCache | None = None,
        at: StageInput | None = None,
    ) -> Tensor:
        hidden = self.hidden_states(tokens, randomness, cache=cache, at=at)
        if not self.part.ends(at or StageInput()):
            return hidden
        if labels is None:
            return self.logits(hidden).transpose(0, 1)
        return self._losses(self._scores(hidden), self.own_labels(labels).t()).t()
