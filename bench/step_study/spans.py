"""Follow the caller through a training step: which part it is in, and since when.

The parts are the embedding, the layers, the heads, the loss, and what stands outside of the model. A pipeline stage has
those of its layers, and between its actions it is in the part "pipeline": it sends, and waits. The caller is always in
one part. A boundary ends a span and begins the next, so spans neither overlap nor leave gaps, and a
collective belongs to the span in which it was enqueued. Backward runs through the parts from the last to the first:
a part begins when the gradient of the tensor with which it ends is complete.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from tplayers import BERT, ModelPart, StageInput
from tplayers.models.transformer import Transformer
from trainers.pipeline.orders import Action
from trainers.training.trainer import Trainer

#: the part of a stage between its actions
PIPELINE = "pipeline"


@dataclass(frozen=True)
class Span:
    """A stretch of the caller's time, in seconds of ``time.perf_counter``.

    part: one of `parts_of`, in a phase "forward", "recompute" or "backward"; or, without a phase, "labels", "pipeline",
    "gradients" (zeroing, reduction), "loss and norm" or "optimizer". microbatch: of a part with a phase.
    """

    start: float
    end: float
    part: str
    phase: str
    microbatch: int | None = None


class Spans:
    """The spans so far. One thread at a time may use it: the caller waits while backward runs."""

    def __init__(self) -> None:
        self.part, self.phase, self.microbatch = "labels", "", 0
        self._number: int | None = None  # of the open span
        self._done: list[Span] = []
        self._since = time.perf_counter()

    def enter(self, part: str, phase: str = "") -> None:
        """The caller enters another part."""
        now = time.perf_counter()
        self._done.append(Span(self._since, now, self.part, self.phase, self._number))
        self.part, self.phase, self._since = part, phase, now
        self._number = self.microbatch if phase else None

    def take(self) -> list[Span]:
        """Return all spans until now, and begin the next step's."""
        self.enter("labels")
        found, self._done = [span for span in self._done if span.end > span.start], []
        return found


def parts_of(model: Transformer) -> list[str]:
    """The parts of a model's forward, in order. Its backward runs through them from the last to the first.

    The final norm belongs to the part after the last layer: a GPT's output layer, or a BERT's head of masked tokens. A
    BERT with a sentence-order head has the part "pooler", which is both.
    """
    heads = ["output layer"]
    if isinstance(model, BERT):
        heads = ["MLM head", "output layer", *(["pooler"] if model.config.binary_head else [])]
    return ["embedding", *(f"layer {number}" for number in range(len(model.layers))), *heads, "loss"]


def chunk_of(part: ModelPart, name: str) -> int | None:
    """The number of the chunk that runs a part of the model, by its name in `parts_of`; None if another rank does."""
    if name.startswith("layer "):
        number = int(name.split()[1])
        return next((chunk for chunk, numbers in enumerate(part.chunks) if number in numbers), None)
    if name == "embedding":
        return 0 if part.first else None
    return len(part.chunks) - 1 if part.last else None


