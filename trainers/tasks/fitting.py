"""Whether a model fits the ranks, their memory and the options that cut it."""

from __future__ import annotations

import math
import os
from dataclasses import asdict, fields

import torch

from commengine import UsageError
from commengine.options.declared import as_flags, flag_of, given, require
from commengine.options.ranges import divisors
from tplayers import TransformerConfig, formulas
from trainers.settings import derived
from trainers.settings.commands import TrainSettings, TransformerSettings
from trainers.weights.other_model import OtherModel


def require_split(shape: TransformerConfig, settings: TrainSettings, ranks: int) -> None:
    """Raise UsageError, with the sizes that would work, unless a model of ``shape`` splits over ``ranks`` ranks.

    settings: of the command, which have the tensor-parallel size and the options that the message names.
    """
    try:
        shape.require_parallel(settings.tensor_model_parallel_size, ranks=ranks)
    except ValueError as error:
        words = str(error).replace("tensor-model-parallel size", "--tensor-model-parallel-size")
        padded = "--vocab-size, padded to a multiple of --make-vocab-size-divisible-by: "
        words = words.replace("padded_vocab_size=", padded).replace("ranks=", "ranks: ")
        fits = shape.pad_attention_heads or shape.num_attention_heads % settings.tensor_model_parallel_size == 0
        hint = "" if fits else "; --pad-attention-heads adds heads of zeros"
        raise UsageError(as_flags(words, type(settings)) + hint) from error


def require_context(shape: TransformerConfig, settings: TransformerSettings) -> None:
    """Raise UsageError unless the sequences, and for an all-to-all the heads of ``shape``, can be cut."""
    size, tensor, length = settings.context_parallel_size, settings.tensor_model_parallel_size, settings.seq_length
    if size == 1:
        return
    named, whole = given(settings, "context_parallel_size"), derived.context_method(settings) == "ulysses"
    # Under a causal mask a rank has an early and a late part, so that all ranks compute equally much.
    parts = 2 if settings.causal and not whole else 1
    multiple = size * math.lcm(parts, tensor if settings.sequence_parallel else 1)
    said = f"{named} and --cp-comm-type {settings.cp_comm_type}" if parts == 2 else named
    said += f" and {given(settings, 'tensor_model_parallel_size')}" if settings.sequence_parallel else ""
    require(
        length % multiple == 0,
        f"{given(settings, 'seq_length')}: must be a multiple of {multiple} with {said}, such as "
        f"{max(length // multiple, 1) * multiple}",
    )
    heads = shape.head_split(tensor).local_heads
    require(
        not whole or heads % size == 0,
        f"{named}: does not divide the {heads} attention heads of a rank, as --cp-comm-type a2a needs; "
        f"{divisors(heads)} do, and --cp-comm-type p2p takes any number",
    )


def require_shards(shape: TransformerConfig, settings: TransformerSettings) -> None:
    """Raise UsageError unless the canonical shards divide the sizes of ``shape``."""
    shards = derived.canonical_shards(settings)
    if shards is None:
        return
    sizes = {
        f"--num-attention-heads {shape.num_attention_heads}": shape.num_attention_heads,
        **{f"{flag_of(name)} {width}": width for name, width in shape.ffn_widths.items()},
        f"--num-query-groups {shape.query_groups}": shape.query_groups,
        f"the padded vocabulary of {shape.padded_vocab_size}": shape.padded_vocab_size,
    }
    padded = "; --pad-attention-heads pads for the tensor-parallel size, and not for them"
    for name, size in sizes.items():
        more = padded if shape.pad_attention_heads and "heads" in name else ""
        require(size % shards == 0, f"{name}: is not a multiple of --deterministic-shards {shards}{more}")


def require_memory(shape: TransformerConfig, settings: TransformerSettings) -> None:
    """Raise UsageError if the parameters, or what a layer keeps of a micro-batch, exceed all memory of a machine.

    A lower bound, so that no run that is possible is refused: weights and gradients in the parameters' dtype, the
    input of each layer (of one layer with full recomputation), and nothing else. The heads of a BERT count, which
    are small, also those that it may lack. Stages of a pipeline count as equal.
    """
    tensor, element = settings.tensor_model_parallel_size, 2 if settings.bf16 or settings.fp16 else 4
    width = settings.hidden_size
    stages = settings.pipeline_model_parallel_size
    costs = shape.cost_shape(derived.positions(settings), tensor)
    weights = formulas.parameters(costs, tensor, expert=derived.expert_ranks(settings)) / stages
    kept = 1 if settings.recompute_granularity == "full" else settings.num_layers // stages
    shares = settings.context_parallel_size * (tensor if settings.sequence_parallel else 1)
    inputs = kept * settings.micro_batch_size * settings.seq_length * width // shares
    there = machine_memory(settings.device)
    for needed, what in (
        (2 * element * weights, f"weights and gradients of {weights:.3g} parameters: --hidden-size {width}, "
         f"--num-layers {settings.num_layers}, --vocab-size {settings.vocab_size}, --max-position-embeddings "
         f"{derived.positions(settings)}"),
        (element * inputs, f"the inputs of its layers, for --micro-batch-size {settings.micro_batch_size} times "
         f"--seq-length {settings.seq_length} tokens of --hidden-size {width}"),
    ):  # fmt: skip
        message = f"the model needs {needed / 1e9:,.1f} GB a rank for {what}; the machine has {there / 1e9:,.1f} GB"
        require(needed <= there, message)


def machine_memory(device: str | None) -> int:
    """The bytes of memory of this machine, or of its first CUDA device; the larger if ``device`` leaves the choice."""
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if device == "cpu" or not torch.cuda.is_available():
        return host
    there = int(torch.cuda.get_device_properties(0).total_memory)
    return there if device is not None else max(there, host)


def require_same(config: TransformerSettings, ffn_size: int, other: OtherModel, load: str) -> None:
    """Raise UsageError unless the settings that change what a model computes are those of ``other``.

    ffn_size: of the run's model. load: of the command, for the error.
    """
    values = asdict(config)
    for item in fields(config):
        name = item.name
        if item.metadata["fixed"] and name in other.settings and name != "seq_length":
            mine, theirs = values[name], other.settings[name]
            if name == "ffn_hidden_size":
                mine = ffn_size
            if mine != theirs:
                raise UsageError(f"{flag_of(name)} {mine}: the model of --load {load} has {theirs}")
