"""The collectives of a GPT's or BERT's training step, by formula: operation, number, size, and part of the step.

    [M] Shoeybi et al., Megatron-LM, 2019: section 3, Figure 4 (a layer), the loss; appendix B.1 (gradients)
    [Z] Rajbhandari, Rasley, Ruwase & He, ZeRO, 2020: sections 5 and 7
    [K] Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022: sections 4 and 5

s: sequence length, b: micro-batch, h: hidden size, L: layers, v: padded vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .transformer import TransformerShape, require_recompute


@dataclass(frozen=True)
class Collective:
    """A collective that a step runs ``count`` times.

    size: bytes, as nccl-tests counts them. ranks: the size of its group. why: its purpose and its source.
    part: the part of the step: "layers" (all of them together), "embedding", "MLM head", "output layer", "pooler",
    "loss", "gradients", "optimizer", "labels", "loss and norm". phase: in a part of the model, "forward", "recompute"
    or "backward".
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
    predictions: int | None = None,
    order_head: bool = True,
) -> list[Collective]:
    """Return the collectives of one micro-batch of ``batch`` sequences over its tensor group, without the loss.

    A layer has 2 all-reduces of b s h elements forward and 2 backward [M]. If the layer is recomputed in full, the 2 of
    the forward run again. The embedding's g and the output layer's f add one each. With sequence parallelism each
    all-reduce becomes a reduce-scatter and an all-gather of the same size, and the backward gathers each
    column-parallel input again for its weight gradient [K].

    tensor: the size of the tensor group. stops_early: a recomputation ends with the last tensor that the backward
    needs, as PyTorch's does. If that is the MLP's (no dropout or norm follows it), the layer's last reduction does not
    run again.

    predictions: a BERT's head of masked tokens and its output layer run at so many positions of a sequence, with
    sequence parallelism a multiple of ``tensor``; None: at all s, which is also a GPT's output layer. order_head:
    whether a BERT has the pooler and the sentence-order head. With sequence parallelism the rows at these positions,
    and the first token's for the pooler, lie on any of the ranks: a reduce-scatter brings each rank its part of the
    former, and an all-reduce brings all ranks the latter.

    Ranks that share a head of keys and values run more, in groups of their own (`key_value_collectives`).
    """
    require_recompute(recompute)
    if tensor == 1:
        return []
    of_position = batch * shape.hidden * element_bytes
    size = shape.seq * of_position
    predicted = size if predictions is None else predictions * of_position
    twice = 2 * shape.layers
    reduced_again = twice - shape.layers if stops_early else twice

    def one(operation: str, count: int, part: str, phase: str, why: str, size: float = size) -> Collective:
        return Collective(operation, size, tensor, count, why, part, phase)

    if not sequence_parallel:
        found = [
            one("all_reduce", twice, "layers", "forward", "g, after attention and MLP [M]"),
            one("all_reduce", twice, "layers", "backward", "f, before attention and MLP [M]"),
            one("all_reduce", 1, "embedding", "forward", "embedding's g [M]"),
            one("all_reduce", 1, "output layer", "backward", "output layer's f [M]", predicted),
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
        one("all_gather", 1, "output layer", "forward", "before the output layer [K]", predicted),
        one("reduce_scatter", 1, "output layer", "backward", "before the output layer [K]", predicted),
        one("all_gather", 1, "output layer", "backward", "its input again, for the weight gradient [K]", predicted),
    ]
    if predictions is not None:
        found.append(one("reduce_scatter", 1, "MLM head", "forward", "rows at the masked positions", predicted))
        found.append(one("all_gather", 1, "MLM head", "backward", "rows at the masked positions", predicted))
    if shape.model == "bert" and order_head:
        found.append(
            one("all_reduce", 1, "pooler", "forward", "first tokens, from the first rank's shard", of_position)
        )
    if recompute == "full":
        found.append(one("all_gather", twice, "layers", "recompute", "before attention and MLP, again [K]"))
        found.append(one("reduce_scatter", reduced_again, "layers", "recompute", "after attention and MLP, again [K]"))
    return found


def key_value_collectives(
    shape: TransformerShape, batch: int, tensor: int, *, element_bytes: float = 2, recompute: str = "none"
) -> list[Collective]:
    """Return the collectives by which ranks that share a head of keys and values complete it, of one micro-batch.

    If the tensor group is larger than the heads of keys and values, each rank of the `Communicator.block` that shares a
    head computes a part of the head. An all-gather brings each the whole head, and a reduce-scatter in the backward
    sums its gradients. Both have the size of the head's keys and values. If the layer is recomputed in full, the
    all-gather runs again. There are none if each rank has whole heads.
    """
    require_recompute(recompute)
    sharing = shape.sharing(tensor)
    if sharing == 1:
        return []
    size = 2 * shape.seq * batch * shape.head_size * element_bytes
    runs = [("all_gather", "forward"), ("reduce_scatter", "backward")]
    if recompute == "full":
        runs.append(("all_gather", "recompute"))
    why = "keys and values of a head that ranks share"
    return [Collective(operation, size, sharing, shape.layers, why, "layers", phase) for operation, phase in runs]


