"""Parameters and FLOPs of a GPT or BERT, by formula. `memory.py` has the bytes of a step, `step.py` its collectives.

    [K] Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022: sections 4 and 5
    [A] Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, 2021: appendix (FLOPs)

s: sequence length, b: micro-batch, h: hidden size, a: attention heads, L: layers, v: padded vocabulary, t:
tensor-parallel size.
"""

from __future__ import annotations

from dataclasses import dataclass

RECOMPUTE = ("none", "selective", "full")
MODELS = ("gpt", "bert")


@dataclass(frozen=True)
class TransformerShape:
    """The shape of a GPT or BERT whose MLP has the width 4 h and whose output layer is tied to the embedding.

    vocab: after padding. model: "gpt" or "bert". A BERT has two token types, the head of masked tokens (dense, GELU,
    norm, a bias of the output layer) and the pooler with the sentence-order head; every rank holds these whole, but
    for the output layer's bias. Raises ValueError for sizes below 1, and if ``heads`` does not divide ``hidden``.
    """

    layers: int
    hidden: int
    heads: int
    seq: int
    vocab: int
    model: str = "gpt"

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "seq", "vocab"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: at least 1")
        if self.hidden % self.heads:
            raise ValueError(f"heads={self.heads} does not divide hidden={self.hidden}")
        if self.model not in MODELS:
            raise ValueError(f"model={self.model!r}: one of {', '.join(MODELS)}")

    def require_tensor_parallel(self, tensor: int) -> None:
        """Raise ValueError unless ``tensor`` ranks can split the heads, the hidden size and the vocabulary evenly."""
        for name in ("heads", "hidden", "vocab"):
            if tensor < 1 or getattr(self, name) % tensor:
                raise ValueError(f"tensor-parallel size {tensor} does not divide {name}={getattr(self, name)}")


def layer_parameters(hidden: int, mlp: int | None = None) -> int:
    """Return the number of parameters of a layer: QKV, output, MLP of width ``mlp`` (default 4 h), two LayerNorms."""
    mlp = 4 * hidden if mlp is None else mlp
    return (
        (3 * hidden * hidden + 3 * hidden) + (hidden * hidden + hidden) + (2 * mlp * hidden + mlp + hidden) + 4 * hidden
    )


def parameters(shape: TransformerShape, tensor: int = 1) -> float:
    """Return the number of parameters of one rank of a tensor group of ``tensor`` ranks.

    Weights and the biases of column-parallel layers are split. LayerNorms, the biases of row-parallel layers and the
    position embedding are not.
    """
    h = shape.hidden
    split = shape.layers * (12 * h * h + 3 * h + 4 * h) + shape.vocab * h
    whole = shape.layers * (2 * h + 4 * h) + shape.seq * h + 2 * h
    if shape.model == "bert":
        split += shape.vocab  # the bias of the output layer
        whole += 2 * h + (h * h + h + 2 * h) + (h * h + h + 2 * h + 2)  # token types; masked tokens; pooler and order
    return split / tensor + whole


def parameter_sizes(
    shape: TransformerShape,
    tensor: int = 1,
    *,
    mlp: int | None = None,
    positions: int | None = None,
    post_norm: bool = False,
    order_head: bool = True,
) -> list[tuple[str, int]]:
    """Return (name, elements) of each parameter of one rank of a tensor group of ``tensor`` ranks.

    mlp: width of the feed-forward block (default 4 h). positions: number of positions that the model knows (default s).
    post_norm: layers normalise after each sum, and a norm follows the embedding instead of the last layer. order_head:
    whether a BERT has the pooler and the sentence-order head.
    Names and order are those of this project's GPT and BERT. Without the options the elements add up to `parameters`.
    """
    h = shape.hidden
    mlp = 4 * h if mlp is None else mlp
    found = [("position_embedding", (shape.seq if positions is None else positions) * h)]
    if shape.model == "bert":
        found.append(("token_type_embedding", 2 * h))
    found.append(("embedding.weight", shape.vocab * h // tensor))
    if post_norm:
        found += [("embedding_norm.weight", h), ("embedding_norm.bias", h)]
    layer = {
        "attention_norm.weight": h, "attention_norm.bias": h,
        "attention.qkv.weight": 3 * h * h // tensor, "attention.qkv.bias": 3 * h // tensor,
        "attention.projection.weight": h * h // tensor, "attention.projection.bias": h,
        "mlp_norm.weight": h, "mlp_norm.bias": h,
        "mlp.up.weight": mlp * h // tensor, "mlp.up.bias": mlp // tensor,
        "mlp.down.weight": mlp * h // tensor, "mlp.down.bias": h,
    }  # fmt: skip
    found += [(f"layers.{number}.{name}", size) for number in range(shape.layers) for name, size in layer.items()]
    if not post_norm:
        found += [("final_norm.weight", h), ("final_norm.bias", h)]
    if shape.model == "bert":
        found += [
            ("mlm_head.bias", shape.vocab // tensor), ("mlm_head.dense.weight", h * h), ("mlm_head.dense.bias", h),
            ("mlm_head.norm.weight", h), ("mlm_head.norm.bias", h),
        ]  # fmt: skip
        if order_head:
            found += [
                ("pooler.weight", h * h),
                ("pooler.bias", h),
                ("order_head.weight", 2 * h),
                ("order_head.bias", 2),
            ]
    return found


def model_flops(shape: TransformerShape, batch: int, recompute: str = "none") -> float:
    """Return the FLOPs of all matrix products of a step with ``batch`` sequences, recomputed ones included [A].

    The forward takes 24 b s h^2 (1 + s / 6h) for each layer and 2 b s h v for the logits; the backward takes twice
    that. recompute "full" adds one more forward of every layer, 96 b s L h^2 (1 + s / 6h + v / 16Lh) in all.
    "selective" adds one more of the two matrix products of attention [K]. A BERT has the dense layers of its heads,
    too.
    """
    require_recompute(recompute)
    tokens = batch * shape.seq
    h = shape.hidden
    layer = 24 * tokens * h * h
    attention = 4 * tokens * shape.seq * h
    logits = 2 * tokens * h * shape.vocab
    if shape.model == "bert":
        logits += 2 * h * h * (tokens + batch)
    again = {"none": 0, "selective": attention, "full": layer + attention}[recompute]
    return shape.layers * (3 * (layer + attention) + again) + 3 * logits


def require_recompute(recompute: str) -> None:
    """Raise ValueError unless ``recompute`` is one of RECOMPUTE."""
    if recompute not in RECOMPUTE:
        raise ValueError(f"recompute={recompute!r}: one of {', '.join(RECOMPUTE)}")
