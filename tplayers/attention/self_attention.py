"""Self-attention split by heads (paper, section 3, Figure 3b)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, Unpack, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commengine import Communicator
from tplayers.checks import require_within
from tplayers.context.group import ContextGroup
from tplayers.linear import DEFAULT_INIT, ColumnParallelLinear, LinearOptions, RowParallelLinear, columns_together
from tplayers.norm import NORMS, Normalization
from tplayers.placement import Normal, require_one_of
from tplayers.recompute import recomputed
from tplayers.regions import gather_from_sequence_parallel_region
from tplayers.rng import Randomness, dropout, dropped, head_offsets, seeded

from .head_split import split_heads
from .key_value_cache import LayerCache
from .rotary import Rotation

#: How the mask of attention dropout is drawn. "position": as a function of position, which is the same at every TP and
#: DP size. "fused": by the kernel that computes attention, anew on each rank.
DropoutMask: TypeAlias = Literal["position", "fused"]

DROPOUT_MASKS = get_args(DropoutMask)


class SelfAttention(nn.Module):
    """Multi-head self-attention. Each rank computes its own heads, and the g of the output projection sums them.

    One all-reduce forward and one backward.

    hidden_size, num_heads: of the whole layer. ``comm.size`` must divide the heads (else ValueError). The rows of the
    fused weight are [queries; keys; values], each ordered by head.
    head_size: None for hidden_size / num_heads, which must then be an integer (else ValueError).
    query_groups: heads of keys and values (grouped queries, Ainslie et al. 2023); None for ``num_heads``. If they are
        fewer, query head i uses number i // (num_heads / query_groups), and there are two weights: that of the queries,
        and [keys; values]. Both read x through one f. ``comm.size`` divides the groups, or the groups divide it (else
        ValueError). In the second case a rank holds a part of the rows of one head of keys and values. The ranks that
        share it, a `Communicator.block` of the group, all-gather its keys and values, and a reduce-scatter in the
        backward sums their gradients.
    pad_heads: heads that ``comm.size`` does not fit are padded with heads of zeros (`split_heads`). They add nothing to
        the output, get gradients of 0, and stay 0; the global tensors do not have them (`Placement.padded`).
    bias, qkv_bias: of the projection, and of queries, keys and values.
    output_init: initial values of the projection that ends the residual branch.
    site: the name of this layer's dropout mask.
    options: sequence_parallel, overlap_stream, init and dtype, as in `ColumnParallelLinear`.
    recompute_core: keep queries, keys and values, and compute scores, softmax and dropout again in the backward. This
        is the selective recomputation of Korthikanti et al. 2022, section 5. It communicates nothing and changes no
        number.

    dropout_mask: "position" draws the mask of attention dropout as a function of position (`rng`): the layer computes
        the same at every TP and DP size. No fused kernel takes such a mask, so the scores [b, heads, s, s] exist in
        memory. "fused" lets `scaled_dot_product_attention` draw the mask, from a seed of (seed, iteration, samples,
        site, rank in the tensor group): a fused kernel then computes attention in training, too, and the loss depends
        on the TP and DP size and on the device. Recomputation draws the same mask. It does not compile.

    padding: the number of real tokens of each sample, int64 [b], which come first; or bool [b, s], True where a token
        is real. No token attends to the others; in a sample without real tokens all count as real. None: all are real.

    cache: this layer's keys and values of the tokens before x. x attends to them, too, and its own are added
        (`KeyValueCache`). It needs ``causal``, evaluation mode and no ``padding`` (else ValueError). It
        holds `kv_heads` of this rank, with rotated keys.

    rotation: turns queries and keys, of the positions of the whole sequence (`rotary.Rotation`); None: does not.

    bias: added to the scores in place of ``padding`` and of the causal mask, which it holds, too: [1 or b, 1 or this
    rank's heads, s, keys], with the keys of a cache among them. With positions that are relative it is a table's
    (`RelativeBias`).

    qk_norm: the norm of each head's queries and keys, before they are rotated; None for none. norm_epsilon: of it.
    scale: of the scores; None for 1 / sqrt(head_size).

    context: the ranks that share each sequence, or None. x then has this rank's positions (`ContextGroup.positions`),
        ``rotation`` is of these, ``padding`` is of the whole sequence, and there is no ``cache`` (else ValueError). Its
        ``causal`` must be the layer's (else ValueError). With "ring" and "gather" the scores never exist as a whole, so
        ``recompute_core`` changes nothing.

    forward: x [s, b, h], equal on all ranks -> the same. With sequence_parallel: x [s / comm.size, b, h], this rank's
    sequence shard -> the same; ``padding`` is of the whole sequence. Without attention dropout the core is
    `scaled_dot_product_attention`.
    """

    #: whether the queries have a layer of their own
    separate = False

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        comm: Communicator,
        *,
        causal: bool = True,
        head_size: int | None = None,
        query_groups: int | None = None,
        pad_heads: bool = False,
        bias: bool = True,
        qkv_bias: bool = True,
        attention_dropout: float = 0.0,
        dropout_mask: DropoutMask = "position",
        recompute_core: bool = False,
        qk_norm: Normalization | None = None,
        norm_epsilon: float = 1e-5,
        scale: float | None = None,
        output_init: Normal = DEFAULT_INIT,
        site: str = "attention",
        context: ContextGroup | None = None,
        **options: Unpack[LinearOptions],
    ) -> None:
        super().__init__()
        require_one_of(DROPOUT_MASKS, dropout_mask=dropout_mask)
        if context is not None and context.causal != causal:
            raise ValueError(f"causal={causal} differs from that of the context group, {context.causal}")
        if head_size is None and hidden_size % num_heads:
            raise ValueError(f"hidden_size={hidden_size} is not a multiple of num_attention_heads={num_heads}")
        head_size = hidden_size // num_heads if head_size is None else head_size
        groups = num_heads if query_groups is None else query_groups
        heads = self.split = split_heads(comm.size, num_heads, groups, head_size, pad=pad_heads)
        self.num_heads = heads.local_heads
        self.heads = heads.heads(comm.rank)
        #: query heads that are no padding among keys and values of others
        self.real_heads = heads.real_heads(comm.rank)
        self.context = None if context is None or context.comm.size == 1 else context
        #: which masks of "fused" dropout are this rank's own
        self.rank = comm.rank if self.context is None else comm.rank + comm.size * self.context.comm.rank
        self.head_size, self.scale = head_size, scale
        #: heads of keys and values that this rank computes with
        self.kv_heads = heads.local_groups
        #: ranks that share a head of keys and values, or None
        self.sharing = comm.block(heads.sharing) if heads.sharing > 1 else None
        self.comm = comm
        self.causal = causal
        self.attention_dropout = attention_dropout
        self.dropout_mask = dropout_mask
        self.site = site
        self.recompute_core = recompute_core
        self.grouped = groups != num_heads
        self.separate = self.separate or self.grouped
        of_queries, of_groups = heads.query_features(head_size), heads.group_features(head_size)
        if self.separate:
            self.query = ColumnParallelLinear(
                hidden_size, num_heads * head_size, comm, qkv_bias, padding=of_queries, **options
            )
            self.key_value = ColumnParallelLinear(
                hidden_size, 2 * groups * head_size, comm, qkv_bias, blocks=2, padding=of_groups, **options
            )
        else:
            self.qkv = ColumnParallelLinear(
                hidden_size, 3 * num_heads * head_size, comm, qkv_bias, blocks=3, padding=of_groups, **options
            )
        if qk_norm is not None:
            # Each rank has some of the heads, and so a part of the gradients.
            of_head: dict[str, Any] = {"sequence_parallel": comm.size > 1, "dtype": options.get("dtype")}
            self.query_norm = NORMS[qk_norm](head_size, norm_epsilon, **of_head)
            self.key_norm = NORMS[qk_norm](head_size, norm_epsilon, **of_head)
        self.qk_norm = qk_norm
        options["init"] = output_init
        self.projection = RowParallelLinear(
            num_heads * head_size, hidden_size, comm, bias, padding=of_queries, **options
        )
        self._offsets = head_offsets(self.heads, self.projection.weight.device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SelfAttention:
        # torch moves and empties a module by this method. The offsets are no buffer, because `to_empty` would lose
        # their values.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._offsets = head_offsets(self.heads, self.projection.weight.device)
        return self

    def forward(
        self,
        x: Tensor,
        randomness: Randomness | None = None,
        padding: Tensor | None = None,
        cache: LayerCache | None = None,
        rotation: Rotation | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        if cache is not None and (not self.causal or self.training or padding is not None):
            raise ValueError("a key-value cache needs causal attention, evaluation mode and no padding")
        if cache is not None and self.context is not None:
            raise ValueError("a key-value cache excludes a context group, whose ranks have parts of a sequence")
        q, k, v = self._projected(x)
        if self.qk_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        if rotation is not None:
            # The values as a view would keep the memory of the keys before their rotation, too.
            q, k, v = rotation(q), rotation(k), v.contiguous()
        q, k, v = q.permute(1, 2, 0, 3), k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3)
        b, _, s, _ = q.shape
        if cache is not None:
            seen = cache.extend(k, v)
            mask, causal = (seen.mask, seen.causal) if bias is None else (bias, False)
            context = F.scaled_dot_product_attention(
                q, seen.keys, seen.values, mask, is_causal=causal, scale=self.scale, enable_gqa=self.grouped
            )
        else:
            whole = s if self.context is None else s * self.context.comm.size
            if padding is not None and bias is not None:
                raise ValueError("bias excludes padding: it says itself what no token looks at")
            if padding is not None:
                bias = padding_bias(padding, b, whole, q.dtype, causal=self.causal)
            context = self._context(q, k, v, self._drawn(randomness), bias)
        return self._joined(context)

    def _joined(self, context: Tensor) -> Tensor:
        """The projection of all heads. context: [b, num_heads, s, d] of this rank."""
        b, _, s, _ = context.shape
        if self.real_heads < self.num_heads:  # else the padding of the projection would get a gradient
            context = F.pad(context[:, : self.real_heads], (0, 0, 0, 0, 0, self.num_heads - self.real_heads))
        result: Tensor = self.projection(context.permute(2, 0, 1, 3).reshape(s, b, -1))
        return result

    def _context(self, q: Tensor, k: Tensor, v: Tensor, drawn: Tensor | int | None, bias: Tensor | None) -> Tensor:
        """Attention to the whole sequence."""
        if self.context is None:
            return self._kept(q, k, v, drawn, bias)
        return self.context.attention(q, k, v, drawn, bias, dropout=self.attention_dropout, core=self._kept)

    def _kept(self, q: Tensor, k: Tensor, v: Tensor, drawn: Tensor | int | None, bias: Tensor | None) -> Tensor:
        """`_core`, computed again in the backward if that is asked for."""
        if self.recompute_core and torch.is_grad_enabled():
            return recomputed(self._core, q, k, v, drawn, bias)
        return self._core(q, k, v, drawn, bias)

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [s, b, num_heads, d], keys and values [s, b, kv_heads, d] of this rank."""
        if not self.grouped:
            qkv = self.qkv(x)
            q, k, v = qkv.view(*qkv.shape[:2], 3, self.num_heads, self.head_size).unbind(2)
            return q, k, v
        q, kv = columns_together(x, [self.query, self.key_value])
        if self.sharing is not None:
            s, b, _ = kv.shape
            kv = gather_from_sequence_parallel_region(kv.view(s, b, 2, -1), self.sharing, dim=-1).flatten(2)
        k, v = kv.view(*kv.shape[:2], 2, self.kv_heads, self.head_size).unbind(2)
        return q.view(*q.shape[:2], self.num_heads, self.head_size), k, v

    def _drawn(self, randomness: Randomness | None) -> Tensor | int | None:
        """The keys [b, heads] of a mask by position, the seed of a fused mask, or None for no dropout."""
        if not self.training or self.attention_dropout == 0:
            return None
        source = needed(randomness, self.site)
        if self.dropout_mask == "position":
            return source.keys(self.site, self._offsets)
        if torch.compiler.is_compiling():
            raise NotImplementedError(
                "dropout_mask='fused' does not compile: a compiled graph cannot seed torch's generator for each layer"
            )
        return source.rank_seed(self.site, self.rank)

    def _core(self, q: Tensor, k: Tensor, v: Tensor, drawn: Tensor | int | None, bias: Tensor | None = None) -> Tensor:
        """The values weighted by attention. drawn: of `_drawn`, or dropout's bool mask. bias: of `padding_bias`."""
        causal = self.causal and bias is None  # else the bias says what comes later, too
        if drawn is None:
            return F.scaled_dot_product_attention(
                q, k, v, bias, is_causal=causal, scale=self.scale, enable_gqa=self.grouped
            )
        if isinstance(drawn, int):
            with seeded(drawn, q.device):
                return F.scaled_dot_product_attention(
                    q, k, v, bias, self.attention_dropout, causal, scale=self.scale, enable_gqa=self.grouped
                )
        shape = q.shape
        if self.grouped:  # the rows of all queries of a group are those of one matrix; a repeated k would be kept
            q = q.reshape(shape[0], k.shape[1], -1, shape[3])
        scores = (q @ k.transpose(-2, -1)).mul_(1.0 / math.sqrt(self.head_size) if self.scale is None else self.scale)
        if self.grouped:
            scores = scores.view(*shape[:3], -1)
        # An addition keeps nothing for its backward; masked_fill would keep the mask.
        if causal:
            scores.add_(scores.new_full(scores.shape[-2:], -torch.inf).triu(1))
        elif bias is not None:
            scores.add_(bias)
        drop = dropped if drawn.dtype == torch.bool else dropout
        weights = drop(scores.softmax(dim=-1), self.attention_dropout, drawn)
        if not self.grouped:
            return weights @ v
        return (weights.view(shape[0], k.shape[1], -1, shape[2]) @ v).view(shape)


def real_tokens(padding: Tensor, b: int, s: int) -> Tensor:
    """Bool [b, s], True where a token is real. padding: such a tensor, or int64 [b], the numbers of real tokens.

    Raises ValueError for another shape or dtype and, on the host if not compiled, for a number outside 0 to ``s``.
    """
    if padding.dtype == torch.bool and padding.shape == (b, s):
        return padding
    if padding.dtype != torch.int64 or padding.shape != (b,):
        raise ValueError(
            f"padding {padding.dtype} {list(padding.shape)} must be int64 [{b}], the number of real tokens of each "
            f"sample, or bool [{b}, {s}], True where a token is real"
        )
    require_within(padding, s + 1, "a sample's number of real tokens")
    return torch.arange(s, dtype=torch.int64, device=padding.device) < padding.unsqueeze(1)


def padding_bias(padding: Tensor, b: int, s: int, dtype: torch.dtype, *, causal: bool) -> Tensor:
    """What is added to the scores: [b, 1, 1, s], or [b, 1, s, s] if ``causal``. padding: as in `real_tokens`.

    It is 0, and where no token may look a number so low that the weight is exactly 0: half of the lowest, so that no
    score makes the sum infinite. A token that may look at nothing, because all of the sample, or all before it, is
    padding, looks at everything, or at itself. In a row of low numbers alone the fused kernels lose the normalisation,
    and their gradients would be wrong.
    """
    real = real_tokens(padding, b, s)
    if causal:
        places = torch.arange(real.shape[1], dtype=torch.int64, device=real.device)
        seen = real[:, None, :] & (places <= places[:, None])
        seen = seen | ((places == places[:, None]) & ~seen.any(dim=-1, keepdim=True))
    else:
        seen = (real | ~real.any(dim=-1, keepdim=True))[:, None, :]
    bias = torch.zeros(seen.shape, dtype=dtype, device=real.device).masked_fill_(~seen, torch.finfo(dtype).min / 2)
    return bias.unsqueeze(1)


def needed(randomness: Randomness | None, site: str) -> Randomness:
    """``randomness``, which a training pass with dropout needs. Raises ValueError, naming ``site``, if it is None."""
    if randomness is None:
        raise ValueError(f"dropout at {site}: a training forward pass needs randomness=tplayers.Randomness(...)")
    return randomness