def sequence_parallel_collectives(partial: float, tensor: int, *, gradient_bytes: float = 4) -> list[Collective]:
    """Return the sums, once a step, of the gradients of parameters that act on sequence shards.

    Each rank of the tensor group has a part of such a gradient, and the group sums the parts. partial: the number of
    elements of these parameters: LayerNorms, biases after a reduce-scatter, the embeddings of positions and token
    types, and the dense layer of a BERT's head of masked tokens. The papers do not count these collectives; Megatron-LM
    runs them, too.
    """
    if tensor == 1 or not partial:
        return []
    why = "norms, row biases, positions: partial on sequence shards"
    return [Collective("all_reduce", partial * gradient_bytes, tensor, 1, why, "gradients")]


def loss_collectives(
    shape: TransformerShape,
    batch: int,
    tensor: int,
    *,
    together: bool = False,
    predictions: int | None = None,
) -> list[Collective]:
    """Return the collectives of the loss of vocabulary-parallel logits, of one micro-batch [M, section 3].

    The tensor group reduces b s fp32 numbers three times in the forward: the maximum, the target logit and the sum of
    exponentials of each token. The backward has none, and neither has a group of one rank.

    shape: of the model, which gives s. batch: b, the sequences of the micro-batch. tensor: the size of the tensor
    group. together: the last two are one collective of twice the size. predictions: the positions of a sequence that
    have logits, instead of s (`tensor_parallel_collectives`). Sizes are in bytes. It raises nothing of its own.
    """
    if tensor == 1:
        return []
    tokens = (shape.seq if predictions is None else predictions) * batch

    def one(size: float, count: int, why: str) -> Collective:
        return Collective("all_reduce", size, tensor, count, why, "loss", "forward")

    if not together:
        return [one(4 * tokens, 3, "maximum, target logit, sum of exponentials [M]")]
    return [
        one(4 * tokens, 1, "maximum of the logits [M]"),
        one(8 * tokens, 1, "sum of exponentials and target logit, together [M]"),
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
    """Return the sums, once a step, of the gradients of ``count`` parameters over ``data`` replicas [M, appendix B.1].

    zero1: a reduce-scatter of the gradients and an all-gather of the updated parameters, instead of an all-reduce. The
    volume is the same if gradients and parameters have as many bytes [Z, section 7]. buckets: the elements of each
    collective, padding included, instead of one collective for all parameters.
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
    tensor: int,
    data: int,
    *,
    context: int = 1,
    pipeline: int = 1,
    zero1: bool = False,
    fp16: bool = False,
    terms: int = 1,
) -> list[tuple[str, Collective]]:
    """Return (group, collective) for the few numbers that the ranks exchange in a step. The papers do not count them.

    terms: the losses of which the objective is the sum: 2 for a BERT with a sentence-order head. The replicas of a
    parameter are the ranks of the data group, and with context groups those of both (`ProcessGrid.replicas`).

    | group                      | numbers                                                                            |
    |----------------------------|------------------------------------------------------------------------------------|
    | data                       | int64: the labels of each term, and whether a token is outside the vocabulary      |
    | pipeline                   | 2 int64: the most and the fewest micro-batches of a stage                          |
    | replicas, pipeline         | float64: each term of the loss                                                     |
    | pipeline, ZeRO-1: replicas | 2 float64: the squared norms of gradients of replicated and of split parameters    |
    | tensor                     | float64: the squared norm of the gradients of split parameters                     |
    | tensor, replicas, pipeline | fp16 only, int64: whether a gradient overflowed                                    |
    """
    sizes = {"tensor": tensor, "data": data, "pipeline": pipeline}
    replicas = "data" if context == 1 else "replicas"
    sizes[replicas] = data * context

    def one(group: str, size: float, why: str, part: str = "loss and norm") -> tuple[str, Collective]:
        return group, Collective("all_reduce", size, sizes[group], 1, why, part)

    found = [
        one("data", 8 * (terms + 1), "labels counted, tokens outside", "labels"),
        one("pipeline", 16, "micro-batches of the stages", "labels"),
        *(one(group, 8 * terms, "loss") for group in (replicas, "pipeline")),
        one("pipeline", 16, "squared norms of the stages"),
        one("tensor", 8, "squared norm of split gradients"),
    ]
    if zero1:
        found.append(one(replicas, 16, "squared norms of the shards"))
    if fp16:
        found += [one(group, 8, "whether fp16 overflowed") for group in ("tensor", replicas, "pipeline")]
    return [(group, one) for group, one in found if one.ranks > 1]
