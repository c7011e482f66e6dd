"""The rules about several options of the training commands, in one table: a rule is what is wrong, or nothing.

A new option that excludes another one has a line here, beside the other rules of its record.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from commengine.options.declared import flag_of, given, require, require_ranges
from commengine.options.ranges import divisors

from . import derived
from .distillation import DistillationOptions
from .saving import of_other_program

#: graphs that torch.compile makes of one model: it compiles each stretch of layers for itself
COMPILED_CHUNKS = 8
#: the options that need --save, and why
NEEDS_SAVE = dict.fromkeys(("exit_interval", "exit_signal", "exit_duration_in_mins"), ", or the run is lost") | {
    "save_interval": "", "save_hf": "", "async_save": "", "check_for_spiky_loss": ", for the batches",
}  # fmt: skip


class Rule(NamedTuple):
    """A rule. of: the options, by the names of their fields; it holds for commands that have all of them.

    fault: gives whether something is wrong, and what the error then says; its arguments are the settings and the number
    of ranks.
    """

    of: str
    fault: Callable[[Any, int], tuple[object, str]]


#: what rules that share a computation give one after the other, as `Rule.fault` does
Faults = Iterator[tuple[object, str]]


def require_valid(settings: Any, ranks: int, more: Iterable[Rule] = ()) -> None:
    """Raise UsageError, naming the option and what is valid, unless a command is possible on ``ranks`` ranks.

    more: the rules of the command besides those here.
    """
    require_ranges(settings)
    there = {item.name for item in fields(settings)}
    for rule in (*RULES, *more):
        if there.issuperset(rule.of.split()):
            wrong, text = rule.fault(settings, ranks)
            require(not wrong, text)


def first(faults: Callable[[Any, int], Faults]) -> Callable[[Any, int], tuple[object, str]]:
    """The first fault of several rules."""
    return lambda settings, ranks: next((one for one in faults(settings, ranks) if one[0]), (False, ""))


def _axes(s: Any, ranks: int) -> Faults:
    axes = {
        given(s, "tensor_model_parallel_size"): s.tensor_model_parallel_size,
        f"--context-parallel-size {derived.context_ranks(s)}": derived.context_ranks(s),
        f"--pipeline-model-parallel-size {derived.stages(s)}": derived.stages(s),
    }
    left, before = ranks, list[str]()
    for named, size in axes.items():
        said = f", with {' and '.join(before)}" if before else ""
        yield left % size, f"{named}: does not divide the {ranks} ranks{said}; {divisors(left)} do"
        left //= size
        before += [named] if size > 1 else []


def _steps(s: Any, ranks: int) -> Faults:
    least = derived.least_loss_scale(s)
    yield (
        least > s.initial_loss_scale,
        f"{given(s, 'min_loss_scale')}: must not exceed {given(s, 'initial_loss_scale')}",
    )
    falls = s.lr_decay_style != "constant"
    yield falls and derived.last_lr(s) > s.lr, f"{given(s, 'min_lr')}: must not exceed {given(s, 'lr')}"
    yield warmup(s, derived.warmup_steps(s), given(s, "lr_warmup_iters"))
    replicas = ranks // derived.replica_size(s)
    step = s.micro_batch_size * replicas
    batch = derived.batch_size(s, replicas)
    yield (
        batch % step,
        f"{given(s, 'global_batch_size')}: must be a multiple of {given(s, 'micro_batch_size')} times the "
        f"data-parallel size {replicas}, such as {max(step, batch // step * step)}",
    )


def warmup(settings: Any, steps: int, words: str) -> tuple[bool, str]:
    """Whether a warm-up of ``steps`` does not end before the decay does, and the error. words: that name the steps."""
    decay = settings.lr_decay_iters  # without it, a trial of a few steps may end within the warm-up
    return decay is not None and steps >= decay, f"{words}: must be below {given(settings, 'lr_decay_iters')}"


def _saving(s: Any, _: int) -> Faults:
    if s.save is None:
        yield s.keep_last is not None, f"{given(s, 'keep_last')}: needs --save DIR"
        yield from ((getattr(s, name), f"{flag_of(name)}: needs --save DIR{why}") for name, why in NEEDS_SAVE.items())
    yield (
        s.keep_every is not None and derived.newest_kept(s) is None,
        f"{given(s, 'keep_every')}: needs --keep-last N, because without it every checkpoint is kept",
    )


def _experts(s: Any, ranks: int) -> Faults:
    size = given(s, "expert_model_parallel_size")
    if s.num_experts is None:
        yield s.expert_model_parallel_size != 1, f"{size}: needs --num-experts"
        of_experts = [item for item in fields(s) if item.name.startswith("moe_")]
        yield from (
            (getattr(s, item.name) != item.default, f"{given(s, item.name)}: needs --num-experts")
            for item in of_experts
        )
        return
    experts, data = given(s, "num_experts"), ranks // derived.replica_size(s)
    yield s.moe_router_topk > s.num_experts, f"{given(s, 'moe_router_topk')}: must not exceed {experts}"
    yield (
        s.moe_shared_expert_gate and s.moe_shared_expert_intermediate_size is None,
        "--moe-shared-expert-gate: needs --moe-shared-expert-intermediate-size",
    )
    yield (
        s.num_experts % s.expert_model_parallel_size or data % s.expert_model_parallel_size,
        f"{size}: does not divide {experts} and the {data} data-parallel ranks; "
        f"{divisors(math.gcd(s.num_experts, data))} do",
    )
    yield s.compile, f"--compile: excludes {experts}"


def _corpus(s: Any, _: int) -> Faults:
    tensor = given(s, "tensor_model_parallel_size")
    yield (
        s.sequence_parallel and s.seq_length % s.tensor_model_parallel_size,
        f"{given(s, 'seq_length')}: with --sequence-parallel it must be a multiple of {tensor}",
    )
    if s.mock_data:
        yield s.data_path is not None, "--mock-data: cannot go with --data-path; leave one of them out"
        yield s.vocab_size is None, "--mock-data: needs --vocab-size V"
        yield s.verify_data, "--verify-data: mock data has no files; leave it out"
    else:
        needed = "--data-path: needed: PREFIX of a data set, or --mock-data --vocab-size V"
        yield s.data_path is None, needed


def _distillation(s: Any, ranks: int) -> Faults:
    if s.teacher is None:
        for item in fields(DistillationOptions):
            asked = getattr(s, item.name) not in (item.default, derived.NO_LAYERS)
            yield asked, f"{given(s, item.name)}: needs --teacher"
        return
    excluded = {
        "context_parallel_size": 1, "compile": False, "deterministic": False, "num_experts": None, "dry_run": False,
    }  # fmt: skip
    for name, default in excluded.items():
        if (value := getattr(s, name, default)) != default:
            said = flag_of(name) if value is True else given(s, name)
            yield True, f"{said}: excludes --teacher; leave one of them out"
    own, size = s.tensor_model_parallel_size, s.teacher_tensor_model_parallel_size or s.tensor_model_parallel_size
    replicas, named = ranks // derived.replica_size(s), given(s, "teacher_tensor_model_parallel_size")
    fits = [n for n in range(1, own * replicas + 1) if own % n == 0 or (n % own == 0 and replicas % (n // own) == 0)]
    yield (
        size not in fits,
        f"{named}: must divide {given(s, 'tensor_model_parallel_size')}, or be a multiple of it that "
        f"the ranks of a stage have; {', '.join(map(str, fits))} would do",
    )
    layers = given(s, "student_layers")
    yield (
        derived.student_layers(s) and of_other_program(s.load),
        f"{layers}: excludes --load {s.load}: both say where the run starts",
    )
    yield (
        derived.student_layers(s) and (size != own or s.pipeline_model_parallel_size > 1),
        f"{layers}: needs a teacher with the same tensor-parallel size, and one pipeline stage",
    )


def _t5(s: Any, _: int) -> Faults:
    yield s.context_parallel_size != 1, f"{given(s, 'context_parallel_size')}: a T5 has none; leave it out"
    yield s.dry_run, "--dry-run: there are no formulas of a T5 yet; leave it out"
    yield s.compile, "--compile: excludes a T5, which has not been compiled yet; leave it out"
    yield (
        s.deterministic and s.pipeline_model_parallel_size > 1,
        f"{given(s, 'pipeline_model_parallel_size')}: excludes --deterministic for a T5, whose tables of relative "
        "positions add up their gradients stage by stage",
    )
    for name in ("seq_length", "decoder_seq_length"):
        wanted = derived.canonical_shards(s) or s.tensor_model_parallel_size
        yield (
            s.sequence_parallel and getattr(s, name) % wanted,
            f"{given(s, name)}: must be a multiple of {wanted} with --sequence-parallel",
        )
    yield s.max_position_embeddings, f"{given(s, 'max_position_embeddings')}: a T5 has none; leave it out"
    buckets, most = given(s, "relative_attention_num_buckets"), given(s, "relative_attention_max_distance")
    yield s.relative_attention_num_buckets % 2, f"{buckets}: must be even"
    yield (
        s.relative_attention_max_distance <= s.relative_attention_num_buckets // 2,
        f"{most}: must be above half of {buckets}",
    )


def _stages(s: Any, ranks: int) -> Faults:
    each, stages, layers = s.num_layers_per_virtual_pipeline_stage, s.pipeline_model_parallel_size, derived.layers(s)
    named = given(s, "pipeline_model_parallel_size")
    of_all = given(s, "num_layers") if s.stacks == 1 else f"{layers}, the layers of both stacks"
    yield stages > layers, f"{named}: must be at most {of_all}: each stage needs a layer"
    yield (
        s.overlap_p2p_communication and stages * derived.context_ranks(s) == 1,
        "--overlap-p2p-communication: needs a --pipeline-model-parallel-size or a --context-parallel-size above 1",
    )
    if each is None:
        return
    named = given(s, "num_layers_per_virtual_pipeline_stage")
    yield stages == 1, f"{named}: needs a --pipeline-model-parallel-size above 1"
    fits = [n for n in range(1, layers // stages + 1) if layers % (stages * n) == 0]
    valid = f"{', '.join(map(str, fits))} would" if fits else f"no number would, as {stages} stages do not either"
    yield each not in fits, f"{named}: {stages} stages of such stretches do not divide {layers} layers; {valid}"
    chunks = derived.chunks(s)
    yield (
        s.compile and chunks > COMPILED_CHUNKS,
        f"{named}: {chunks} stretches a stage; --compile takes at most {COMPILED_CHUNKS}",
    )
    replicas, samples = ranks // derived.replica_size(s), derived.samples_at_once(s)
    microbatches = derived.batch_size(s, replicas) // (replicas * samples)
    yield (
        chunks > 1 and microbatches < stages,
        f"{named}: needs a micro-batch for each of the {stages} stages, and a step has {microbatches}: "
        f"--global-batch-size {stages * replicas * samples} would do",
    )


def _context(s: Any, _: int) -> Faults:
    method, mask = given(s, "cp_comm_type"), given(s, "attention_dropout_mask")
    if s.context_parallel_size == 1:
        yield s.cp_comm_type, f"{method}: needs a --context-parallel-size above 1"
        return
    whole = derived.context_method(s) == "ulysses"
    yield (
        s.overlap_p2p_communication and s.pipeline_model_parallel_size == 1 and whole,
        "--overlap-p2p-communication: needs a --pipeline-model-parallel-size above 1, or a --cp-comm-type of p2p or "
        "all_gather",
    )
    named = given(s, "context_parallel_size")
    yield s.compile, f"{named}: excludes --compile, because a graph has no messages; leave one of them out"
    yield (
        s.deterministic and not whole,
        f"{method}: excludes --deterministic, because a row of scores is added up over blocks of keys from all ranks; "
        "--cp-comm-type a2a has whole rows",
    )
    yield (
        _draws_in_kernel(s) and not whole,
        f"{mask}: excludes {method}: a kernel sees some keys only; valid: --attention-dropout-mask position, or "
        "--cp-comm-type a2a",
    )


def _draws_in_kernel(s: Any) -> bool:
    """Whether the fused kernel draws attention's dropout."""
    return bool(s.attention_dropout_mask != "position" and s.attention_dropout)


