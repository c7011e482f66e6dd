"""The parameters of our models by the names and in the layouts of Hugging Face's, both ways.

======================================  ======================================
our model                               Hugging Face's
======================================  ======================================
`tplayers.GPT` with the paper's layers  ``GPT2LMHeadModel``
`tplayers.GPT` with Llama's layers      ``LlamaForCausalLM``, ``MistralForCausalLM``, ``Qwen2ForCausalLM``,
                                        ``Qwen3ForCausalLM``
the same with experts                   ``MixtralForCausalLM``, ``Qwen2MoeForCausalLM``, ``Qwen3MoeForCausalLM``
`tplayers.BERT`, pre-LN                 ``MegatronBertForPreTraining``
`tplayers.BERT`, post-LN                ``BertForPreTraining``
`tplayers.T5`                           ``T5ForConditionalGeneration``
======================================  ======================================

The differences in layout: GPT-2's ``Conv1D`` holds weights as [in, out]. BERT and Llama have queries, keys and values
apart, and Llama gate and up; here they are one tensor [queries; keys; values], or with grouped queries one of the
queries and one [keys; values], and [gate; up]. Our vocabulary is padded. A tied parameter stands once: the output layer
is the token embedding, and BERT's bias of it is ``cls.predictions.bias``.

Give Hugging Face's model the same epsilon of its norms.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tplayers import BERTConfig, T5Config, TransformerConfig

#: the second names of tied parameters, and our name of each
SECOND_NAMES = {
    "lm_head.weight": "embedding.weight", "cls.predictions.decoder.weight": "embedding.weight",
    "cls.predictions.decoder.bias": "mlm_head.bias", "encoder.embed_tokens.weight": "embedding.weight",
    "decoder.embed_tokens.weight": "embedding.weight",
}  # fmt: skip
#: ends of names that add nothing: second names, and buffers of old and new releases
_IGNORED = (
    *SECOND_NAMES, "embeddings.position_ids", "embeddings.token_type_ids", ".attn.bias", ".attn.masked_bias",
    "rotary_emb.inv_freq",
)  # fmt: skip
#: the beginnings of the names of a family's tensors; the first is that of its model without heads
BEGINNINGS = {
    "gpt2": ("transformer.", "lm_head."), "llama": ("model.", "lm_head."), "bert": ("bert.", "cls."),
    "t5": ("", "lm_head."),
}  # fmt: skip


@dataclass(frozen=True)
class HuggingFaceTensor:
    """One of our global tensors, and Hugging Face's tensors with the same numbers.

    ours: our name. theirs: their names; several hold equal blocks of the rows of ours.
    transposed: theirs is ours transposed. vocabulary: the rows of ours are the padded vocabulary.
    """

    ours: str
    theirs: tuple[str, ...]
    transposed: bool = False
    vocabulary: bool = False


#: the head of a fine-tuned BERT by our name: Hugging Face's, and whether the model has the pooler
HEADS = {"classifier": ("classifier", True), "span_head": ("qa_outputs", False)}


def hugging_face_tensors(config: TransformerConfig, head: str | None = None) -> list[HuggingFaceTensor]:
    """Every tensor of the model with this shape.

    config: a `GPTConfig`, a `BERTConfig` or a `T5Config`. head: of a fine-tuned BERT, one of `HEADS`; None for the
    heads of pretraining. Raises ValueError as `family` does.
    """
    if not isinstance(config, BERTConfig):
        layers = {"gpt2": _gpt2, "llama": _llama, "t5": _t5}[family(config)](config)
        output = HuggingFaceTensor("output.weight", ("lm_head.weight",), vocabulary=True)
        return [*layers, *([output] if config.untie_embeddings_and_output_weights else [])]
    if head is None:
        return [*_encoder(config), *_pretraining_heads(config)]
    theirs, pooler = HEADS[head]
    return [*_encoder(config), *(_both("pooler", "bert.pooler.dense") if pooler else ()), *_both(head, theirs)]


def family(config: TransformerConfig) -> str:
    """The family of Hugging Face's models that can be this one: a key of `BEGINNINGS`.

    Raises ValueError, naming the field of ``config``, if there is none.
    """
    if isinstance(config, BERTConfig):
        return "bert"
    if isinstance(config, T5Config):
        return "t5"
    llama = config.position_embedding_type == "rope"
    name = "Llama" if llama else "GPT-2"
    wanted = {
        "normalization": "RMSNorm" if llama else "LayerNorm", "swiglu": llama, "add_bias_linear": not llama,
        **({} if llama else {"query_groups": config.num_attention_heads}),
        **({} if llama else {"head_size": config.hidden_size // config.num_attention_heads}),
    }  # fmt: skip
    for field, value in wanted.items():
        if getattr(config, field) != value:
            raise ValueError(
                f"Hugging Face has no model with position_embedding_type={config.position_embedding_type!r} and "
                f"{field}={getattr(config, field)!r}: {name} has {value!r}"
            )
    if config.qk_layernorm and (not llama or (config.qkv_bias and config.experts is None)):
        raise ValueError(
            f"Hugging Face has no model with qk_layernorm=True, position_embedding_type="
            f"{config.position_embedding_type!r} and add_qkv_bias={config.qkv_bias}: Qwen 3 has 'rope' and False"
        )
    return "llama" if llama else "gpt2"


def ignored(name: str) -> bool:
    """Whether a tensor of this name adds nothing: the second name of a tied parameter, or a buffer."""
    return name.endswith(_IGNORED)


def _both(ours: str, *theirs: str, transposed: bool = False) -> Iterator[HuggingFaceTensor]:
    """Weight and bias of a layer; a vector has no transpose."""
    for kind in ("weight", "bias"):
        names = tuple(f"{name}.{kind}" for name in theirs)
        yield HuggingFaceTensor(f"{ours}.{kind}", names, transposed and kind == "weight")


def _gpt2(config: TransformerConfig) -> Iterator[HuggingFaceTensor]:
    yield HuggingFaceTensor("embedding.weight", ("transformer.wte.weight",), vocabulary=True)
    yield HuggingFaceTensor("position_embedding", ("transformer.wpe.weight",))
    for number in range(config.num_layers):
        ours, theirs = f"layers.{number}", f"transformer.h.{number}"
        yield from _both(f"{ours}.attention_norm", f"{theirs}.ln_1")
        yield from _both(f"{ours}.attention.qkv", f"{theirs}.attn.c_attn", transposed=True)
        yield from _both(f"{ours}.attention.projection", f"{theirs}.attn.c_proj", transposed=True)
        yield from _both(f"{ours}.mlp_norm", f"{theirs}.ln_2")
        yield from _both(f"{ours}.mlp.up", f"{theirs}.mlp.c_fc", transposed=True)
        yield from _both(f"{ours}.mlp.down", f"{theirs}.mlp.c_proj", transposed=True)
    yield from _both("final_norm", "transformer.ln_f")


def _llama(config: TransformerConfig) -> Iterator[HuggingFaceTensor]:
    yield HuggingFaceTensor("embedding.weight", ("model.embed_tokens.weight",), vocabulary=True)
    kinds = ("weight", "bias") if config.qkv_bias else ("weight",)
    for number in range(config.num_layers):
        ours, theirs = f"layers.{number}", f"model.layers.{number}"
        attention, mlp = f"{theirs}.self_attn", f"{theirs}.mlp"
        yield HuggingFaceTensor(f"{ours}.attention_norm.weight", (f"{theirs}.input_layernorm.weight",))
        for kind in kinds:
            query, key, value = (f"{attention}.{part}_proj.{kind}" for part in "qkv")
            if config.grouped:
                yield HuggingFaceTensor(f"{ours}.attention.query.{kind}", (query,))
                yield HuggingFaceTensor(f"{ours}.attention.key_value.{kind}", (key, value))
            else:
                yield HuggingFaceTensor(f"{ours}.attention.qkv.{kind}", (query, key, value))
        if config.qk_layernorm:
            yield HuggingFaceTensor(f"{ours}.attention.query_norm.weight", (f"{attention}.q_norm.weight",))
            yield HuggingFaceTensor(f"{ours}.attention.key_norm.weight", (f"{attention}.k_norm.weight",))
        yield HuggingFaceTensor(f"{ours}.attention.projection.weight", (f"{attention}.o_proj.weight",))
        yield HuggingFaceTensor(f"{ours}.mlp_norm.weight", (f"{theirs}.post_attention_layernorm.weight",))
        if config.experts is None:
            yield from _gated(f"{ours}.mlp", mlp)
            continue
        block, names = experts_names(config)
        yield HuggingFaceTensor(f"{ours}.mlp.router", (f"{theirs}.{block}.gate.weight",))
        for expert in range(config.experts.num_experts):
            yield from _gated(f"{ours}.mlp.experts.{expert}", f"{theirs}.{block}.experts.{expert}", names)
        if config.moe_shared_expert_gate:
            yield from _gated(f"{ours}.mlp.shared_expert", f"{mlp}.shared_expert")
            yield HuggingFaceTensor(f"{ours}.mlp.shared_gate", (f"{mlp}.shared_expert_gate.weight",))
    yield HuggingFaceTensor("final_norm.weight", ("model.norm.weight",))


def _t5(config: TransformerConfig) -> Iterator[HuggingFaceTensor]:
    yield HuggingFaceTensor("embedding.weight", ("shared.weight",), vocabulary=True)
    for stack, first in (("encoder", 0), ("decoder", config.num_layers)):
        tables = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        yield HuggingFaceTensor(f"{stack}_bias.weight", (tables,))
        for number in range(config.num_layers):
            ours, theirs = f"layers.{first + number}", f"{stack}.block.{number}.layer"
            kinds = [("attention", "attention_norm", "SelfAttention")]
            if stack == "decoder":
                kinds.append(("cross_attention", "cross_norm", "EncDecAttention"))
            for place, (mine, norm, name) in enumerate(kinds):
                yield HuggingFaceTensor(f"{ours}.{norm}.weight", (f"{theirs}.{place}.layer_norm.weight",))
                query, key, value, output = (f"{theirs}.{place}.{name}.{part}.weight" for part in "qkvo")
                if mine == "attention":
                    yield HuggingFaceTensor(f"{ours}.{mine}.qkv.weight", (query, key, value))
                else:
                    yield HuggingFaceTensor(f"{ours}.{mine}.query.weight", (query,))
                    yield HuggingFaceTensor(f"{ours}.{mine}.key_value.weight", (key, value))
                yield HuggingFaceTensor(f"{ours}.{mine}.projection.weight", (output,))
            theirs = f"{theirs}.{len(kinds)}"
            yield HuggingFaceTensor(f"{ours}.mlp_norm.weight", (f"{theirs}.layer_norm.weight",))
            if config.swiglu:
                yield from _gated(f"{ours}.mlp", f"{theirs}.DenseReluDense", ("wi_0", "wi_1", "wo"))
            else:
                yield HuggingFaceTensor(f"{ours}.mlp.up.weight", (f"{theirs}.DenseReluDense.wi.weight",))
                yield HuggingFaceTensor(f"{ours}.mlp.down.weight", (f"{theirs}.DenseReluDense.wo.weight",))
    yield HuggingFaceTensor(f"layers.{config.num_layers - 1}.final_norm.weight", ("encoder.final_layer_norm.weight",))
    yield HuggingFaceTensor("final_norm.weight", ("decoder.final_layer_norm.weight",))


#: the ends of the names of gate, up and down
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def _gated(ours: str, theirs: str, names: tuple[str, str, str] = _PROJECTIONS) -> Iterator[HuggingFaceTensor]:
    gate, up, down = (f"{theirs}.{name}.weight" for name in names)
    yield HuggingFaceTensor(f"{ours}.gate_up.weight", (gate, up))
    yield HuggingFaceTensor(f"{ours}.down.weight", (down,))


def experts_names(config: TransformerConfig) -> tuple[str, tuple[str, str, str]]:
    """The block of a layer that has the experts, and the ends of the names of their gate, up and down.

    Raises ValueError as `experts_family` does.
    """
    if experts_family(config) == "mixtral":
        return "block_sparse_moe", ("w1", "w3", "w2")
    return "mlp", _PROJECTIONS


def experts_family(config: TransformerConfig) -> str:
    """The ``model_type`` of Hugging Face's models with the experts of ``config``: mixtral, qwen2_moe or qwen3_moe.

    Raises ValueError, naming the fields, if there is none.
    """
    shared, gate = config.moe_shared_expert_intermediate_size, config.moe_shared_expert_gate
    if config.qk_layernorm:
        if shared is None and not config.qkv_bias:
            return "qwen3_moe"
    elif shared is None and not config.moe_router_pre_softmax and not config.qkv_bias:
        return "mixtral"
    elif shared is not None and gate and config.qkv_bias:
        return "qwen2_moe"
    raise ValueError(
        f"Hugging Face has no model with num_experts={config.num_experts}, "
        f"moe_shared_expert_intermediate_size={shared}, moe_shared_expert_gate={gate}, "
        f"moe_router_pre_softmax={config.moe_router_pre_softmax}, qk_layernorm={config.qk_layernorm} and "
        f"add_qkv_bias={config.qkv_bias}: Mixtral has neither a shared expert, nor the softmax before, nor biases; "
        "Qwen2-MoE has a shared expert with a gate, and these biases; Qwen3-MoE has norms of queries and keys only"
    )


def _encoder(config: BERTConfig) -> Iterator[HuggingFaceTensor]:
    pre = config.norm_placement == "pre"
    embeddings = "bert.embeddings"
    yield HuggingFaceTensor("embedding.weight", (f"{embeddings}.word_embeddings.weight",), vocabulary=True)
    yield HuggingFaceTensor("position_embedding", (f"{embeddings}.position_embeddings.weight",))
    if config.num_tokentypes:
        yield HuggingFaceTensor("token_type_embedding", (f"{embeddings}.token_type_embeddings.weight",))
    if not pre:
        yield from _both("embedding_norm", f"{embeddings}.LayerNorm")
    for number in range(config.num_layers):
        ours, theirs = f"layers.{number}", f"bert.encoder.layer.{number}"
        attention = f"{theirs}.attention"
        yield from _both(f"{ours}.attention_norm", f"{attention}.ln" if pre else f"{attention}.output.LayerNorm")
        yield from _both(f"{ours}.attention.qkv", *(f"{attention}.self.{part}" for part in ("query", "key", "value")))
        yield from _both(f"{ours}.attention.projection", f"{attention}.output.dense")
        yield from _both(f"{ours}.mlp_norm", f"{theirs}.ln" if pre else f"{theirs}.output.LayerNorm")
        yield from _both(f"{ours}.mlp.up", f"{theirs}.intermediate.dense")
        yield from _both(f"{ours}.mlp.down", f"{theirs}.output.dense")
    if pre:
        yield from _both("final_norm", "bert.encoder.ln")


def _pretraining_heads(config: BERTConfig) -> Iterator[HuggingFaceTensor]:
    yield from _both("mlm_head.dense", "cls.predictions.transform.dense")
    yield from _both("mlm_head.norm", "cls.predictions.transform.LayerNorm")
    yield HuggingFaceTensor("mlm_head.bias", ("cls.predictions.bias",), vocabulary=True)
    if config.binary_head:
        yield from _both("pooler", "bert.pooler.dense")
        yield from _both("order_head", "cls.seq_relationship")
