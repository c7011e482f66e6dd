"""The layers and models in canonical shards: a subclass of each, which `use_canonical_shards` makes a layer's class."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from commengine import Communicator, Stream
from tplayers.attention.cross_attention import CrossAttention
from tplayers.attention.head_split import HeadSplit
from tplayers.attention.key_value_cache import KeyValueCache, LayerCache
from tplayers.attention.rotary import Rotation
from tplayers.attention.self_attention import SelfAttention, padding_bias
from tplayers.checks import require_within
from tplayers.context.group import ContextGroup
from tplayers.context.ulysses import rows_for_shards, shards_for_rows
from tplayers.cross_entropy import Arithmetic, cross_entropy_of_shards
from tplayers.embedding import VocabParallelEmbedding, looked_up
from tplayers.experts.moe import MoE
from tplayers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from tplayers.mlp import GELUS, MLP, SwiGLU
from tplayers.models.bert import BERTEncoder, MaskedTokenHead
from tplayers.models.part import StageInput
from tplayers.models.relative_bias import RelativeBias
from tplayers.models.transformer import Transformer
from tplayers.norm import LayerNorm, RMSNorm
from tplayers.placement import without_partial_gradients
from tplayers.regions import communicates, gather_from_tensor_parallel_region, scatter_to_tensor_parallel_region
from tplayers.rng import Randomness, dropout_mask

from . import norms, pointwise
from .experts import CanonicalMoE, make_twins
from .products import ColumnWeight, columns, replicated, rows
from .shards import CanonicalShards, stacked, tree_sum, unstacked


def use_canonical_shards(model: nn.Module, comm: Communicator, count: int, parts: int | None = None) -> None:
    """Let the layers of ``model`` compute in ``count`` canonical shards (`tplayers.canonical`). Not collective.

    Losses, gradients and outputs then have the same bits at every tensor-parallel size that divides ``count``, with and
    without sequence parallelism and recomputation, if every backward is of one sample. No parameter's gradient is
    partial any more: the layers sum them themselves. Weights that are split by columns then lie transposed in memory,
    so that a shard of their columns is contiguous.

    comm: the tensor group of all layers, with ``order="tree"``. If ``model`` has a context group, it must have the same
    order, and share sequences by "ulysses". All its ranks then get the losses of whole sequences, and its gradients are
    complete. parts: of each sequence, in which products are computed; the bits are those of every context group of
    which the size divides ``parts`` (default: the size of the group). Raises ValueError, naming the layer, the sizes
    and what would work, where ``count`` does not divide a size or where a layer cannot compute so.
    """
    group: ContextGroup | None = getattr(model, "context", None)
    if group is not None and group.method != "ulysses":
        raise ValueError(
            f"context_method={group.method!r} has other bits on each number of ranks, because a row of scores is added "
            "up over their blocks of keys; valid: 'ulysses'"
        )
    context = None if group is None else group.comm
    sharing = 1 if context is None else context.size
    shards = CanonicalShards(count, comm, context, sharing if parts is None else parts)
    alone = CanonicalShards(count, comm)
    if shards.parts > sharing and comm.size > 1 and getattr(model, "sequence_parallel", False):
        raise ValueError("sequence_parallel excludes several canonical parts of a rank: it cuts a part of another size")
    if isinstance(model, BERTEncoder) and context is not None and comm.size > 1 and model.sequence_parallel:
        raise ValueError(
            "sequence_parallel excludes canonical shards of a BERT with a context group: its heads see all"
        )
    for name, module in model.named_modules():
        kind: Any = next((one for plain, one in _KINDS.items() if isinstance(module, plain)), None)
        if kind is None:
            if any(True for _ in module.parameters(recurse=False)):
                raise ValueError(f"{name or 'the model'}: {type(module).__name__} cannot compute in canonical shards")
            continue
        if isinstance(module, SelfAttention) and module.qk_norm is not None:
            raise ValueError(f"{name}: norms of queries and keys (qk_layernorm) exclude canonical shards")
        if isinstance(module, MoE) and shards.parts > 1:
            raise ValueError(f"{name}: experts exclude canonical parts: each computes all rows of a sample at once")
        sizes = _SIZES.get(kind, lambda module: {})(module)
        if (wrong := {of: size for of, size in sizes.items() if size % count}) != {}:
            said = ", ".join(f"{of}={size}" for of, size in wrong.items())
            raise ValueError(f"{name or 'the model'}: {count} canonical shards do not divide {said}")
        if not isinstance(module, kind):
            module.__class__ = _combined(kind, cast(Any, type(module)))
        # The heads of a BERT see whole sequences on every rank that shares them.
        vars(module)["canonical"] = alone if name.startswith(HEADS) else shards
        if isinstance(module, RowParallelLinear):
            module.weight.data = module.weight.data.t().contiguous().t()
    # Each of its rows has the gradient of one position.
    if shards.parts > 1 and isinstance(table := getattr(model, "position_embedding", None), Tensor):
        table.register_hook(shards.of_all_rows)  # type: ignore[no-untyped-call]
    without_partial_gradients(model)
    for module in model.modules():
        if isinstance(module, CanonicalMoE):
            make_twins(module)


#: the modules of a BERT that follow its last layer
HEADS = ("mlm_head", "pooler", "order_head")


@functools.cache
def _combined(kind: Any, plain: Any) -> Any:
    """The class of a ``plain`` layer that computes as ``kind``."""
    return type(plain.__name__, (kind, plain), {})


class _Columns(ColumnParallelLinear):
    canonical: CanonicalShards

    def forward(self, x: Tensor) -> Tensor:
        (parts,) = _fanned_out(x, [self], self.canonical)
        return unstacked(parts)


def _fanned_out(x: Tensor, layers: Sequence[ColumnParallelLinear], shards: CanonicalShards) -> tuple[Tensor, ...]:
    """The shards [blocks * own, ..., out_features / (blocks * C)] of the output of each of ``layers``.

    The layers communicate as one, and are alike but for their weights.
    """
    first = layers[0]
    weights = [(layer.weight, layer.bias, layer.blocks) for layer in layers]
    return _columns(x, weights, shards, split=first.sequence_parallel, stream=first.overlap_stream)


def _columns(
    x: Tensor, weights: Sequence[tuple[Tensor, Tensor | None, int]], shards: CanonicalShards, *, split: bool,
    stream: Stream | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """`columns` of each part of ``x``. weights: as `ColumnWeight`."""
    parts = shards.cut(x)
    of_layers = [
        [ColumnWeight(*both, blocks) for both in _uses(shards, len(parts), weight, bias)]
        for weight, bias, blocks in weights
    ]
    found = [
        columns(part, of_part, shards, split=split, stream=stream)
        for part, of_part in zip(parts, zip(*of_layers, strict=True), strict=True)
    ]
    return found[0] if len(found) == 1 else tuple(torch.cat(outputs, 1) for outputs in zip(*found, strict=True))


def _uses(
    shards: CanonicalShards, count: int, weight: Tensor, bias: Tensor | None
) -> list[tuple[Tensor, Tensor | None]]:
    """`CanonicalShards.uses` of a weight and of a bias, which may be missing."""
    biases = [None] * count if bias is None else shards.uses(bias, count)
    return list(zip(shards.uses(weight, count), biases, strict=True))


class _Rows(RowParallelLinear):
    canonical: CanonicalShards

    def forward(self, x: Tensor) -> Tensor:
        return _fanned_in(stacked(x, self.canonical.own), self, self.canonical)


def _fanned_in(x: Tensor, layer: RowParallelLinear, shards: CanonicalShards) -> Tensor:
    """The output of ``layer`` for the shards of its input, [own, ..., in_features / C]."""
    parts = shards.cut(x, 1)
    uses = zip(parts, _uses(shards, len(parts), layer.weight, layer.bias), strict=True)
    found = [rows(part, weight, bias, shards, split=layer.sequence_parallel) for part, (weight, bias) in uses]
    return found[0] if len(found) == 1 else torch.cat(found)


class _Replicated(ReplicatedLinear):
    canonical: CanonicalShards

    def forward(self, x: Tensor) -> Tensor:
        return replicated(x, self.weight, self.bias, self.canonical, split=self.sequence_parallel)


class _Embedding(VocabParallelEmbedding):
    canonical: CanonicalShards

    def forward(self, tokens: Tensor) -> Tensor:
        parts = self.canonical.cut(tokens)
        uses = zip(parts, self.canonical.uses(self.weight, len(parts)), strict=True)
        found = [self.rows_of(part, table) for part, table in uses]
        whole = found[0] if len(found) == 1 else torch.cat(found)
        # A sum of rows and of zeros, as on several ranks, is exact, but for the sign of a zero.
        return whole if communicates(self.comm) else whole + 0.0

    def logits(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return unstacked(_logit_shards(x, self, bias, self.canonical))


def _logit_shards(
    x: Tensor, layer: VocabParallelEmbedding | ColumnParallelLinear, bias: Tensor | None, shards: CanonicalShards
) -> Tensor:
    """The shards [own, ..., padded vocabulary / C] of an output layer's logits of ``x``.

    The layer may have a ``twin`` of its weight, a tensor in the same memory that gets the gradient of this use alone.
    """
    weight = vars(layer).get("twin", layer.weight), bias, 1
    (y,) = _columns(x, [weight], shards, split=layer.sequence_parallel, stream=layer.overlap_stream)
    return y


class _LayerNorm(LayerNorm):
    canonical: CanonicalShards

    def forward(self, x: Tensor) -> Tensor:
        return norms.layer_norm(x, self.weight, self.bias, self.eps, self.canonical, split=self.sequence_parallel)


class _RMSNorm(RMSNorm):
    canonical: CanonicalShards

    def forward(self, x: Tensor) -> Tensor:
        return norms.rms_norm(x, self.weight, self.eps, self.canonical, split=self.sequence_parallel)


class _MLP(MLP):
    canonical: CanonicalShards

    def forward(self, x: Tensor) -> Tensor:
        (up,) = _fanned_out(x, [self.up], self.canonical)
        active = torch.relu(up) if self.gelu is None else pointwise.gelu(up, GELUS[self.gelu])
        return _fanned_in(active, self.down, self.canonical)


class _SwiGLU(SwiGLU):
    canonical: CanonicalShards

    def forward(self, x: Tensor) -> Tensor:
        (both,) = _fanned_out(x, [self.gate_up], self.canonical)
        if self.gelu is None:
            return _fanned_in(pointwise.gated(both), self.down, self.canonical)
        gate, up = both.chunk(2)
        return _fanned_in(pointwise.gelu(gate.contiguous(), GELUS[self.gelu]) * up, self.down, self.canonical)


class _SelfAttention(SelfAttention):
    """Each shard is a group of heads, with tensors of its own."""

    canonical: CanonicalShards

    def forward(
        self,
        x: Tensor,
        randomness: Randomness | None = None,
        padding: Tensor | None = None,
        cache: LayerCache | None = None,
        rotation: Rotation | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        if cache is not None:
            return super().forward(x, randomness, padding, cache, rotation, bias)
        if self.grouped:
            q, kv = _fanned_out(x, [self.query, self.key_value], self.canonical)
            k, v = kv.chunk(2)
        else:
            q, k, v = _fanned_out(x, [self.qkv], self.canonical)[0].chunk(3)
        own, s, b, _ = q.shape
        group, first = self.canonical.context if self.context is not None else None, 0
        if group is not None:
            if rotation is not None:
                q, k = _turned(q, rotation, self.head_size), _turned(k, rotation, self.head_size)
                rotation = None
            sizes = [one.shape[-1] for one in (q, k, v)]
            every = shards_for_rows(torch.cat((q, k, v), -1), group)
            q, k, v = (one.contiguous() for one in torch.split(every, sizes, -1))
            first, s = group.rank * own // group.size, s * group.size
        if padding is not None:
            bias = padding_bias(padding, b, s, q.dtype, causal=self.causal)
        mine = slice(first, first + len(q))
        found = _attended(self, (q, k, v), (own, mine), self._drawn(randomness), bias, rotation)
        return _fanned_in(found if group is None else rows_for_shards(found, group), self.projection, self.canonical)


class _CrossAttention(CrossAttention):
    canonical: CanonicalShards

    def forward(  # type: ignore[override]
        self, x: Tensor, source: Tensor | tuple[Tensor, Tensor], randomness: Randomness | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        if not isinstance(source, Tensor):
            return super().forward(x, source, randomness, bias)
        (q,), (kv,) = (
            _fanned_out(one, [layer], self.canonical) for one, layer in ((x, self.query), (source, self.key_value))
        )
        own = len(q)
        found = _attended(self, (q, *kv.chunk(2)), (own, slice(own)), self._drawn(randomness), bias, None)
        return _fanned_in(found, self.projection, self.canonical)


def _attended(
    layer: SelfAttention, tensors: tuple[Tensor, ...], shards: tuple[int, slice],
    drawn: Tensor | int | None, bias: Tensor | None, rotation: Rotation | None,
) -> Tensor:  # fmt: skip
    """The attention of each shard: [shards, s, b, n]. tensors: queries, keys, values, [shards, s or keys, b, n].

    shards: the number of those of which ``drawn`` and a ``bias`` of several heads are, and which of them these are.
    """
    (own, mine), (q, k, *_) = shards, tensors
    if isinstance(drawn, Tensor) and not layer.recompute_core:  # at once: it takes less time than for each group
        drawn = dropout_mask(layer.attention_dropout, drawn, q.shape[1], k.shape[1])
    keys = drawn.chunk(own, dim=1) if isinstance(drawn, Tensor) else [drawn] * own
    biases = [bias] * own if bias is None or bias.shape[1] == 1 else bias.chunk(own, dim=1)
    parts = []
    for *shard, of_keys, of_bias in zip(*map(torch.unbind, tensors), keys[mine], biases[mine], strict=True):
        heads = [part.unflatten(-1, (-1, layer.head_size)) for part in shard]
        if rotation is not None:
            heads[:2] = rotation(heads[0]), rotation(heads[1])
        of_q, of_k, of_v = (part.permute(1, 2, 0, 3) for part in heads)
        parts.append(layer._kept(of_q, of_k, of_v, of_keys, of_bias).permute(2, 0, 1, 3).flatten(2))
    return torch.stack(parts)


def _turned(x: Tensor, rotation: Rotation, head_size: int) -> Tensor:
    """Queries or keys [own, s, b, n] of several shards, turned."""
    return torch.stack([rotation(one.unflatten(-1, (-1, head_size))).flatten(-2) for one in x.unbind()])  # type: ignore[no-untyped-call]


class _MaskedTokenHead(MaskedTokenHead):
    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.norm(pointwise.gelu(self.dense(x), GELUS[self.gelu]))
        return found


#: of a cross-entropy with the same bits at every tensor-parallel size
ARITHMETIC = Arithmetic(
    functools.partial(pointwise.pointwise_, torch.exp), functools.partial(pointwise.pointwise, torch.log), tree_sum
)


class _Transformer(Transformer):
    """With a context group all its ranks have the losses of whole sequences."""

    canonical: CanonicalShards

    @property
    def partial_losses(self) -> bool:
        return False

    def _of_types(self, tokens: Tensor, token_types: Tensor | None) -> Tensor:
        if self.canonical.parts == 1:
            return super()._of_types(tokens, token_types)
        types = torch.zeros_like(tokens) if token_types is None else token_types
        require_within(types, self.config.num_tokentypes, "a token type")
        parts = self.canonical.cut(types.t())
        uses = zip(parts, self.canonical.uses(self.token_type_embedding, len(parts)), strict=True)
        return torch.cat([looked_up(part, table) for part, table in uses])

    def _own_rows(self, look_up: Callable[[slice], Tensor], s: int) -> Tensor:
        if not self.sequence_parallel:
            return super()._own_rows(look_up, s)
        # The gradient is then gathered, and every rank adds up all of it in the same order.
        return scatter_to_tensor_parallel_region(look_up(slice(0, s)), self.comm, 0)

    @property
    def _positions_multiple(self) -> int:
        return self.canonical.count

    @property
    def _of_head(self) -> CanonicalShards:
        """The shards of the output layer, and of which part of a sequence it has the rows."""
        return self.canonical

    def _scores(self, hidden: Tensor, bias: Tensor | None = None) -> Tensor:
        return _logit_shards(hidden, self.output_layer, bias, self._of_head)

    def logits(self, hidden: Tensor, bias: Tensor | None = None) -> Tensor:
        return unstacked(self._scores(hidden, bias))

    def _losses(self, scores: Tensor, labels: Tensor) -> Tensor:
        shards = self._of_head
        found = cross_entropy_of_shards(scores, labels, shards.comm, self.config.vocab_size, True, ARITHMETIC)
        return found if self.context is None or shards.context is None else self._gathered(found)

    def _gathered(self, part: Tensor) -> Tensor:
        """The rows of all ranks of the context group, in the order of the sequence."""
        assert self.canonical.context is not None
        return gather_from_tensor_parallel_region(part, self.canonical.context, 0)


class _BERT(_Transformer, BERTEncoder):
    """The heads see whole sequences on every rank of a context group."""

    @property
    def head_context(self) -> None:
        return None

    @property
    def _of_head(self) -> CanonicalShards:
        return CanonicalShards(self.canonical.count, self.canonical.comm)

    def hidden_states(
        self, tokens: Tensor, randomness: Randomness | None = None, token_types: Tensor | None = None,
        padding: Tensor | None = None, cache: KeyValueCache | None = None, at: StageInput | None = None,
    ) -> Tensor:  # fmt: skip
        found = super().hidden_states(tokens, randomness, token_types, padding, cache, at)
        return self._gathered(found) if self.context is not None and self.part.ends(at or StageInput()) else found


#: the layers that can, and the classes that they get
_KINDS: dict[type[nn.Module], type[nn.Module]] = {
    ColumnParallelLinear: _Columns, RowParallelLinear: _Rows, ReplicatedLinear: _Replicated,
    VocabParallelEmbedding: _Embedding, LayerNorm: _LayerNorm, RMSNorm: _RMSNorm, MLP: _MLP, SwiGLU: _SwiGLU,
    MoE: CanonicalMoE, CrossAttention: _CrossAttention, SelfAttention: _SelfAttention, RelativeBias: RelativeBias,
    MaskedTokenHead: _MaskedTokenHead, BERTEncoder: _BERT, Transformer: _Transformer,
}  # fmt: skip

#: the sizes of a layer that the shards must divide
_SIZES: dict[type[nn.Module], Callable[[Any], dict[str, int]]] = {
    _Columns: lambda one: {"out_features": one.weight.shape[0] * one.comm.size // one.blocks},
    _Rows: lambda one: {"in_features": one.weight.shape[1] * one.comm.size},
    _Embedding: lambda one: {"num_embeddings": one.num_embeddings},
    _SelfAttention: lambda one: _heads(one.split), _CrossAttention: lambda one: _heads(one.split),
}  # fmt: skip


def _heads(split: HeadSplit) -> dict[str, int]:
    return {"num_attention_heads": split.groups * split.queries, "num_query_groups": split.groups}
