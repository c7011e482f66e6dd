"""Parameters and FLOPs of a GPT or BERT, by formula. `memory.py` has the bytes of a step, `step.py` its collectives.

    [K] Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022: sections 4 and 5
    [A] Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, 2021: appendix (FLOPs)

s: sequence length, b: micro-batch, h: hidden size, a: attention heads, L: layers, v: padded vocabulary, t:
tensor-parallel size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

RECOMPUTE = ("none", "selective", "full")
MODELS = ("gpt", "bert", "t5")


@dataclass(frozen=True)
class TransformerShape:
    """The shape of a GPT or BERT; the defaults are the paper's, with an MLP of width 4 h and a tied output layer.

    vocab: after padding. model: "gpt" or "bert". A BERT has two token types, the head of masked tokens (dense, GELU,
    norm, a bias of the output layer) and the pooler with the sentence-order head; every rank holds these whole, but
    for the output layer's bias.

    The Llama family is a "gpt" with other values of these. ffn: width of the feed-forward block; None for 4 h.
    kv_heads: heads of keys and values; None for ``heads``. head: the size of a head; None for hidden / heads. gated:
    the feed-forward block has a gate beside its first matrix. rms_norm: norms without a bias. rotary: no table of
    positions. biases: of all linear layers; qkv_biases: of queries, keys and values at least. qk_norms: of each head's
    queries and keys. untied: an output layer of its own.

    experts: in place of a layer's feed-forward block it has so many of width ``ffn`` without biases, and a router; 0
    for none. of_token: the experts of each token. shared: the width of an expert that all tokens have; 0 for none.
    shared_gate: that one has a gate of h weights.

    A "t5" has ``layers`` in its encoder and as many in its decoder, and two tables of ``buckets`` distances. There are
    formulas of its parameters only.

    Raises ValueError for sizes below 1, if ``heads`` does not divide ``hidden`` and ``head`` is None, and if
    ``kv_heads`` does not divide ``heads``.
    """

    layers: int
    hidden: int
    heads: int
    seq: int
    vocab: int
    model: str = "gpt"
    ffn: int | None = None
    kv_heads: int | None = None
    head: int | None = None
    gated: bool = False
    rms_norm: bool = False
    rotary: bool = False
    biases: bool = True
    qkv_biases: bool = False
    qk_norms: bool = False
    untied: bool = False
    experts: int = 0
    of_token: int = 1
    shared: int = 0
    shared_gate: bool = False
    buckets: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "seq", "vocab", "ffn", "kv_heads", "head"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: at least 1")
        if self.head is None and self.hidden % self.heads:
            raise ValueError(f"heads={self.heads} does not divide hidden={self.hidden}")
        if self.heads % self.groups:
            raise ValueError(f"kv_heads={self.kv_heads} does not divide heads={self.heads}")
        if self.model not in MODELS:
            raise ValueError(f"model={self.model!r}: one of {', '.join(MODELS)}")

    @property
    def mlp(self) -> int:
        """The width of the feed-forward block."""
        return 4 * self.hidden if self.ffn is None else self.ffn

    @property
    def active_width(self) -> int:
        """The width of all feed-forward blocks that a token goes through in a layer."""
        return self.mlp if not self.experts else self.of_token * self.mlp + self.shared

    @property
    def head_size(self) -> int:
        """The size of a head."""
        return self.hidden // self.heads if self.head is None else self.head

    @property
    def queries(self) -> int:
        """The width of all query heads: h, unless heads have a size of their own."""
        return self.heads * self.head_size

    @property
    def groups(self) -> int:
        """The heads of keys and values."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def keys(self) -> int:
        """The width of all heads of keys; that of the values is the same."""
        return self.groups * self.head_size

    def sharing(self, tensor: int) -> int:
        """How many of ``tensor`` ranks share a head of keys and values; 1 if each has whole ones of its own."""
        return max(tensor // self.groups, 1)

    def require_tensor_parallel(self, tensor: int) -> None:
        """Raise ValueError unless ``tensor`` ranks can split the heads, the hidden size and the vocabulary evenly.

        Heads with a size of their own do not depend on the hidden size. The ranks split or share the heads of keys.
        """
        for name in ("heads", "hidden", "vocab") if self.head is None else ("heads", "vocab"):
            if tensor < 1 or getattr(self, name) % tensor:
                raise ValueError(f"tensor-parallel size {tensor} does not divide {name}={getattr(self, name)}")
        if self.groups % tensor and tensor % self.groups:
            raise ValueError(f"tensor-parallel size {tensor} neither divides kv_heads={self.groups} nor is a multiple")


@dataclass(frozen=True)
class StageShape:
    """What a stage of a pipeline has: so many layers, and whether the embedding (first), the output and loss (last)."""

    layers: int
    first: bool = True
    last: bool = True


def parameters(
    shape: TransformerShape, tensor: int = 1, stage: StageShape | None = None, *, expert: int = 1
) -> int:  # fmt: skip
    """Return the number of parameters of one rank of a tensor group of ``tensor`` ranks: the sum of `parameter_sizes`.

    Weights and the biases of column-parallel layers are split. LayerNorms, the biases of row-parallel layers and the
    position embedding are not. stage: the parameters of this stage only, instead of the whole model. A tied embedding
    lies on the first and on the last stage. expert: the ranks that share the experts of a layer.
    """
    stage = stage or StageShape(shape.layers)

    def here(name: str) -> bool:
        tied = name == "embedding.weight" and not shape.untied
        ends = stage.first if "embedding" in name else stage.last
        return name.startswith("layers.") or ends or (tied and stage.last)

    sizes = parameter_sizes(replace(shape, layers=stage.layers), tensor)
    elsewhere = expert_parameters(shape, tensor, stage) - expert_parameters(shape, tensor, stage, expert=expert)
    return sum(size for name, size in sizes if here(name)) - elsewhere


def expert_parameters(
    shape: TransformerShape, tensor: int = 1, stage: StageShape | None = None, *, expert: int = 1
) -> int:  # fmt: skip
    """Return the number of parameters of a rank's experts, without shared ones. Arguments as for `parameters`.

    Raises ValueError if ``expert`` ranks cannot have equally many.
    """
    if not shape.experts:
        return 0
    if expert < 1 or shape.experts % expert:
        raise ValueError(f"expert={expert} does not divide experts={shape.experts}")
    layers = shape.layers if stage is None else stage.layers
    one = sum(size for name, size in _layer_sizes(shape, tensor).items() if name.startswith("mlp.experts.0."))
    return layers * shape.experts // expert * one


def parameter_sizes(
    shape: TransformerShape,
    tensor: int = 1,
    *,
    positions: int | None = None,
    post_norm: bool = False,
    order_head: bool = True,
) -> list[tuple[str, int]]:
    """Return (name, elements) of each parameter of one rank of a tensor group of ``tensor`` ranks.

    positions: number of positions that the model knows (default s). post_norm: layers normalise after each sum, and a
    norm follows the embedding instead of the last layer. order_head: whether a BERT has the pooler and the
    sentence-order head. Names and order are those of this project's GPT and BERT.
    """
    h = shape.hidden
    if shape.model == "t5":
        return _t5_sizes(shape, tensor)
    found = [] if shape.rotary else [("position_embedding", (shape.seq if positions is None else positions) * h)]
    if shape.model == "bert":
        found.append(("token_type_embedding", 2 * h))
    found.append(("embedding.weight", shape.vocab * h // tensor))
    if post_norm:
        found += [("embedding_norm.weight", h), ("embedding_norm.bias", h)]
    layer = _layer_sizes(shape, tensor)
    found += [(f"layers.{number}.{name}", size) for number in range(shape.layers) for name, size in layer.items()]
    if not post_norm:
        found += [("final_norm.weight", h), *([] if shape.rms_norm else [("final_norm.bias", h)])]
    if shape.untied:
        found.append(("output.weight", shape.vocab * h // tensor))
    if shape.model == "bert":
        found += [
            ("mlm_head.bias", shape.vocab // tensor), ("mlm_head.dense.weight", h * h), ("mlm_head.dense.bias", h),
            ("mlm_head.norm.weight", h), ("mlm_head.norm.bias", h),
        ]  # fmt: skip
    if shape.model == "bert" and order_head:
        found += [("pooler.weight", h * h), ("pooler.bias", h), ("order_head.weight", 2 * h), ("order_head.bias", 2)]
    return found


def _t5_sizes(shape: TransformerShape, tensor: int) -> list[tuple[str, int]]:
    h, own = shape.hidden, _layer_sizes(shape, tensor)
    across = {
        "cross_norm.weight": h, "cross_attention.query.weight": h * shape.queries // tensor,
        "cross_attention.key_value.weight": 2 * h * shape.keys // tensor,
        "cross_attention.projection.weight": h * shape.queries // tensor,
    }  # fmt: skip
    found = [("embedding.weight", shape.vocab * h // tensor)]
    for number in range(2 * shape.layers):
        layer = own | (across if number >= shape.layers else {})
        layer |= {"final_norm.weight": h} if number == shape.layers - 1 else {}
        found += [(f"layers.{number}.{name}", size) for name, size in layer.items()]
    found += [("final_norm.weight", h)] + ([("output.weight", shape.vocab * h // tensor)] if shape.untied else [])
    return found + [(f"{stack}_bias.weight", shape.buckets * shape.heads // tensor) for stack in ("encoder", "decoder")]


def _layer_sizes(shape: TransformerShape, tensor: int) -> dict[str, int]:
    """The elements of each parameter of a layer, as `parameter_sizes` names them."""
    h, qkv_biases = shape.hidden, shape.biases or shape.qkv_biases
    found: dict[str, int] = {}

    def norm(name: str, size: int = h) -> None:
        found.update({f"{name}.weight": size} | ({} if shape.rms_norm else {f"{name}.bias": size}))

    def columns(name: str, rows: int, bias: bool) -> None:
        found.update({f"{name}.weight": rows * h // tensor} | ({f"{name}.bias": rows // tensor} if bias else {}))

    def rows(name: str, width: int) -> None:
        found.update({f"{name}.weight": h * width // tensor} | ({f"{name}.bias": h} if shape.biases else {}))

    norm("attention_norm")
    if shape.groups == shape.heads:
        columns("attention.qkv", 3 * shape.queries, qkv_biases)
    else:
        columns("attention.query", shape.queries, qkv_biases)
        columns("attention.key_value", 2 * shape.keys, qkv_biases)
    if shape.qk_norms:
        norm("attention.query_norm", shape.head_size)
        norm("attention.key_norm", shape.head_size)
    rows("attention.projection", shape.queries)
    norm("mlp_norm")

    def feed_forward(name: str, width: int) -> None:
        columns(*((f"{name}.gate_up", 2 * width) if shape.gated else (f"{name}.up", width)), shape.biases)
        rows(f"{name}.down", width)

    if not shape.experts:
        feed_forward("mlp", shape.mlp)
        return found
    found["mlp.router"] = shape.experts * h
    if shape.shared_gate:
        found["mlp.shared_gate"] = h
    for number in range(shape.experts):
        feed_forward(f"mlp.experts.{number}", shape.mlp)
    if shape.shared:
        feed_forward("mlp.shared_expert", shape.shared)
    return found


def active_parameters(shape: TransformerShape) -> int:
    """Return the number of parameters of the whole model that a token meets: of the experts those that it goes to."""
    unused = shape.experts - shape.of_token if shape.experts else 0
    return parameters(shape) - expert_parameters(shape) * unused // max(shape.experts, 1)


def model_flops(shape: TransformerShape, batch: int, recompute: str = "none") -> float:
    """Return the FLOPs of all matrix products of a step with ``batch`` sequences, recomputed ones included [A].

    The forward takes 24 b s h^2 (1 + s / 6h) for each layer and 2 b s h v for the logits; the backward takes twice
    that. recompute "full" adds one more forward of every layer, 96 b s L h^2 (1 + s / 6h + v / 16Lh) in all.
    "selective" adds one more of the two matrix products of attention [K]. A BERT has the dense layers of its heads,
    too. The Llama family has 2 b s for each element of its matrices in place of 24 b s h^2.
    """
    require_recompute(recompute)
    tokens = batch * shape.seq
    h = shape.hidden
    inner = (3 if shape.gated else 2) * shape.active_width + shape.experts
    layer = 2 * tokens * h * (2 * shape.queries + 2 * shape.keys + inner)
    attention = 4 * tokens * shape.seq * shape.queries
    logits = 2 * tokens * h * shape.vocab
    if shape.model == "bert":
        logits += 2 * h * h * (tokens + batch)
    again = {"none": 0, "selective": attention, "full": layer + attention}[recompute]
    return shape.layers * (3 * (layer + attention) + again) + 3 * logits


def require_recompute(recompute: str) -> None:
    """Raise ValueError unless ``recompute`` is one of RECOMPUTE."""
    if recompute not in RECOMPUTE:
        raise ValueError(f"recompute={recompute!r}: one of {', '.join(RECOMPUTE)}")
