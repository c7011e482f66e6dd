"""The bytes of a rank in a training step, by formula: parameters, optimizer, activations, gradients being sent.

    [Z] Rajbhandari, Rasley, Ruwase & He, ZeRO, 2020: section 3.1
    [K] Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022: sections 4 and 5

s: sequence length, b: micro-batch, h: hidden size, a: attention heads, L: layers, v: padded vocabulary, t:
tensor-parallel size, c: the ranks of a context group, e: bytes of an element (2 in half precision, 4 in fp32).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from .transformer import StageShape, TransformerShape, expert_parameters, parameters, require_recompute


@dataclass(frozen=True)
class KeptTensors:
    """Settings of a training step that decide which tensors a rank keeps.

    element_bytes: of a parameter and of an activation, 2 or 4.
    recompute: what the backward computes again: "none", "selective" (the inside of attention), "full" (each layer).
    sequence_parallel: norms, dropout and residuals are split over the tensor group by sequence.
    hidden_dropout: there is dropout on the embedding and after each branch. It keeps its masks.
    scores: what attention keeps of its scores. "dropped": softmax, mask, and their product, as with attention dropout
        that no fused kernel draws. "softmax": attention in single operations, without dropout. "none": a fused kernel.
    gradient_bytes: of an element in the sum of the gradients: 4 in this project's trainer, 2 in [Z].
    zero1: the optimizer's state is split over the data group.
    sends_together: copies of all gradients exist when the backward ends, because each bucket is sent as soon as it is
        complete and waited for at the end (``--overlap-grad-reduce``). Otherwise one bucket's copy exists at a time; it
        is not counted.
    sent_bytes: of an element of such a copy. 0: the sums themselves are sent, without a copy.

    Raises ValueError for another ``recompute``.
    """

    element_bytes: int = 2
    recompute: str = "none"
    sequence_parallel: bool = False
    hidden_dropout: bool = True
    scores: Literal["dropped", "softmax", "none"] = "dropped"
    gradient_bytes: int = 4
    zero1: bool = False
    sends_together: bool = False
    sent_bytes: int = 2

    def __post_init__(self) -> None:
        require_recompute(self.recompute)


def parameter_bytes(count: float, *, element_bytes: int = 2, gradient_bytes: int = 4, zero1_ranks: int = 1) -> float:
    """Return the bytes of ``count`` parameters, the sums of their gradients, and Adam's state.

    Adam's state is two fp32 moments, and for parameters of 2 bytes an fp32 master. ZeRO-1 splits it over
    ``zero1_ranks`` ranks. So a parameter in half precision takes 18 bytes, or 6 + 12 / d with ZeRO-1, and one in fp32
    takes 16, or 8 + 8 / d. With gradients of 2 bytes these are the 16 and the 4 + 12 / d of [Z].
    """
    masters = 4 if element_bytes < 4 else 0
    return count * (element_bytes + gradient_bytes + (masters + 8) / zero1_ranks)


def layer_activation_bytes(
    shape: TransformerShape, batch: int, tensor: int = 1, kept: KeptTensors | None = None, *, context: int = 1
) -> float:
    """Return the bytes that a layer keeps for the backward [K, Table 2].

    context: the ranks that share each sequence, of which a rank has s / c positions, and their scores with all others.

    An element of a dropout mask has 1 byte. In half precision, by ``recompute``:

    - "none": s b h (34 + 5 a s / h). Without sequence parallelism, 10 s b h of it is whole on every rank of the tensor
      group. Without dropout, masks and dropped scores are missing (`KeptTensors`).
    - "selective": the same without 5 a s / h, the scores of attention. A fused kernel never keeps these.
    - "full": the layer's input, 2 s b h, of which a rank keeps its shard with sequence parallelism.

    The Llama family keeps its queries, keys, values and context, gate and up and their product instead of 12 s b h.
    """
    kept = kept or KeptTensors()
    shape.require_tensor_parallel(tensor)
    e, tokens = kept.element_bytes, shape.seq * batch / context
    sbh = tokens * shape.hidden
    shards = tensor if kept.sequence_parallel else 1
    if kept.recompute == "full":
        return e * sbh / shards
    scores = 0.0
    if kept.recompute == "none":
        of_score = {"dropped": 2 * e + 1, "softmax": e, "none": 0}[kept.scores]
        scores = of_score * shape.heads * shape.seq
    masks = 2 if kept.hidden_dropout else 0
    # Queries and context; keys and values; what the activation reads, and its result.
    widths = 2 * shape.queries + 2 * shape.keys * shape.sharing(tensor) + (3 if shape.gated else 2) * shape.active_width
    if shape.qk_norms:
        widths += shape.queries + shape.keys * shape.sharing(tensor)
    if shape.experts:  # a token's rows, once for each of its experts, before and after them
        widths += 2 * shape.of_token * shape.hidden * tensor
    return sbh * (4 * e + masks) / shards + tokens * (e * widths + scores) / tensor


def activation_bytes(
    shape: TransformerShape,
    batch: int,
    tensor: int = 1,
    kept: KeptTensors | None = None,
    stage: StageShape | None = None,
    microbatches: float = 1.0,
    *,
    context: int = 1,
) -> float:
    """Return the bytes of activations when they are most: those kept, and those that the moment needs beside them.

    Two moments are compared:

    - The loss. All layers and the model's ends are kept. The ends are the mask of the embedding's dropout (s b h), the
      input of the final norm and that of the output layer (e s b h each; a BERT's head of masked tokens keeps three
      more), and the softmax of the logits, in fp32 (4 s b v / t) [K, section 4.3]. The loss turns it into the gradient
      of the logits in place, and in half precision makes that again (2 s b v / t).
    - The recomputation of the first layer that the backward reaches. Of the ends only the embedding's mask is left.
      "full" adds everything that a layer keeps, "selective" its scores. A gradient of e s b h arrives, and the output
      layer's gradient of the tied embedding (e h v / t) waits for the other use of the table. With "selective" this is
      a little too much, because the layer's MLP has gone by then.

    stage, microbatches: of a pipeline, and what the stage keeps at once (`kept_microbatches`). The moment's needs count
    once; only the last stage has the loss, and no gradient of the embedding waits where the ends lie apart.
    context: the ranks that share each sequence.
    """
    kept, stage = kept or KeptTensors(), stage or StageShape(shape.layers)
    layer = layer_activation_bytes(shape, batch, tensor, kept, context=context)
    everything = layer_activation_bytes(shape, batch, tensor, replace(kept, recompute="none"), context=context)
    e, tokens = kept.element_bytes, shape.seq * batch / context
    stream = tokens * shape.hidden / (tensor if kept.sequence_parallel else 1)
    mask = stream if kept.hidden_dropout and stage.first else 0.0
    of_logit = 4 + (2 if e == 2 else 0)
    inputs = 5 if shape.model == "bert" else 2
    at_loss = inputs * e * stream + of_logit * tokens * shape.vocab / tensor if stage.last else 0.0
    waits = stage.first and stage.last and not shape.untied
    waiting = e * (stream + (shape.hidden * shape.vocab / tensor if waits else 0))
    at_layer = waiting + everything - layer if kept.recompute != "none" else 0.0
    return microbatches * (stage.layers * layer + mask) + max(at_loss, at_layer)


def training_bytes(
    shape: TransformerShape,
    batch: int,
    tensor: int = 1,
    data: int = 1,
    kept: KeptTensors | None = None,
    stage: StageShape | None = None,
    microbatches: float = 1.0,
    *,
    context: int = 1,
    expert: int = 1,
) -> dict[str, float]:
    """Return the bytes of one rank at the peak of a training step, by use; their sum is what the rank needs.

    batch: of a micro-batch. tensor, data, context, expert: the sizes of these groups. stage, microbatches: as in
    `activation_bytes`. The replicas of a parameter are data x context ranks, and of an expert data x context / expert.

    - "parameters and optimizer": `parameter_bytes`.
    - "experts and their optimizer": the same of a rank's experts, without shared ones, if the model has any.
    - "activations": `activation_bytes`.
    - "gradients being sent": the copies of the gradients at the end of the backward (``kept.sends_together``). The
      activations are free by then, so only the bytes beyond theirs count.

    Not counted: the temporary tensors of single operations other than the loss, what a device's runtime and its
    libraries keep, and unused memory between tensors.
    """
    kept = kept or KeptTensors()
    experts = expert_parameters(shape, tensor, stage, expert=expert)
    dense = parameters(shape, tensor, stage, expert=expert) - experts
    activations = activation_bytes(shape, batch, tensor, kept, stage, microbatches, context=context)

    def state(owned: float, replicas: int) -> float:
        ranks = replicas if kept.zero1 else 1
        return parameter_bytes(
            owned, element_bytes=kept.element_bytes, gradient_bytes=kept.gradient_bytes, zero1_ranks=ranks
        )

    def sent(owned: float, replicas: int) -> float:
        if replicas == 1 or not kept.sends_together:
            return 0.0
        received = kept.sent_bytes or kept.gradient_bytes
        return owned * (kept.sent_bytes + (received / replicas if kept.zero1 else 0))

    both = (dense, data * context), (experts, data * context // expert)
    of_experts = {"experts and their optimizer": state(*both[1])} if experts else {}
    return {
        "parameters and optimizer": state(*both[0]),
        **of_experts,
        "activations": activations,
        "gradients being sent": max(0.0, sum(sent(*one) for one in both) - activations),
    }
