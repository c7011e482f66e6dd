"""Schedule: the forwards and backwards of a step's micro-batches, on one rank or on the stages of a pipeline."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
from torch import Tensor

from commengine import CollectiveError, Communicator
from tplayers import ModelPart, StageInput

from .messages import StageMessages
from .orders import Action, forwards, order

#: What a chunk computes for micro-batch ``number``: its activations for the next chunk, or, of the last chunk, a loss.
#: The second argument is None on a rank that has the whole model.
Forward = Callable[[int, StageInput | None], Tensor]


class Schedule:
    """1F1B over the ranks of ``pipeline``, interleaved if a rank has several chunks (`trainers.pipeline.orders`).

    A rank that has the whole model does one micro-batch after the other. Construction and all methods are collective
    over ``pipeline``.

    part: the layers of this rank; None for a model that has no parts. threaded: as for `StageMessages`.
    """

    def __init__(self, pipeline: Communicator, part: ModelPart | None = None, *, threaded: bool = False) -> None:
        self.pipeline = pipeline
        self.part = part if pipeline.size > 1 else None
        if part is None and pipeline.size > 1:
            raise CollectiveError(f"a pipeline of {pipeline.size} stages needs a model that has parts (ModelPart)")
        self.chunks = 1 if self.part is None else len(self.part.chunks)
        self.name = "one by one" if self.part is None else "1F1B" if self.chunks == 1 else "interleaved 1F1B"
        self.messages = None if self.part is None else StageMessages(pipeline, self.chunks, threaded=threaded)

    def run(
        self, count: int, forward: Forward, like: Callable[[int], Tensor],
        last_microbatch: Callable[[int], AbstractContextManager[None]],
    ) -> None:  # fmt: skip
        """The forward and the backward of ``count`` micro-batches, at least one.

        like: new memory for the activations of a micro-batch. last_microbatch: called with the number of a chunk, a
        block around the chunk's last backward. Raises CollectiveError on every rank if ``count`` differs between them.
        """
        kept: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
        orders = [order(stage, self.pipeline.size, count, self.chunks) for stage in range(self.pipeline.size)]
        self._begin(orders, count, like)
        for action in orders[self.pipeline.rank]:
            _, number, chunk = action
            if self.messages is not None:
                self.messages.before(action)
            with self.about(action):
                if not action.backward:
                    kept[number, chunk] = self._forward(number, chunk, forward)
                    continue
                received, result = kept.pop((number, chunk))
                gradient = None
                if self.messages is not None and not self._ends(chunk):
                    gradient = self.messages.gradient(number, chunk)
                with last_microbatch(chunk) if number == count - 1 else contextlib.nullcontext():
                    torch.autograd.backward(result, gradient)
                if self.messages is not None and received is not None:
                    assert received.grad is not None
                    self.messages.send_gradient(received.grad)
                del received, result, gradient  # before the next forward needs memory
        if self.messages is not None:
            self.messages.finish()

    def evaluate(self, count: int, forward: Forward, like: Callable[[int], Tensor]) -> None:
        """The forward of ``count`` micro-batches, which may be none. The caller turns gradients off."""
        size = self.pipeline.size
        orders = [forwards(size, count, self.chunks)] * size
        # No backward holds an early stage back. Interleaving needs fewer than 2 p messages on their way.
        self._begin(orders, count, like, most=2 * size)
        for action in orders[self.pipeline.rank]:
            if self.messages is not None:
                self.messages.before(action)
            with self.about(action):
                self._forward(action.microbatch, action.chunk, forward)
        if self.messages is not None:
            self.messages.finish()

    def _begin(
        self, orders: list[list[Action]], count: int, like: Callable[[int], Tensor], most: int | None = None
    ) -> None:
        if self.messages is None:
            return
        counts = torch.tensor([count, -count], dtype=torch.int64, device="cpu")
        self.pipeline.all_reduce(counts, "max")
        most, least = int(counts[0]), -int(counts[1])
        if most != least:
            said = f"this stage has {count} micro-batches; the stages have from {least} to {most}"
            raise CollectiveError(f"a pipeline's stages need the same number of micro-batches: {said}")
        self.messages.begin(orders, like, most)

    def _forward(self, number: int, chunk: int, forward: Forward) -> tuple[Tensor | None, Tensor]:
        """(The activations that came, the result) of a chunk for a micro-batch."""
        if self.messages is None or self.part is None:
            return None, forward(number, None)
        received = None
        if self.part.chunks[chunk].start:
            received = self.messages.activations(number, chunk).requires_grad_(torch.is_grad_enabled())
        result = forward(number, StageInput(chunk, received))
        if not self._ends(chunk):
            self.messages.send_activations(result)
        return received, result

    def call(self, model: Any, at: StageInput | None, use: Callable[[Any], Tensor]) -> Tensor:
        """``use(model)``, such as a loss, or the activations of a chunk that has no output layer.

        at: where in this rank's part a pass begins; ``use`` calls its model as one calls the whole model.
        """
        if at is None or self.part is None:
            return use(model)
        try:
            return use(_StageModel(model, self.part, at))
        except _Passed as passed:
            return passed.activations

    def _ends(self, chunk: int) -> bool:
        return self.part is None or self.part.ends(StageInput(chunk))

    def about(self, action: Action) -> AbstractContextManager[None]:
        """A block whose messages are told from others in reports."""
        return self.pipeline.about(f"stage {self.pipeline.rank}, {action}")


def activations_like(model: Any, microbatches: Sequence[Any]) -> Callable[[int], Tensor]:
    """New memory for the activations of a micro-batch, by its number (`TextMicrobatch.read`)."""
    return lambda number: model.activations(*microbatches[number].read)


class _Passed(Exception):
    """Ends a call of `Schedule.call` where the model's output is not a result but the input of the next chunk."""

    def __init__(self, activations: Tensor) -> None:
        super().__init__("the activations of a chunk")
        self.activations = activations


class _StageModel:
    """A model in one chunk of a stage: a call takes the chunk's input by itself.

    Where the chunk has no output layer, a call raises `_Passed`, because there are no losses.
    """

    def __init__(self, model: Any, part: ModelPart, at: StageInput) -> None:
        self._model, self._at, self._ends = model, at, part.ends(at)

    def __call__(self, *args: Any, **named: Any) -> Any:
        found = self._model(*args, at=self._at, **named)
        return found if self._ends else _pass(found if isinstance(found, Tensor) else found[0])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _pass(activations: Tensor) -> NoReturn:
    raise _Passed(activations)
