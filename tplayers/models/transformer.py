"""Transformer: the embedding, the layers and the output layer that GPT and BERT share (paper, section 3)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from commengine import Communicator, Stream
from tplayers.attention.key_value_cache import KeyValueCache
from tplayers.attention.rotary import Rotation, frequencies, rotation
from tplayers.attention.self_attention import SelfAttention, needed, real_tokens
from tplayers.checks import require_within
from tplayers.context.group import ContextGroup
from tplayers.cross_entropy import vocab_parallel_cross_entropy
from tplayers.embedding import VocabParallelEmbedding, looked_up
from tplayers.experts.losses import RouterLosses
from tplayers.linear import ColumnParallelLinear
from tplayers.norm import NORMS, LayerNorm, RMSNorm
from tplayers.placement import Normal, Placement, add_parameter, require_divisible
from tplayers.rng import Randomness, dropout

from .block import TransformerBlock, first_row
from .config import TransformerConfig
from .part import ModelPart, StageInput


class Transformer(nn.Module):
    """The embedding, the layers and the output layer over ``comm``, the tensor group: what `GPT` and `BERT` share.

    config: after pre-LN layers a final norm follows; before post-LN layers the sum of the embeddings is normalised
        instead. A subclass adds its heads in `add_heads`.
    overlap_stream: a stream of ``comm`` on which the backward of column-parallel layers communicates
        (`column_parallel_linear`).
    part: the layers that this rank has; None for all. Parameters have the same names in every part.
    expert_group: the ranks that share the experts of each layer (`MoE`), if ``config`` has experts; None: each rank has
        all of them.
    context: the ranks that share each sequence (`ContextGroup`), or None. All of them get the whole sequences, and the
        labels of whole sequences, and compute their own positions: s in the shapes of results counts these. Each rank's
        gradients are those of its positions' losses: the sum over the group is that of all.
    dtype: of the parameters; None for torch's default.

    Every rank of ``comm`` constructs it: ranks that share a head of keys and values form a group of their own
    (`Communicator.block`). Raises ValueError if ``config`` does not split over ``comm``
    (`TransformerConfig.require_parallel`), ``part`` is of another number of layers, or ``expert_group`` has several
    ranks and ``config`` no experts.

    Inside, activations are [s, b, h], so that a sequence shard is contiguous.
    """

    embedding: VocabParallelEmbedding  # on the first part, and if it is tied on the last one
    position_embedding: nn.Parameter  # if positions are learned
    token_type_embedding: nn.Parameter  # if there are token types
    embedding_norm: LayerNorm | RMSNorm  # in a post-LN model
    final_norm: LayerNorm | RMSNorm  # in a pre-LN model
    output: ColumnParallelLinear  # if it is not tied to the embedding

    def __init__(
        self,
        config: TransformerConfig,
        comm: Communicator,
        *,
        overlap_stream: Stream | None = None,
        dtype: torch.dtype | None = None,
        part: ModelPart | None = None,
        context: ContextGroup | None = None,
        expert_group: Communicator | None = None,
    ) -> None:
        super().__init__()
        config.require_parallel(comm.size)
        if config.experts is None and expert_group is not None and expert_group.size > 1:
            raise ValueError("expert_group needs a model with experts: num_experts is None")
        self.expert_group = expert_group
        #: of all layers; None for a model without experts
        self.router_losses: RouterLosses | None = None
        if config.experts is not None:
            self.router_losses = RouterLosses(config.moe_aux_loss_coeff, config.moe_z_loss_coeff)
        #: None also for a group of this rank alone
        self.context = None if context is None or context.comm.size == 1 else context
        self.config = config
        self.part = part = part or ModelPart.whole(config.total_layers)
        if part.layers != config.total_layers:
            said = f"num_layers={config.num_layers}: the model has {config.total_layers} layers"
            raise ValueError(f"{said}, and the part is one of {part.layers}")
        self.comm = comm
        self.causal = config.causal
        self.sequence_parallel = config.sequence_parallel
        hidden, eps, norm = config.hidden_size, config.norm_epsilon, NORMS[config.normalization]
        init = Normal(config.init_method_std)
        split: dict[str, Any] = {"sequence_parallel": config.sequence_parallel, "dtype": dtype}
        self._rotary = config.position_embedding_type == "rope"
        self._learned = config.position_embedding_type == "learned_absolute"
        untied = config.untie_embeddings_and_output_weights
        if part.first or (part.last and not untied):
            self.embedding = VocabParallelEmbedding(
                config.padded_vocab_size, hidden, comm, overlap_stream=overlap_stream, init=init, **split
            )
        if part.first and self._learned:
            positions = Placement((config.max_position_embeddings, hidden), init, partial=config.sequence_parallel)
            add_parameter(self, "position_embedding", positions, dtype)
        if part.first and config.num_tokentypes:
            types = Placement((config.num_tokentypes, hidden), init, partial=config.sequence_parallel)
            add_parameter(self, "token_type_embedding", types, dtype)
        if part.first and config.norm_placement == "post":
            self.embedding_norm = norm(hidden, eps, **split)
        mine = set(part.numbers)
        # None stands for a layer of another rank, so that the names of parameters have the layer's number.
        self.layers = nn.ModuleList(
            self.new_layer(
                number,
                overlap_stream=overlap_stream,
                context=self.context,
                expert_group=expert_group,
                router_losses=self.router_losses,
                dtype=dtype,
            )
            if number in mine
            else None  # type: ignore[misc]  # torch skips it, and its annotations do not know that
            for number in range(config.total_layers)
        )
        if part.last and config.norm_placement == "pre":
            self.final_norm = norm(hidden, eps, **split)
        if part.last and untied:
            self.output = ColumnParallelLinear(
                hidden, config.padded_vocab_size, comm, bias=False, init=init, overlap_stream=overlap_stream, **split
            )
        if part.last:
            self.add_heads(dtype)

    def new_layer(self, number: int, **options: Any) -> TransformerBlock:
        """Layer ``number`` of the model, from 0."""
        return TransformerBlock(self.config, self.comm, site=f"layers.{number}", **options)

    def add_heads(self, dtype: torch.dtype | None) -> None:
        """Give the model, which has everything else, the modules of a subclass. Here: none."""

    def hidden_states(
        self,
        tokens: Tensor,
        randomness: Randomness | None = None,
        token_types: Tensor | None = None,
        padding: Tensor | None = None,
        cache: KeyValueCache | None = None,
        at: StageInput | None = None,
    ) -> Tensor:
        """The last layer's output [s, b, h], normalised, for tokens [b, s]; with a context group, of its positions.

        It is equal on all ranks, or with sequence_parallel this rank's shard [s / comm.size, b, h].

        tokens: int64 [b, s], equal on all ranks, s at most ``max_position_embeddings``.
        token_types: int64 [b, s]; None for type 0 everywhere. padding: as in `SelfAttention`.
        cache: of `new_cache`, with the tokens before ``tokens``; it then has these, too. The caller says how many of
        them are real (`KeyValueCache.advance`). Only without sequence parallelism (else ValueError), and as in
        `SelfAttention`.
        at: the chunk of this rank's part, and its input; None for the first chunk. The result is the output of the
        chunk's last layer, normalised if that is the model's last. The chunks of a pass with a cache go in their order.

        Every rank of the model's groups calls it, and runs its backward. Raises ValueError for a shape that does not
        fit, a sequence that is too long, token types of a model without any, and a training pass with dropout and
        without ``randomness``; on the host if not compiled, for a number outside its range, too.
        """
        s = tokens.shape[1]
        config, at = self.config, at or StageInput()
        total = s if cache is None else max(cache.lengths) + s
        if total > config.max_position_embeddings:
            raise ValueError(
                f"a sequence of {total} tokens exceeds max_position_embeddings={config.max_position_embeddings}"
            )
        if token_types is not None and token_types.shape != tokens.shape:
            raise ValueError(f"token_types {list(token_types.shape)} must be {list(tokens.shape)}, as the tokens are")
        if padding is not None:
            padding = real_tokens(padding, *tokens.shape)  # once, not in every layer
        if self.context is not None:
            if cache is not None:
                raise ValueError("a key-value cache excludes a context group, whose ranks have parts of a sequence")
            tokens = self.context.take(tokens, 1)
            token_types = None if token_types is None else self.context.take(token_types, 1)
            s = tokens.shape[1]
        if self.sequence_parallel:
            require_divisible(self.comm.size, sequence_length=s)
            if cache is not None:
                raise ValueError("a key-value cache excludes sequence_parallel, because a new token has no shards")
        if token_types is not None and not config.num_tokentypes:
            raise ValueError("token_types need a model with num_tokentypes above 0")
        begins = self.part.begins(at)
        positions: slice | Tensor | None = None
        if cache is not None:
            positions = cache.begin(s) if at.chunk == 0 else cache.positions
        x = self._embedded(tokens, positions, randomness, token_types) if begins else at.received
        assert x is not None
        turned = self._rotation(self._at(slice(0, s), s) if positions is None else positions) if self._rotary else None
        numbers = self.part.chunks[at.chunk]
        caches = [None] * len(numbers) if cache is None else cache.layers[self.part.numbers.index(numbers.start) :]
        for number, of_layer in zip(numbers, caches, strict=False):
            x = self.layers[number](x, randomness, padding, of_layer, turned)
        if self.part.ends(at) and config.norm_placement == "pre":
            normed: Tensor = self.final_norm(x)
            return normed
        return x

    def _embedded(
        self, tokens: Tensor, positions: slice | Tensor | None, randomness: Randomness | None,
        token_types: Tensor | None, site: str = "embedding",
    ) -> Tensor:  # fmt: skip
        """The input of the first layer. positions: of a cache; None if there is none. site: of the dropout."""
        s, config = tokens.shape[1], self.config
        x: Tensor = self.embedding(tokens.t())
        if self._learned:
            # [s, h], or [b, s, h] where the rows differ
            table = self.position_embedding
            if positions is None:
                of_positions = self._own_rows(lambda rows: table[self._at(rows, s)], s)
            else:
                of_positions = table[positions]
            x = x + (of_positions.unsqueeze(1) if of_positions.dim() == 2 else of_positions.transpose(0, 1))
        if config.num_tokentypes:
            x = x + self._of_types(tokens, token_types)
        if config.norm_placement == "post":
            x = self.embedding_norm(x)
        if self.training and config.hidden_dropout > 0:
            first = first_row(x, self.comm, self.sequence_parallel, self.context)
            x = dropout(x, config.hidden_dropout, needed(randomness, site).keys(site), first)
        return x

    def activations(self, tokens: Tensor) -> Tensor:
        """Memory for the activations between two layers for ``tokens`` [b, s]: [s, b, h], or this rank's shard."""
        b, s = tokens.shape
        ranks = self.comm.size if self.sequence_parallel else 1
        ranks *= 1 if self.context is None else self.context.comm.size
        return self._weight.new_empty(s // ranks, b, self.config.hidden_size)

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return self._weight.device

    @property
    def _weight(self) -> Tensor:
        """A weight of this part, which has the dtype and the device of all."""
        found: Tensor = cast(TransformerBlock, self.layers[self.part.chunks[0].start]).attention_norm.weight
        return found

    def new_cache(self, batch: int, capacity: int) -> KeyValueCache:
        """An empty cache for ``batch`` rows of at most ``capacity`` tokens, of this rank's heads. Not collective."""
        attention = self.layers[self.part.chunks[0].start].attention
        assert isinstance(attention, SelfAttention)
        weight = self._weight
        return KeyValueCache(
            len(self.part.numbers), batch, attention.kv_heads, attention.head_size, capacity, dtype=weight.dtype,
            device=weight.device,
        )  # fmt: skip

    def _rotation(self, positions: slice | Tensor) -> Rotation:
        """The rotation of queries and keys at ``positions``, the same in every layer."""
        config, weight = self.config, self._weight
        if isinstance(positions, slice):
            positions = torch.arange(positions.start, positions.stop, dtype=torch.int64, device=weight.device)
        turns = frequencies(config.head_size, config.rotary_base, config.rope_scaling, weight.device)
        return rotation(positions, turns, weight.dtype)

    def _of_types(self, tokens: Tensor, token_types: Tensor | None) -> Tensor:
        """The embedding of the token types at this rank's positions: [s, b, h], or with sequence_parallel its shard."""
        if token_types is None:
            token_types = torch.zeros_like(tokens)
        require_within(token_types, self.config.num_tokentypes, "a token type")
        types, table = token_types.t(), self.token_type_embedding
        return self._own_rows(lambda rows: looked_up(types[rows], table), tokens.shape[1])

    def _at(self, rows: slice, s: int) -> slice | Tensor:
        """The positions of some of the ``s`` rows of this rank of the context group."""
        return rows if self.context is None else self.context.positions(s * self.context.comm.size, self._weight)[rows]

    def _own_rows(self, look_up: Callable[[slice], Tensor], s: int) -> Tensor:
        """What ``look_up`` finds at this rank's positions: all ``s``, or with sequence_parallel those of its shard."""
        if not self.sequence_parallel:
            return look_up(slice(0, s))
        return look_up(slice(self.comm.rank * s // self.comm.size, (self.comm.rank + 1) * s // self.comm.size))

    def whole(self) -> Self:
        """This model, if it has all layers and experts, or the model that it is a part of, on torch's meta device.

        Its parameters have the global names and placements. Not collective.
        """
        if self.part.first and self.part.last and (self.expert_group is None or self.expert_group.size == 1):
            return self
        found: Self | None = vars(self).get("_whole")  # not as a module of this one
        if found is None:
            with torch.device("meta"):
                found = vars(self)["_whole"] = type(self)(self.config, self.comm, dtype=self._weight.dtype)
        return found

    @property
    def partial_losses(self) -> bool:
        """Whether the losses are those of this rank's positions, so that a context group adds them up."""
        return self.context is not None

    @contextlib.contextmanager
    def without_context(self) -> Iterator[None]:
        """In this block each rank of the context group computes whole sequences by itself, as without such a group."""
        shared = [(module, module.context) for module in self.modules() if getattr(module, "context", None) is not None]
        for module, _ in shared:
            module.context = None  # type: ignore[assignment]
        try:
            yield
        finally:
            for module, context in shared:
                module.context = context

    # The output layer ---------------------------------------------------------------------------------------------

    @property
    def second_copy(self) -> str | None:
        """The name of the parameter of which another part has the first copy: a tied weight, on the last part."""
        return self.tied if self.part.last and not self.part.first else None

    @property
    def tied(self) -> str | None:
        """The name of the weight that the embedding and the output layer share; None if each has its own."""
        return None if self.config.untie_embeddings_and_output_weights else "embedding.weight"

    @property
    def last_module(self) -> nn.Module:
        """The module of which the result is that of `hidden_states`, on the part with the output layer."""
        return self.final_norm if self.config.norm_placement == "pre" else self.layers[-1]

    @property
    def output_layer(self) -> ColumnParallelLinear | VocabParallelEmbedding:
        """The layer of which the weight [padded vocabulary / comm.size, h] gives this rank's logits."""
        return self.output if self.config.untie_embeddings_and_output_weights else self.embedding

    def logits(self, hidden: Tensor, bias: Tensor | None = None) -> Tensor:
        """This rank's logits [..., padded vocabulary / comm.size] of the result of `hidden_states` [..., h].

        bias: of a tied output layer, this rank's part. With sequence_parallel ``hidden`` is this rank's shard
        [s / comm.size, ..., h], and the logits are of all s positions. Every rank calls it, and runs its backward.
        """
        if self.config.untie_embeddings_and_output_weights:
            found: Tensor = self.output(hidden)
            return found
        return self.embedding.logits(hidden, bias)

    def _scores(self, hidden: Tensor, bias: Tensor | None = None) -> Tensor:
        """The logits [s, b, v / p] in the form that `_losses` takes."""
        return self.logits(hidden, bias)

    def own_labels(self, labels: Tensor) -> Tensor:
        """Of ``labels`` [b, s] those of this rank's positions."""
        return labels if self.context is None else self.context.take(labels, 1)

    def _losses(self, scores: Tensor, labels: Tensor) -> Tensor:
        """The losses [s, b] for ``labels`` [s, b]. ``scores`` are overwritten."""
        return vocab_parallel_cross_entropy(
            scores, labels, self.comm, vocab_size=self.config.vocab_size, overwrite=True
        )
