"""The collectives of a GPT's training step, by formula: which, how many, of how many bytes, in which part of the step.

    [M] Shoeybi et al., Megatron-LM, 2019: section 3, Figure 4 (a layer), the loss; appendix B.1 (gradients)
    [Z] Rajbhandari, Rasley, Ruwase & He, ZeRO, 2020: sections 5 and 7
    [K] Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022: sections 4 and 5

s: sequence length, b: micro-batch, h: hidden size, L: layers, v: padded vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .collectives import collective
from .transformer import TransformerShape, require_recompute


@dataclass(frozen=True)
class Collective:
    """A collective that a step runs ``count`` times: bytes as nccl-tests has them, and the ranks of its group.

    part: of the step: "layers" (all of them together), "embedding", "output layer", "loss", "gradients", "optimizer",
    "labels", "loss and norm". phase: of the parts of the model: "forward", "recompute" or "backward".
    why: what it is for, and who says so.
    """

    operation: str
    size: float
    ranks: int
    count: int
    why: str
    part: str = ""
    phase: str = ""


def tensor_parallel_collectives(
    shape: TransformerShape,
    batch: int,
    tensor: int,
    *,
    element_bytes: float = 2,
    recompute: str = "none",
    sequence_parallel: bool = False,
    stops_early: bool = False,
) -> list[Collective]:
    """What one micro-batch of ``batch`` sequences communicates over its tensor group, but for the loss.

    A layer: 2 all-reduces of b s h elements forward and 2 backward [M], and the forward's 2 again where it is
    recomputed whole; the embedding's g and the output layer's f add one each. With sequence parallelism each becomes a
    reduce-scatter and an all-gather of the same size, and backward gathers each column-parallel input again for its
    weight gradient [K].

    stops_early: a recomputation ends with the last tensor that the backward needs, as PyTorch's does; where that is the
    MLP's (no dropout follows it), the layer's last reduction is not run again.
    """
    require_recompute(recompute)
    if tensor == 1:
        return []
    size = shape.seq * batch * shape.hidden * element_bytes
    twice = 2 * shape.layers
    reduced_again = twice - shape.layers if stops_early else twice

    def one(operation: str, count: int, part: str, phase: str, why: str) -> Collective:
        return Collective(operation, size, tensor, count, why, part, phase)

    if not sequence_parallel:
        found = [
            one("all_reduce", twice, "layers", "forward", "g, after attention and MLP [M]"),
            one("all_reduce", twice, "layers", "backward", "f, before attention and MLP [M]"),
            one("all_reduce", 1, "embedding", "forward", "embedding's g [M]"),
            one("all_reduce", 1, "output layer", "backward", "output layer's f [M]"),
        ]
        if recompute == "full":
            found.append(one("all_reduce", reduced_again, "layers", "recompute", "g again [K]"))
        return found
    found = [
        one("reduce_scatter", twice, "layers", "forward", "after attention and MLP [K]"),
        one("all_gather", twice, "layers", "forward", "before attention and MLP [K]"),
        one("reduce_scatter", twice, "layers", "backward", "before attention and MLP [K]"),
        one("all_gather", twice, "layers", "backward", "after attention and MLP [K]"),
        one("all_gather", twice, "layers", "backward", "column-parallel inputs again, for weight gradients [K]"),
        one("reduce_scatter", 1, "embedding", "forward", "after the embedding [K]"),
        one("all_gather", 1, "embedding", "backward", "after the embedding [K]"),
        one("all_gather", 1, "output layer", "forward", "before the output layer [K]"),
        one("reduce_scatter", 1, "output layer", "backward", "before the output layer [K]"),
        one("all_gather", 1, "output layer", "backward", "its input again, for the weight gradient [K]"),
    ]
    if recompute == "full":
        found.append(one("all_gather", twice, "layers", "recompute", "before attention and MLP, again [K]"))
        found.append(one("reduce_scatter", reduced_again, "layers", "recompute", "after attention and MLP, again [K]"))
    return found


def sequence_parallel_collectives(partial: float, tensor: int, *, gradient_bytes: float = 4) -> list[Collective]:
    """The gradients of what acts on sequence shards, once a step: each rank has a part, which the tensor group sums.

    partial: elements of those parameters: LayerNorms, biases after a reduce-scatter, position embedding. No seed counts
    them; Megatron-LM sums them likewise.
    """
    if tensor == 1 or not partial:
        return []
    why = "norms, row biases, positions: partial on sequence shards"
    return [Collective("all_reduce", partial * gradient_bytes, tensor, 1, why, "gradients")]


def loss_collectives(
    shape: TransformerShape, batch: int, tensor: int, *, parallel: bool = True, together: bool = False
) -> list[Collective]:
    """The loss of vocabulary-parallel logits: b s fp32 numbers three times; or b s v logits gathered [M, section 3].

    Maximum, target logit and sum of exponentials of each token. together: the last two in one collective of twice the
    size. parallel=False: what gathering fp16 logits would take.
    """
    if tensor == 1:
        return []
    tokens = shape.seq * batch

    def one(operation: str, size: float, count: int, why: str) -> Collective:
        return Collective(operation, size, tensor, count, why, "loss", "forward")

    if not parallel:
        return [one("all_gather", 2 * tokens * shape.vocab, 1, "logits")]
    if not together:
        return [one("all_reduce", 4 * tokens, 3, "maximum, target logit, sum of exponentials [M]")]
    return [
        one("all_reduce", 4 * tokens, 1, "maximum of the logits [M]"),
        one("all_reduce", 8 * tokens, 1, "sum of exponentials and target logit, together [M]"),
    ]


def data_parallel_collectives(
    count: float,
    data: int,
    *,
    gradient_bytes: float = 2,
    parameter_bytes: float = 2,
    zero1: bool = False,
    buckets: Sequence[float] | None = None,
) -> list[Collective]:
    """The gradients of ``count`` parameters summed over ``data`` replicas, once a step [M, appendix B.1].

    zero1: a reduce-scatter of the gradients and an all-gather of the updated parameters instead of an all-reduce: the
    same volume where both have as many bytes [Z, section 7]. buckets: the elements of each collective, ``count`` and
    what they are padded with in all, instead of one collective for everything.
    """
    if data == 1:
        return []
    found = []
    for number, elements in enumerate([count] if buckets is None else buckets):
        name = "" if buckets is None else f", bucket {number}"
        size = elements * gradient_bytes
        if not zero1:
            found.append(Collective("all_reduce", size, data, 1, f"gradients{name} [M]", "gradients"))
            continue
        found.append(Collective("reduce_scatter", size, data, 1, f"gradients{name} [Z]", "gradients"))
        size = elements * parameter_bytes
        found.append(Collective("all_gather", size, data, 1, f"updated parameters{name} [Z]", "optimizer"))
    return found


def scalar_collectives(
    tensor: int, data: int, *, zero1: bool = False, fp16: bool = False
) -> list[tuple[str, Collective]]:
    """(Group, collective): the few numbers that the ranks agree on in a step, which no seed counts.

    Over the data group the labels that the loss counts and whether a token is outside the vocabulary (2 int64), and the
    loss (float64); over the tensor group the squared norm of split parameters' gradients (float64), with ZeRO-1 first
    over the data group, with that of the replicated ones (2 float64); fp16's flag of an overflow (int64) over both.
    """
    found = [
        ("data", Collective("all_reduce", 16, data, 1, "labels counted, tokens outside", "labels")),
        ("data", Collective("all_reduce", 8, data, 1, "loss", "loss and norm")),
        ("tensor", Collective("all_reduce", 8, tensor, 1, "squared norm of split gradients", "loss and norm")),
    ]
    if zero1:
        found.append(("data", Collective("all_reduce", 16, data, 1, "squared norms of the shards", "loss and norm")))
    if fp16:
        for group, ranks in (("tensor", tensor), ("data", data)):
            found.append((group, Collective("all_reduce", 8, ranks, 1, "whether fp16 overflowed", "loss and norm")))
    return [(group, one) for group, one in found if one.ranks > 1]


def total_bytes_sent(collectives: Iterable[Collective], algorithm: str = "ring") -> float:
    """What the busiest rank sends in all of them."""
    return sum(one.count * collective(one.operation, algorithm, one.size, one.ranks).sent_bytes for one in collectives)