def _same_bits(s: Any, ranks: int) -> Faults:
    shards = derived.canonical_shards(s)
    if shards is None:
        for name in ("deterministic_shards", "deterministic_parts"):
            yield getattr(s, name) is not None, f"{given(s, name)}: needs --deterministic"
        return
    tensor, context, parts = s.tensor_model_parallel_size, s.context_parallel_size, derived.canonical_parts(s)
    replicas, of_tensor = ranks // derived.replica_size(s), given(s, "tensor_model_parallel_size")
    in_shards, in_parts = f"--deterministic-shards {shards}", f"--deterministic-parts {parts}"
    of_context, length = f"--context-parallel-size {context}", given(s, "seq_length")
    yield shards.bit_count() != 1, f"{in_shards}: must be a power of two"
    yield shards % tensor, f"{of_tensor}: does not divide {in_shards}, as --deterministic needs"
    yield (
        shards % (tensor * context),
        f"{of_context}: times {of_tensor} it does not divide {in_shards}, as --deterministic needs",
    )
    yield parts.bit_count() != 1, f"{in_parts}: must be a power of two that {of_context} divides"
    yield parts % context, f"{of_context}: does not divide {in_parts}"
    yield (
        s.sequence_parallel and tensor > 1 and parts != context,
        f"{in_parts}: excludes --sequence-parallel, unless it is the --context-parallel-size",
    )
    yield replicas.bit_count() != 1, f"--deterministic: {replicas} data-parallel ranks are not a power of two"
    yield s.compile, "--deterministic: excludes --compile, which orders sums as it likes"
    yield (
        s.global_batch_size is None,
        "--deterministic: needs --global-batch-size, because the default depends on the number of ranks",
    )
    mask = given(s, "attention_dropout_mask")
    yield _draws_in_kernel(s), f"{mask}: excludes --deterministic, because the mask depends on the ranks"
    yield (
        s.sequence_parallel and s.seq_length % shards,
        f"{length}: must be a multiple of {in_shards} with --sequence-parallel",
    )
    yield (
        parts > 1 and s.seq_length % max(shards, parts),
        f"{length}: must be a multiple of {in_shards} and of {in_parts}",
    )


