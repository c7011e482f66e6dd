"""The layers and models in canonical shards: a subclass of each, which `use_canonical_shards` makes a layer's class."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from commengine import Communicator
from tplayers.attention.key_value_cache import LayerCache
from tplayers.attention.rotary import Rotation
from tplayers.attention.self_attention import SelfAttention, padding_bias
from tplayers.cross_entropy import Arithmetic, cross_entropy_of_shards
from tplayers.embedding import VocabParallelEmbedding
from tplayers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from tplayers.mlp import GELUS, MLP, SwiGLU
from tplayers.models.bert import MaskedTokenHead
from tplayers.models.transformer import Transformer
from tplayers.norm import LayerNorm, RMSNorm
from tplayers.placement import without_partial_gradients
from tplayers.regions import communicates, scatter_to_tensor_parallel_region
from tplayers.rng import Randomness, dropout_mask

from . import norms, pointwise
from .products import ColumnWeight, columns, replicated, rows
from .shards import CanonicalShards, stacked, tree_sum, unstacked


def use_canonical_shards(model: nn.Module, comm: Communicator, count: int) -> None:
    """Let the layers of ``model`` compute in ``count`` canonical shards (`tplayers.canonical`). Not collective.

    Losses, gradients and outputs then have the same bits at every tensor-parallel size that divides ``count``, with and
    without sequence parallelism and recomputation, if every backward is of one sample. No parameter's gradient is
    partial any more: the layers sum them themselves. Weights that are split by columns then lie transposed in memory,
    so that a shard of their columns is contiguous.

    comm: the tensor group of all layers, with ``order="tree"``. Raises ValueError, naming the layer, the sizes and what
    would work, where ``count`` does not divide a size or where a layer has parameters and cannot compute so.
    """
    shards = CanonicalShards(count, comm)
    for name, module in model.named_modules():
        kind: Any = next((one for plain, one in _KINDS.items() if isinstance(module, plain)), None)
        if kind is None:
            if any(True for _ in module.parameters(recurse=False)):
                raise ValueError(f"{name or 'the model'}: {type(module).__name__} cannot compute in canonical shards")
            continue
        sizes = _SIZES.get(kind, lambda module: {})(module)
        if (wrong := {of: size for of, size in sizes.items() if size % count}) != {}:
            said = ", ".join(f"{of}={size}" for of, size in wrong.items())
            raise ValueError(f"{name or 'the model'}: {count} canonical shards do not divide {said}")
        if not isinstance(module, kind):
            module.__class__ = _combined(kind, cast(Any, type(module)))
        vars(module)["canonical"] = shards
        if isinstance(module, RowParallelLinear):
            module.weight.data = module.weight.data.t().contiguous().t()
    without_partial_gradients(model)


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
    weights = [ColumnWeight(layer.weight, layer.bias, layer.blocks) for layer in layers]
    return columns(x, weights, shards, split=first.sequence_parallel, stream=first.overlap_stream)


class _Rows(RowParallelLinear):
    canonical: CanonicalShards

    def forward(self, x: Tensor) -> Tensor:
        return _fanned_in(stacked(x, self.canonical.own), self, self.canonical)


def _fanned_in(x: Tensor, layer: RowParallelLinear, shards: CanonicalShards) -> Tensor:
    """The output of ``layer`` for the shards of its input, [own, ..., in_features / C]."""
    return rows(x, layer.weight, layer.bias, shards, split=layer.sequence_parallel)


class _Replicated(ReplicatedLinear):
    canonical: CanonicalShards

    def forward(self, x: Tensor) -> Tensor:
        return replicated(x, self.weight, self.bias, self.canonical, split=self.sequence_parallel)


class _Embedding(VocabParallelEmbedding):
    canonical: CanonicalShards

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = super().forward(tokens)
        # A sum of rows and of zeros, as on several ranks, is exact, but for the sign of a zero.
        return found if communicates(self.comm) else found + 0.0

    def logits(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return unstacked(_logit_shards(x, self, bias, self.canonical))


def _logit_shards(
    x: Tensor, layer: VocabParallelEmbedding | ColumnParallelLinear, bias: Tensor | None, shards: CanonicalShards
) -> Tensor:
    """The shards [own, ..., padded vocabulary / C] of an output layer's logits of ``x``.

    The layer may have a ``twin`` of its weight, a tensor in the same memory that gets the gradient of this use alone.
    """
    weight = ColumnWeight(vars(layer).get("twin", layer.weight), bias)
    (y,) = columns(x, [weight], shards, split=layer.sequence_parallel, stream=layer.overlap_stream)
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
        return _fanned_in(pointwise.gelu(up, GELUS[self.gelu]), self.down, self.canonical)


class _SwiGLU(SwiGLU):
    canonical: CanonicalShards

    def forward(self, x: Tensor) -> Tensor:
        (both,) = _fanned_out(x, [self.gate_up], self.canonical)
        return _fanned_in(pointwise.gated(both), self.down, self.canonical)


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
    ) -> Tensor:
        if cache is not None:
            return super().forward(x, randomness, padding, cache, rotation)
        if self.grouped:
            q, kv = _fanned_out(x, [self.query, self.key_value], self.canonical)
            k, v = kv.chunk(2)
        else:
            q, k, v = _fanned_out(x, [self.qkv], self.canonical)[0].chunk(3)
        own, s, b, _ = q.shape
        drawn = self._drawn(randomness)
        if isinstance(drawn, Tensor) and not self.recompute_core:
            drawn = dropout_mask(self.attention_dropout, drawn, s, s)  # at once: it takes less time than for each group
        keys = drawn.chunk(own, dim=1) if isinstance(drawn, Tensor) else [drawn] * own
        bias = None if padding is None else padding_bias(padding, b, s, q.dtype, causal=self.causal)
        parts = []
        for *group, of_group in zip(q.unbind(), k.unbind(), v.unbind(), keys, strict=True):
            heads = [part.view(s, b, -1, self.head_size) for part in group]
            if rotation is not None:
                heads[:2] = rotation(heads[0]), rotation(heads[1])
            of_q, of_k, of_v = (part.permute(1, 2, 0, 3) for part in heads)
            mine = self._context(of_q, of_k, of_v, of_group, bias)
            parts.append(mine.permute(2, 0, 1, 3).reshape(s, b, -1))
        return _fanned_in(torch.stack(parts), self.projection, self.canonical)


class _MaskedTokenHead(MaskedTokenHead):
    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.norm(pointwise.gelu(self.dense(x), GELUS[self.gelu]))
        return found


#: of a cross-entropy with the same bits at every tensor-parallel size
ARITHMETIC = Arithmetic(
    functools.partial(pointwise.pointwise_, torch.exp), functools.partial(pointwise.pointwise, torch.log), tree_sum
)


class _Transformer(Transformer):
    canonical: CanonicalShards

    def _own_rows(self, look_up: Callable[[slice], Tensor], s: int) -> Tensor:
        if not self.sequence_parallel:
            return super()._own_rows(look_up, s)
        # The gradient is then gathered, and every rank adds up all of it in the same order.
        return scatter_to_tensor_parallel_region(look_up(slice(0, s)), self.comm, 0)

    @property
    def _positions_multiple(self) -> int:
        return self.canonical.count

    def _scores(self, hidden: Tensor, bias: Tensor | None = None) -> Tensor:
        return _logit_shards(hidden, self.output_layer, bias, self.canonical)

    def _losses(self, scores: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy_of_shards(scores, labels, self.canonical.comm, self.config.vocab_size, True, ARITHMETIC)


#: the layers that can, and the classes that they get
_KINDS: dict[type[nn.Module], type[nn.Module]] = {
    ColumnParallelLinear: _Columns, RowParallelLinear: _Rows, ReplicatedLinear: _Replicated,
    VocabParallelEmbedding: _Embedding, LayerNorm: _LayerNorm, RMSNorm: _RMSNorm, MLP: _MLP, SwiGLU: _SwiGLU,
    SelfAttention: _SelfAttention, MaskedTokenHead: _MaskedTokenHead, Transformer: _Transformer,
}  # fmt: skip

#: the sizes of a layer that the shards must divide
_SIZES: dict[type[nn.Module], Callable[[Any], dict[str, int]]] = {
    _Columns: lambda one: {"out_features": one.weight.shape[0] * one.comm.size // one.blocks},
    _Rows: lambda one: {"in_features": one.weight.shape[1] * one.comm.size},
    _Embedding: lambda one: {"num_embeddings": one.num_embeddings},
    _SelfAttention: lambda one: {
        "num_attention_heads": one.split.groups * one.split.queries, "num_query_groups": one.split.groups
    },
}  # fmt: skip
