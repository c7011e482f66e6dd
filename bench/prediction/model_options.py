"""The model of a prediction, from options: a preset's or one of the literature, the sizes, and the Llama family's."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from bench.command.values import flag
from bench.prediction.layout import MODELS
from commengine.cost import TransformerShape
from trainers import presets
from trainers.options import HEADS, LAYERS, LENGTH, VOCABULARY, WIDTH, as_flags
from trainers.tasks.gpt import GPTTrainConfig

#: the sizes of a model, with their valid values
SHAPE = {
    "num_layers": LAYERS, "hidden_size": WIDTH, "num_attention_heads": HEADS, "seq_length": LENGTH,
    "padded_vocab_size": VOCABULARY,
}  # fmt: skip
#: the options of pretrain_gpt that change the shape of a model: the Llama family's, with their defaults
FAMILY = {
    item.name: item.default
    for item in fields(GPTTrainConfig)
    if item.name in (
        "ffn_hidden_size", "normalization", "swiglu", "position_embedding_type", "group_query_attention",
        "num_query_groups", "kv_channels", "disable_bias_linear", "add_qkv_bias",
        "untie_embeddings_and_output_weights",
    )
}  # fmt: skip


def shape_of(arguments: Any) -> TransformerShape:
    """The model that --preset or --model and the sizes name. Raises ValueError if a size is missing or wrong."""
    given = [getattr(arguments, name) for name in SHAPE]
    model = "gpt"
    if arguments.preset or arguments.model:
        known = presets.find(arguments.preset).shape() if arguments.preset else MODELS[arguments.model]
        model = known.model
        defaults = (known.layers, known.hidden, known.heads, known.seq, known.vocab)
        given = [default if size is None else size for size, default in zip(given, defaults, strict=True)]
    missing = [flag(name) for name, size in zip(SHAPE, given, strict=True) if size is None]
    if missing:
        raise ValueError(f"give --preset or --model, or also {', '.join(missing)}")
    layers, hidden, heads, seq, vocab = given
    family = {name: getattr(arguments, name) for name in FAMILY}
    if hidden % heads and arguments.kv_channels is None:
        raise ValueError(f"--hidden-size {hidden}: must be a multiple of --num-attention-heads {heads}")
    if changed := [name for name, default in FAMILY.items() if family[name] != default]:
        if model != "gpt":
            raise ValueError(f"{flag(changed[0])}: is a GPT's, and the model is a BERT")
        return _of_the_trainer(family, layers, hidden, heads, seq, vocab)
    return TransformerShape(layers, hidden, heads, seq, vocab, model)


def _of_the_trainer(
    family: dict[str, Any], layers: int, hidden: int, heads: int, seq: int, vocab: int
) -> TransformerShape:
    """The shape that pretrain_gpt gives to a model of these options. Raises ValueError for options that do not fit."""
    config = GPTTrainConfig(
        num_layers=layers, hidden_size=hidden, num_attention_heads=heads, seq_length=seq, vocab_size=vocab,
        make_vocab_size_divisible_by=1, **family,
    )  # fmt: skip
    if config.num_query_groups is not None and not config.group_query_attention:
        raise ValueError(f"--num-query-groups {config.num_query_groups}: needs --group-query-attention")
    try:
        return config.model().cost_shape(seq)
    except ValueError as error:
        raise ValueError(as_flags(str(error), GPTTrainConfig)) from None
