"""EncodedPrompts: a T5 whose encoder has read the prompts, as `generate` calls a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tplayers.attention.key_value_cache import KeyValueCache
from tplayers.attention.self_attention import padding_bias
from tplayers.host_copy import integers
from tplayers.models.t5 import T5


class DecoderCache(KeyValueCache):
    """A `KeyValueCache` of a decoder's layers, with the keys and values of the encoder's output beside it.

    sources: of each layer, [b, heads of this rank, s, d]. bias: added to their scores, [b, 1, 1, s].
    """

    sources: list[tuple[Tensor, Tensor]]
    bias: Tensor

    def keep(self, rows: Sequence[int]) -> None:
        super().keep(rows)
        numbers = integers(rows, self.bias.device)
        self.sources = [(k.index_select(0, numbers), v.index_select(0, numbers)) for k, v in self.sources]
        self.bias = self.bias.index_select(0, numbers)


class EncodedPrompts:
    """The passes of the decoder of ``model`` for ``prompts``, which its encoder reads here, all at once.

    model: for passes without gradients and without sequence parallelism (`inference_copy`). Every rank of its tensor
    group constructs it, and calls its methods.
    """

    def __init__(self, model: T5, prompts: Sequence[Sequence[int]]) -> None:
        self.model, self.config, self.device, self.logits = model, model.config, model.device, model.logits
        longest = max(map(len, prompts))
        filled = integers([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts], model.device)
        padding = integers([len(prompt) for prompt in prompts], model.device)
        self._bias = padding_bias(padding, len(prompts), longest, model.embedding.weight.dtype, causal=False)
        bias = model.encoder_bias(range(longest), longest, model.encoder_bias.weight) + self._bias
        self._output = model.embedded(filled, "embedding")
        for layer in model.layers[: self.config.num_layers]:
            self._output = layer(self._output, bias)

    def new_cache(self, batch: int, capacity: int) -> DecoderCache:
        """An empty cache for the texts of all prompts, of which there are ``batch``."""
        layers: list[Any] = list(self.model.layers)[self.config.num_layers :]
        attention = layers[0].attention
        cache = DecoderCache(
            len(layers), batch, attention.kv_heads, attention.head_size, capacity, dtype=self._output.dtype,
            device=self.device,
        )  # fmt: skip
        cache.bias = self._bias
        cache.sources = [layer.cross_attention.keys_values(self._output) for layer in layers]
        return cache

    def hidden_states(self, tokens: Tensor, cache: DecoderCache) -> Tensor:
        """The input of the output layer [s, b, h] for the next ``tokens`` [b, s] of each text."""
        places = cache.begin(tokens.shape[1])
        assert isinstance(places, slice)  # all texts have the same length
        bias = self.model.decoder_bias(range(places.start, places.stop), places.stop, self.model.decoder_bias.weight)
        x = self.model.embedded(tokens, "decoder_embedding")
        layers = self.model.layers[self.config.num_layers :]
        for layer, of_layer, source in zip(layers, cache.layers, cache.sources, strict=True):
            x = layer(x, bias, source, cache.bias, None, of_layer)
        return self.model.normed(x)
