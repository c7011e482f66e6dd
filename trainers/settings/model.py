"""The models: the layers of a transformer, and what experts, GPT, BERT and T5 add."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from commengine.options.declared import option
from commengine.options.ranges import (
    NOT_NEGATIVE,
    OPEN_FRACTION,
    AtLeastOne,
    Experts,
    Heads,
    Length,
    Positive,
    Share,
    Text,
    Vocabulary,
    Width,
    at_least,
    between,
)

from .saving import LOAD


@dataclass(frozen=True)
class LayerOptions:
    """The layers, however they are trained."""

    hidden_dropout: Share = option(0.1, "dropout on the embedding, after each branch, and on a pooled vector")
    attention_dropout: Share = option(0.1, "dropout on attention probabilities")
    attention_dropout_mask: str = option(
        "position",
        "how attention dropout draws its mask: by position, the same at every parallel size, or in the fused kernel, "
        "which is faster on devices",
        choices=("position", "fused"),
    )
    pad_attention_heads: bool = option(
        False, "pad heads that the tensor-parallel size does not divide with heads of zeros"
    )
    init_method_std: Annotated[float, NOT_NEGATIVE, between(0, 1000)] = option(
        0.02, "standard deviation of the initial weights"
    )
    recompute_granularity: str | None = option(
        None,
        "compute again in the backward instead of keeping in memory: each whole layer, the inside of attention, or "
        "nothing (default none)",
        choices=("full", "selective", "none"),
    )


@dataclass(frozen=True)
class TransformerOptions:
    """The sizes of a transformer, and where they come from."""

    load: Text | None = option(
        None, f"{LOAD}. hf:FOLDER or megatron:FOLDER starts a new run with the weights, the shape and the tokenizer of "
        "another program's model",
    )  # fmt: skip
    hf_files: Text | None = option(
        None, "folder of Hugging Face whose config.json and tokenizer the exports repeat (default: that of --load)"
    )
    preset: str | None = option(
        None, "a model of the paper with its recipe; other flags and --config win. list prints them",
    )  # fmt: skip
    hidden_size: Width = option(768, "width of the residual stream", fixed=True)
    num_attention_heads: Heads = option(12, "attention heads", fixed=True)
    ffn_hidden_size: Width | None = option(
        None, "width of the feed-forward block (default 4 * hidden size)", fixed=True
    )
    max_position_embeddings: Length | None = option(
        None, "positions that the model knows (default seq-length)", fixed=True, default_of="seq_length"
    )
    norm_epsilon: Positive = option(1e-5, "added to the variance in all norms", fixed=True)
    make_vocab_size_divisible_by: Vocabulary = option(
        1024, "pad the vocabulary to a multiple of this, at every TP size", fixed=True
    )
    dry_run: bool = option(False, "print the memory of a rank and the predicted time of a step, and train nothing")
    cost_model: Text | None = option(None, "with --dry-run: a model of bench.study, for the time of the collectives")


@dataclass(frozen=True)
class MixtureOptions:
    """A mixture of experts in the layers."""

    expert_model_parallel_size: AtLeastOne = option(
        1, "data-parallel ranks that share the experts of each layer; tokens travel to the rank of their expert"
    )
    num_experts: Experts | None = option(None, "experts of each layer, in place of its feed-forward block", fixed=True)
    moe_router_topk: Experts = option(2, "experts of each token", fixed=True)
    moe_ffn_hidden_size: Width | None = option(None, "width of an expert (default ffn-hidden-size)", fixed=True)
    moe_router_pre_softmax: bool = option(
        False, "weight an expert by its probability among all experts, not among those of the token", fixed=True
    )
    moe_shared_expert_intermediate_size: Width | None = option(
        None, "width of an expert that all tokens have, too (default none)", fixed=True
    )
    moe_shared_expert_gate: bool = option(False, "the shared expert's result has a gate", fixed=True)
    moe_aux_loss_coeff: Annotated[float, between(0, 1e6)] = option(
        0.0, "coefficient of the loss that balances the experts within each sequence"
    )
    moe_z_loss_coeff: Annotated[float, between(0, 1e6)] = option(
        0.0, "coefficient of the loss that keeps the router's logits small"
    )


@dataclass(frozen=True)
class DecoderOptions:
    """What a GPT has besides; with all of it, it is a Llama."""

    sample_tokens: Annotated[int, between(0, 2**16)] = option(
        64, "length of the text that continues the report's sample"
    )
    normalization: str = option("LayerNorm", "the norm of all layers", choices=("LayerNorm", "RMSNorm"), fixed=True)
    swiglu: bool = option(False, "the feed-forward block is SwiGLU instead of GELU", fixed=True)
    position_embedding_type: str = option(
        "learned_absolute", "positions: a table that is added to the embedding, or rotary positions",
        choices=("learned_absolute", "rope"), fixed=True,
    )  # fmt: skip
    rotary_base: Annotated[float, at_least(1)] = option(10000.0, "theta of rotary positions", fixed=True)
    use_rope_scaling: bool = option(False, "scale the frequencies of rotary positions", fixed=True)
    rope_scaling_type: str = option(
        "llama3", "with --use-rope-scaling: divide all frequencies, or the low ones alone as Llama 3.1 does",
        choices=("linear", "llama3"), fixed=True,
    )  # fmt: skip
    rope_scaling_factor: Annotated[float, at_least(1)] = option(
        8.0, "with --use-rope-scaling: what frequencies are divided by", fixed=True
    )
    rope_low_freq_factor: Positive = option(
        1.0, "with llama3: waves longer than the original positions by this are divided", fixed=True
    )
    rope_high_freq_factor: Positive = option(
        4.0, "with llama3: waves shorter than the original positions by this stay", fixed=True
    )
    rope_original_max_position_embeddings: Length = option(
        8192, "with llama3: the positions before the context was made longer", fixed=True
    )
    group_query_attention: bool = option(False, "several query heads share a head of keys and values", fixed=True)
    num_query_groups: Heads | None = option(
        None, "with --group-query-attention: the heads of keys and values (default 1)", fixed=True
    )
    kv_channels: Width | None = option(
        None, "size of an attention head (default hidden-size / num-attention-heads)", fixed=True
    )
    disable_bias_linear: bool = option(False, "no biases in linear layers", fixed=True)
    add_qkv_bias: bool = option(
        False, "biases in the layers of queries, keys and values, also with --disable-bias-linear", fixed=True
    )
    qk_layernorm: bool = option(False, "normalise the queries and keys of each head", fixed=True)
    untie_embeddings_and_output_weights: bool = option(False, "the output layer has a weight of its own", fixed=True)


@dataclass(frozen=True)
class EncoderOptions:
    """What a BERT has besides."""

    seq_length: Length = option(512, "tokens of a sample, [CLS] and [SEP] included", fixed=True)
    vocab_file: str | None = option(
        None, "BERT's vocab.txt, for a data set without a tokenizer beside it; in place of --tokenizer-model"
    )
    mask_prob: Annotated[float, OPEN_FRACTION] = option(0.15, "share of a sample's tokens that are masked")
    short_seq_prob: Share = option(0.1, "share of samples whose length is drawn from 2 to the full one", fixed=True)
    bert_no_binary_head: bool = option(
        False, "train on masked tokens alone: samples of one part, and no sentence order", fixed=True
    )
    bert_no_token_types: bool = option(False, "no embedding of the parts of a sample, as DistilBERT", fixed=True)
    one_sentence_documents: str = option(
        "mlm", "documents of one sentence: train on their masked tokens without sentence order, or skip them",
        choices=("mlm", "skip"), fixed=True,
    )  # fmt: skip
    norm_placement: str = option(
        "pre", "layer norms inside of the branches (the paper's Figure 7 b), or after each sum (Figure 7 a)",
        choices=("pre", "post"), fixed=True,
    )  # fmt: skip
    gelu: str = option(
        "erf", "GELU by the error function, or by its approximation", choices=("erf", "tanh"), fixed=True
    )
    head_gelu: str | None = option(
        None, "the same of the head of masked tokens (default: that of the layers)", choices=("erf", "tanh"), fixed=True
    )


@dataclass(frozen=True)
class EncoderDecoderOptions:
    """What a T5 has besides. ``--num-layers`` is that of its encoder, and of its decoder."""

    seq_length: Length = option(
        512, "tokens that the encoder reads of a sample, sentinels and end included", fixed=True
    )
    decoder_seq_length: Length = option(
        114, "tokens that the decoder writes of a sample, sentinels and end included", fixed=True
    )
    mask_prob: Annotated[float, OPEN_FRACTION] = option(0.15, "share of a sample's tokens that lie in masked spans")
    mean_noise_span_length: Annotated[float, at_least(1)] = option(3.0, "mean length of a masked span, in tokens")
    vocab_extra_ids: Vocabulary = option(
        100, "sentinels, which are added to a vocabulary without <extra_id_0>: each stands for a span of a sample",
        fixed=True,
    )  # fmt: skip
    norm_epsilon: Positive = option(1e-6, "added to the mean of squares in all norms", fixed=True)
    make_vocab_size_divisible_by: Vocabulary = option(
        128, "pad the vocabulary to a multiple of this, at every TP size", fixed=True
    )
    kv_channels: Width | None = option(
        None, "size of an attention head (default hidden-size / num-attention-heads)", fixed=True
    )
    gated_gelu: bool = option(False, "the feed-forward block is a gated GELU, as in T5 1.1, not ReLU", fixed=True)
    untie_embeddings_and_output_weights: bool = option(
        False, "the output layer has a weight of its own, as in T5 1.1", fixed=True
    )
    disable_decoder_output_scale: bool = option(
        False,
        "do not multiply the decoder's output by hidden-size^-0.5 before the output layer, as in T5 1.1",
        fixed=True,
    )
    relative_attention_num_buckets: Annotated[int, between(4, 2**16)] = option(
        32, "distances that the tables of relative positions tell apart, an even number", fixed=True
    )
    relative_attention_max_distance: Length = option(
        128, "the distance from which on all are one in these tables", fixed=True
    )
    sample_tokens: Annotated[int, between(0, 2**16)] = option(64, "length of the text of the report's sample")