@contextmanager
def followed(trainer: Trainer) -> Iterator[Spans]:
    """The `Spans` of ``trainer``'s steps inside the block.

    Its model must not be compiled, because a graph runs no hooks.
    """
    spans, model = Spans(), trainer.model
    assert isinstance(model, Transformer)  # the parts of a step are those of its layers
    parts, chunks = parts_of(model), model.part.chunks
    cuts = {f"layer {chunk.stop - 1}" for chunk in chunks if chunk.stop < model.part.layers}
    with ExitStack() as stack:

        def ended(part: str, tensor: Tensor) -> None:
            """In forward, ``part`` ends with ``tensor``. In backward, it begins with the tensor's gradient."""
            if part in cuts:
                spans.enter(PIPELINE)
            else:
                spans.enter(parts[parts.index(part) + 1], "forward")
            _on_gradient(tensor, spans, part)

        def begins(_: Any, __: Any, options: dict[str, Any]) -> None:
            first = chunks[(options.get("at") or StageInput()).chunk].start
            spans.enter(f"layer {first}" if first else "embedding", "forward")

        def ends(_: Any, __: Any, options: dict[str, Any], result: Any) -> None:
            if model.part.ends(options.get("at") or StageInput()):
                _on_gradient(result, spans, "loss")

        def action(one: Action) -> None:
            spans.microbatch = one.microbatch

        def hook(handle: Any) -> None:
            stack.callback(handle.remove)

        def ends_with(part: str, module: nn.Module) -> None:
            hook(module.register_forward_hook(lambda _, __, result: ended(part, result)))

        hook(model.register_forward_pre_hook(begins, with_kwargs=True))
        if model.part.first:
            hook(model.layers[0].register_forward_pre_hook(lambda _, args: ended("embedding", args[0])))
        for number in model.part.numbers:
            part, layer = f"layer {number}", model.layers[number]
            ends_with(part, layer)
            for handle in _recomputation(layer, spans, part):
                hook(handle)
        _around(stack, model, "logits", after=lambda logits: ended("output layer", logits))
        if isinstance(model, BERT) and model.part.last:
            ends_with("MLM head", model.mlm_head)
            if model.config.binary_head:
                ends_with("pooler", model.order_head)
        hook(model.register_forward_hook(ends, with_kwargs=True))
        _around(stack, trainer.schedule, "about", action)
        # Waiting, and what follows a backward through layers of which the input came from another stage.
        for name in ("activations", "gradient", "send_gradient") if trainer.schedule.messages is not None else ():
            _around(stack, trainer.schedule.messages, name, _entering(spans, PIPELINE))
        _around(stack, trainer.gradients, "zero", _entering(spans, "gradients"), _entering(spans, "labels"))
        _around(stack, trainer.gradients, "finish", _entering(spans, "gradients"), _entering(spans, "loss and norm"))
        _around(stack, trainer.optimizer, "step", _entering(spans, "optimizer"))
        _around(stack, trainer.optimizer, "wait_for_parameters", _entering(spans, "optimizer"))
        yield spans


def _recomputation(layer: nn.Module, spans: Spans, part: str) -> Iterator[Any]:
    """Hooks for a layer that runs again inside backward, from its first module to its last.

    The run ends with an exception if nothing more of the layer is needed.
    """
    first, last = ("attention", "mlp_norm") if layer.norm_placement == "post" else ("attention_norm", "mlp")

    def begin(*_: Any) -> None:
        if spans.phase == "backward":
            spans.enter(part, "recompute")

    def end(*_: Any) -> None:
        if spans.phase == "recompute":
            spans.enter(part, "backward")

    yield layer.get_submodule(first).register_forward_pre_hook(begin)
    yield layer.get_submodule(last).register_forward_hook(end, always_call=True)


def _on_gradient(tensors: Tensor | Sequence[Tensor | None], spans: Spans, part: str) -> None:
    """Backward enters ``part`` when the gradient of a tensor is complete, for each of several tensors."""
    for tensor in [tensors] if isinstance(tensors, Tensor) else tensors:
        if tensor is not None and tensor.requires_grad:
            tensor.register_hook(lambda _: spans.enter(part, "backward"))  # type: ignore[no-untyped-call]


def _entering(spans: Spans, part: str) -> Callable[..., None]:
    return lambda *_: spans.enter(part)


def _around(
    stack: ExitStack,
    owner: Any,
    name: str,
    before: Callable[..., None] | None = None,
    after: Callable[[Any], None] | None = None,
) -> None:
    """Until ``stack`` ends, call ``before`` and ``after(result)`` around the method ``name`` of this object.

    ``before`` gets the arguments of the method.
    """
    method = getattr(owner, name)

    def called(*args: Any, **options: Any) -> Any:
        if before is not None:
            before(*args, **options)
        result = method(*args, **options)
        if after is not None:
            after(result)
        return result

    setattr(owner, name, called)
    stack.callback(delattr, owner, name)
