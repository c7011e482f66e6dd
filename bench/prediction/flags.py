"""The options of bench.predict. Importing this imports no torch."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from bench.clusters.names import OWN, OWN_FILE, names
from bench.command.files import add_files
from bench.command.parser import new_parser
from commengine.options.declared import add_some, flag_of
from commengine.options.parser import OneLineParser
from commengine.options.ranges import COUNT, HEADS, LAYERS, LENGTH, VOCABULARY, WIDTH, between
from trainers.settings.commands import GPTSettings

#: the names of `bench.prediction.layout.MODELS`
MODELS = (
    "1.2b", "1.7b", "1008b", "145.6b", "175b", "18.4b", "2.5b", "3.6b", "310.1b", "355m", "39.1b", "4.2b", "529.6b",
    "7.5b", "76.1b", "8.3b", "mixtral-8x22b", "mixtral-8x7b", "qwen1.5-moe-a2.7b", "qwen3-30b-a3b",
)  # fmt: skip
#: as `trainers.presets` has them, which imports torch
LIST, RESERVE_GB = "list", 2.0
#: the sizes of a model, with their valid values
SHAPE = {
    "num_layers": LAYERS, "hidden_size": WIDTH, "num_attention_heads": HEADS, "seq_length": LENGTH,
    "padded_vocab_size": VOCABULARY,
}  # fmt: skip
#: the options of pretrain_gpt that change the shape of a model: the Llama family's, and those of experts
FAMILY = (
    "ffn_hidden_size", "normalization", "swiglu", "position_embedding_type", "group_query_attention",
    "num_query_groups", "kv_channels", "disable_bias_linear", "add_qkv_bias", "untie_embeddings_and_output_weights",
    "qk_layernorm", "num_experts", "moe_router_topk", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate",
)  # fmt: skip
#: those of the layout; None means that the option was not given
LAYOUT = (
    "global_batch_size", "tensor_model_parallel_size", "context_parallel_size", "cp_comm_type",
    "expert_model_parallel_size", "micro_batch_size",
    "recompute_granularity", "sequence_parallel", "use_distributed_optimizer", "overlap_grad_reduce",
    "hidden_dropout", "attention_dropout", "attention_dropout_mask",
)  # fmt: skip
PIPELINE = ("pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage")
#: the training command's own values, for options that are not given
DEFAULTS: dict[str, Any] = {item.name: item.default for item in fields(GPTSettings) if item.name in FAMILY + LAYOUT}
MICRO_BATCH = 8
#: the defaults of a prediction that differ from the training command's, in words; --plan searches the layout
TOLD = {
    "global_batch_size": "the preset's, or micro-batch-size * data-parallel size",
    "tensor_model_parallel_size": "the preset's, or 1; --plan searches",
    "context_parallel_size": "1; --plan searches",
    "expert_model_parallel_size": "1; --plan searches",
    "cp_comm_type": "a2a; --plan tries both",
    "micro_batch_size": f"{MICRO_BATCH}; --plan searches",
    "recompute_granularity": "the preset's, or none; --plan searches",
    "sequence_parallel": "no; --plan searches",
    "use_distributed_optimizer": "no; --plan searches",
    "overlap_grad_reduce": "the cluster's",
}


def predict_parser(description: str | None) -> OneLineParser:
    """The command line. description: the docstring of the command."""
    options = new_parser("bench.predict", description)
    add = options.add_argument
    add(
        "--cluster",
        metavar="NAME|FILE",
        help=f"one of {', '.join(names())}; {OWN}, which is the {OWN_FILE} that --measure wrote into this "
        "folder; or any YAML file (default: dgx-2h; with --paper 2021, selene)",
    )
    add_options(options)
    add(
        "--plan",
        action="store_true",
        help="find the fastest layout that fits, and say why the others lose; the exit status is 1 if none fits",
    )
    add(
        "--reserve-gb",
        type=float,
        valid=between(0, 10**6),
        metavar="GB",
        help=f"with --plan: memory that a device keeps for contexts and buffers (default: {RESERVE_GB:g})",
    )
    add(
        "--paper",
        nargs="?",
        choices=("2019", "2021"),
        const="2019",
        help="predict the 13 scaling figures of Shoeybi et al. 2019, or Table 1 and two figures of Narayanan et "
        "al. 2021; takes no model or layout",
    )
    add(
        "--ablation",
        action="store_true",
        help="with --paper 2019: also predict them without each part of the model, and with other constants",
    )
    add("--measure", action="store_true", help=f"measure this machine, and print its file, such as {OWN_FILE}")
    add(
        "--overhead",
        metavar="FILE",
        file="read",
        help="with --measure: what bench.collectives --only overhead --json wrote here (default: the links of "
        "amd-epyc.yaml)",
    )
    add_files(
        options,
        json="write the numbers. --paper: by figure5-mp, figure5-mp-dp, table7 and table8, lists of published and "
        "predicted in the paper's order, without the rows that are 100%% by definition (2021: by table1, figure12 and "
        "figure16). --plan: the model, the cluster "
        "and all candidates, best first. Otherwise: the model, the cluster, the layout and its step",
        output="write the tables as markdown, or with --measure the file",
    )
    return options


def add_options(options: OneLineParser) -> None:
    """Add the options of the model and of the layout."""
    add = options.add_argument
    add("--preset", metavar="NAME", help="a model of the paper with its tensor-parallel size, batch and dropout; the "
        f"options below replace its own. {LIST} prints all of them, with the memory they need")  # fmt: skip
    add("--model", choices=MODELS, help="the shape of a model of the literature; the sizes below replace its")
    for name, limits in SHAPE.items():
        add(flag_of(name), type=int, valid=limits, metavar="N", help="default: the size of --preset or --model")
    add(
        "--gpus",
        type=int,
        valid=COUNT,
        metavar="N",
        help="devices in all (default: the tensor-parallel times the pipeline-parallel size; --plan needs it)",
    )
    add(
        "--pipeline-model-parallel-size",
        type=int,
        valid=COUNT,
        metavar="N",
        help="stages of a pipeline, each on devices of its own (default: 1)",
    )
    add("--num-layers-per-virtual-pipeline-stage", type=int, valid=COUNT, metavar="N",
        help="interleave: each stage has several chunks of so many layers (default: one chunk)")  # fmt: skip
    add_some(options, GPTSettings, FAMILY + LAYOUT, TOLD)
    options.set_defaults(**dict.fromkeys(LAYOUT))
