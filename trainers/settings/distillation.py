"""What a model learns from a larger one besides the text (docs/training.md, "A small model from a large one")."""

from __future__ import annotations

from dataclasses import dataclass

from commengine.options.declared import option
from commengine.options.ranges import AtLeastOne, NotNegative, Positive, Share, Text


@dataclass(frozen=True)
class DistillationOptions:
    """``--teacher``, and how the run learns from it."""

    teacher: Text | None = option(
        None, "learn from this model, too: the --save folder of a run, or hf:FOLDER; of the same kind and vocabulary"
    )
    distill_alpha: Share = option(
        0.5, "with --teacher: the weight of its loss; that of the text has the weight 1 - alpha"
    )
    distill_temperature: Positive = option(
        2.0, "with --teacher: what the logits of both models are divided by before their softmax"
    )
    distill_cosine: NotNegative = option(
        0.0, "with --teacher: the weight of 1 - cos of the angle between the last hidden states, of models of one width"
    )
    teacher_tensor_model_parallel_size: AtLeastOne | None = option(
        None, "ranks that share a layer of the teacher: a divisor or a multiple of the --tensor-model-parallel-size "
        "(default: the same)",
    )  # fmt: skip
    student_layers: Text | None = option(
        None,
        "start from these layers of the teacher, such as 0,2,4,7,9,11, and from its embedding and output layer; none "
        "starts from no layer, with a preset that names some",
    )