#: in the order in which they are asked
RULES = (
    Rule("tensor_model_parallel_size", first(_axes)),
    Rule("bf16 fp16", lambda s, _: (
        s.bf16 and s.fp16, "--bf16 and --fp16: exclude each other; leave one of them out")),
    Rule("loss_scale fp16", lambda s, _: (
        s.loss_scale is not None and not s.fp16, f"{given(s, 'loss_scale')}: needs --fp16")),
    Rule("min_loss_scale lr min_lr lr_warmup_iters micro_batch_size global_batch_size", first(_steps)),
    Rule("save keep_last keep_every", first(_saving)),
    Rule("num_experts expert_model_parallel_size", first(_experts)),
    Rule("mock_data data_path vocab_size verify_data", first(_corpus)),
    Rule("attention_dropout_mask compile", lambda s, _: (
        _draws_in_kernel(s) and s.compile,
        f"{given(s, 'attention_dropout_mask')}: excludes --compile, because a compiled graph cannot seed the mask of "
        "each layer; leave one of them out")),
    Rule("pipeline_model_parallel_size num_layers_per_virtual_pipeline_stage", first(_stages)),
    Rule("context_parallel_size cp_comm_type", first(_context)),
    Rule("deterministic", first(_same_bits)),
    Rule("dry_run max_position_embeddings", lambda s, _: (
        s.seq_length > derived.positions(s) and s.stacks == 1,
        f"{given(s, 'seq_length')}: must not exceed {given(s, 'max_position_embeddings')}")),
    Rule("dry_run cost_model", lambda s, _: (
        s.cost_model is not None and not s.dry_run, f"{given(s, 'cost_model')}: goes with --dry-run")),
    Rule("group_query_attention num_query_groups", lambda s, _: (
        s.num_query_groups is not None and not s.group_query_attention,
        f"{given(s, 'num_query_groups')}: needs --group-query-attention")),
    Rule("use_rope_scaling position_embedding_type", lambda s, _: (
        s.use_rope_scaling and s.position_embedding_type != "rope",
        "--use-rope-scaling: needs --position-embedding-type rope")),
    Rule("num_experts disable_bias_linear", lambda s, _: (
        s.num_experts and not s.disable_bias_linear,
        f"{given(s, 'num_experts')}: needs --disable-bias-linear, as experts have no biases")),
    Rule("num_experts deterministic", lambda s, _: (
        s.num_experts and s.deterministic and derived.canonical_parts(s) > 1,
        f"{given(s, 'num_experts')}: excludes --deterministic with a --context-parallel-size or --deterministic-parts "
        "above 1, because an expert computes all rows of a sample at once")),
    Rule("deterministic qk_layernorm", lambda s, _: (
        s.deterministic and s.qk_layernorm, "--deterministic: excludes --qk-layernorm")),
    Rule("rope_low_freq_factor rope_high_freq_factor", lambda s, _: (
        s.rope_low_freq_factor >= s.rope_high_freq_factor,
        f"{given(s, 'rope_low_freq_factor')}: must be below {given(s, 'rope_high_freq_factor')}")),
    Rule("vocab_file tokenizer_model", lambda s, _: (
        s.vocab_file is not None and s.tokenizer_model is not None,
        "--vocab-file and --tokenizer-model: both name the vocabulary; leave one of them out")),
    Rule("decoder_seq_length", first(_t5)),
    Rule("teacher", first(_distillation)),
    Rule("deterministic one_sentence_documents", lambda s, _: (
        s.deterministic and s.sequence_parallel and s.context_parallel_size > 1 and s.tensor_model_parallel_size > 1,
        "--sequence-parallel: excludes --deterministic with --context-parallel-size for a BERT: its heads see whole "
        "sequences on each rank")),
)  # fmt: skip


def require_resumable(settings: Any, saved: Mapping[str, Any]) -> None:
    """Raise UsageError unless a run with these settings goes on with one that has saved its settings as ``saved``.

    Settings that are marked as fixed have been compared before. A run of ``--deterministic`` keeps its shards and its
    parts.
    """
    if derived.canonical_shards(settings) is None:
        return
    now = {
        "deterministic_shards": derived.canonical_shards(settings),
        "deterministic_parts": derived.canonical_parts(settings),
    }
    for name, value in now.items():
        # A run of before there were parts has one.
        before = saved.get(name) or (1 if saved.get("deterministic_shards") else None)
        require(
            before in (None, value),
            f"{flag_of(name)} {value}: its bits are not those of the run of --load, which has {before}; give "
            f"{flag_of(name)} {before}",
        )
