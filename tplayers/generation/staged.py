"""StagedModel: a model whose layers lie on the stages of a pipeline, as `generate` calls it."""

from __future__ import annotations

from torch import Tensor

from commengine import Communicator
from tplayers.attention.key_value_cache import KeyValueCache
from tplayers.models.gpt import GPT
from tplayers.models.part import StageInput


class StagedModel:
    """The passes of ``model``, a stage of ``pipeline``, one stage after the other. Collective over the pipeline.

    model: for passes without gradients and without sequence parallelism (`inference_copy`).
    """

    def __init__(self, model: GPT, pipeline: Communicator) -> None:
        self.model, self.pipeline = model, pipeline
        self.config, self.device, self.new_cache = model.config, model.device, model.new_cache

    def hidden_states(self, tokens: Tensor, cache: KeyValueCache) -> Tensor:
        """As `tplayers.Transformer.hidden_states`, on the last stage. Elsewhere a tensor of the same shape."""
        part, rank, size = self.model.part, self.pipeline.rank, self.pipeline.size
        for chunk, numbers in enumerate(part.chunks):
            received = None
            if numbers.start:
                received = self.model.activations(tokens)
                self.pipeline.recv(received, (rank - 1) % size)
            x = self.model.hidden_states(tokens, cache=cache, at=StageInput(chunk, received))
            if not part.ends(StageInput(chunk)):
                self.pipeline.send(x, (rank + 1) % size)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """This rank's logits [..., padded vocabulary / ranks of the tensor group], the same on all stages."""
        columns = self.config.padded_vocab_size // self.model.comm.size
        last = self.model.part.last
        logits = self.model.logits(hidden) if last else hidden.new_empty(*hidden.shape[:-1], columns)
        self.pipeline.broadcast(logits, self.pipeline.size - 1)
        return logits
