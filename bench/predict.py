"""What a training step will take on a machine that is described in YAML: time, efficiency, memory, communication.

    python -m bench.predict --paper --ablation                 # the paper's 13 scaling figures, published and predicted
    python -m bench.predict --model 8.3b --gpus 512 --tensor-model-parallel-size 8 --global-batch-size 512
    python -m bench.predict --plan --model 8.3b --cluster dgx-a100 --gpus 64 --global-batch-size 512

Arithmetic only: it needs no GPU and no MPI. How the model counts is in bench/model_cost.py and bench/kernels.py; what
it knows of a machine, with sources, in bench/clusters/. It is eager or fused training with tensor and data parallelism
as this project has them: no pipeline, no skew between ranks.
"""

from __future__ import annotations

import json
import sys
from argparse import BooleanOptionalAction
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench import paper, plan
from bench.cluster import Cluster, load, names
from bench.kernels import Parts
from bench.layout import MODELS, Layout
from bench.machine import environment, heading
from bench.model_cost import Step, predict, slowdown
from bench.options import check_writable, new_parser
from commengine import UsageError
from commengine.cost import TransformerShape, parameters

SHAPE = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "padded_vocab_size")
RECOMPUTE = ("none", "selective", "full")


def parse(argv: Sequence[str] | None = None) -> Any:
    """The command line, and its parser for errors that are found later."""
    options = new_parser("bench.predict", __doc__)
    add = options.add_argument
    add("--config", is_config_file=True, help="YAML file of these options; the command line wins")
    add("--cluster", default="dgx-2h", metavar="NAME|FILE", help=f"one of {', '.join(names())}, or a YAML file")
    add("--model", choices=sorted(MODELS), help="a model of the literature, instead of or before its sizes below")
    for name in SHAPE:
        add(f"--{name.replace('_', '-')}", type=int)
    add("--gpus", type=int, metavar="N", help="devices in all (default: the tensor-parallel size)")
    add("--tensor-model-parallel-size", type=int, default=1)
    add("--micro-batch-size", type=int, default=8, help="sequences a replica runs at once")
    add("--global-batch-size", type=int, help="sequences a step (default: one micro-batch a replica; --plan needs it)")
    add("--recompute-granularity", choices=RECOMPUTE, default="full")
    add("--sequence-parallel", action="store_true")
    add("--use-distributed-optimizer", action="store_true", help="ZeRO-1: optimizer state split over the replicas")
    add("--overlap-grad-reduce", action=BooleanOptionalAction, help="default: the cluster's")
    add("--plan", action="store_true", help="the fastest layout that fits, and why the others lose")
    add("--reserve-gb", type=float, default=2.0, help="memory a device keeps for contexts and buffers (--plan)")
    add("--top", type=int, default=12, help="rows of --plan that are printed")
    add("--paper", action="store_true", help="the 13 scaling figures of Shoeybi et al. 2019")
    add("--ablation", action="store_true", help="with --paper: the 13 without each part, and with other constants")
    add("--json", type=Path, metavar="FILE", help="write every number")
    add("--output", type=Path, metavar="FILE", help="write the tables as markdown")
    return options.parse_args(argv), options


def shape_of(arguments: Any) -> TransformerShape:
    """The model that --model and the sizes name. Raises ValueError where a size is missing or wrong."""
    given = [getattr(arguments, name) for name in SHAPE]
    if arguments.model:
        known = MODELS[arguments.model]
        defaults = (known.layers, known.hidden, known.heads, known.seq, known.vocab)
        given = [default if size is None else size for size, default in zip(given, defaults, strict=True)]
    missing = [f"--{name.replace('_', '-')}" for name, size in zip(SHAPE, given, strict=True) if size is None]
    if missing:
        raise ValueError(f"give --model, or also {', '.join(missing)}")
    return TransformerShape(*given)


def layout_of(arguments: Any) -> Layout:
    """How --gpus and the sizes spread the step. Raises ValueError where one does not divide another."""
    tensor, micro = arguments.tensor_model_parallel_size, arguments.micro_batch_size
    gpus = tensor if arguments.gpus is None else arguments.gpus
    if tensor < 1 or gpus < 1 or gpus % tensor:
        raise ValueError(f"--tensor-model-parallel-size {tensor} does not divide --gpus {gpus}")
    data = gpus // tensor
    batch = data * micro if arguments.global_batch_size is None else arguments.global_batch_size
    if micro < 1 or batch < 1 or batch % (data * micro):
        raise ValueError(
            f"--global-batch-size {batch} is no multiple of --micro-batch-size {micro} x {data} data-parallel replicas"
        )
    return Layout(
        tensor=tensor,
        data=data,
        micro_batch=micro,
        micro_batches=batch // (data * micro),
        recompute=arguments.recompute_granularity,
        sequence_parallel=arguments.sequence_parallel and tensor > 1,
        zero1=arguments.use_distributed_optimizer,
    )


def describe(shape: TransformerShape, layout: Layout, cluster: Cluster) -> tuple[list[str], dict[str, Any]]:
    """One step: for people, and for --json."""
    step = predict(shape, layout, cluster)
    alone = predict(shape, replace(layout, tensor=1, data=1, sequence_parallel=False, zero1=False), cluster)
    efficiency = step.flops_per_device / alone.flops_per_device
    room = cluster.device.memory_bytes
    lines = [
        f"{parameters(shape) / 1e9:.2f} billion parameters on {layout.ranks} x {cluster.device.name} ({cluster.name}), "
        f"tensor {layout.tensor} x data {layout.data}, batch {layout.batch} in micro-batches of {layout.micro_batch}, "
        f"recompute {layout.recompute}{', sequence parallel' if layout.sequence_parallel else ''}"
        f"{', distributed optimizer' if layout.zero1 else ''}",
        "",
        f"- step: {step.total:.3f} s; {step.flops_per_device / 1e12:.1f} TFLOP/s a device, "
        f"{100 * step.flops_per_device / cluster.device.peak_flops:.0f}% of peak (recomputed FLOPs included)",
        f"- scaling efficiency: {100 * efficiency:.0f}% of the same model and micro-batches on one device, did it fit",
        f"- communication that is waited for: {100 * step.communication:.1f}% of the step"
        + (f"; hidden under backward: {1e3 * step.hidden:.0f} ms" if step.hidden else ""),
        f"- memory a device: {step.memory_total / 1e9:.1f} GB of {room / 1e9:.1f}"
        + ("" if step.memory_total <= room else ": **does not fit**"),
        *(f"  - {name}: {size / 1e9:.2f} GB" for name, size in step.memory.items()),
        "",
        "| part | ms a step | share |",
        "|---|---:|---:|",
        *(
            f"| {part.replace('_', ' ')} | {1e3 * spent:.1f} | {100 * spent / step.total:.1f}% |"
            for part, spent in step.seconds.items()
        ),
    ]  # fmt: skip
    return lines, _numbers(step) | {"scaling_efficiency": efficiency}


def _numbers(step: Step) -> dict[str, Any]:
    return {
        "step_s": step.total, "flops_per_device": step.flops_per_device, "communication_share": step.communication,
        "seconds": step.seconds, "hidden_s": step.hidden, "memory_bytes": step.memory,
    }  # fmt: skip


def paper_lines(cluster: Cluster, found: list[paper.Figure], with_ablation: bool) -> Iterator[str]:
    """The report of --paper."""
    slow = slowdown(cluster, Parts())
    rate = cluster.device.memory_bandwidth * cluster.device.memory_efficiency / slow
    yield (
        "One measured number, 39 TFLOP/s on one GPU, sets the rate at which eager kernels move memory: "
        f"{rate / 1e9:.0f} GB/s, 1 / {slow:.2f} of what a plain copy reaches. Everything else is published: see "
        "bench/clusters/dgx-2h.yaml."
    )
    yield ""
    yield from paper.table(found)
    yield from ("", "Where the time goes:", "")
    yield from paper.breakdown(cluster)
    yield from ("", "Not among the 13, and not used: Table 2's time an epoch, as seconds an iteration.", "")
    yield from paper.epochs(cluster)
    if with_ablation:
        yield from ("", "One part of the model taken out at a time, calibrated to 39 TFLOP/s again:", "")
        yield from paper.ablation(cluster)
        yield from ("", "What other values of the least certain constants would do, calibrated again:", "")
        yield from paper.sensitivity(cluster)


def main(argv: Sequence[str] | None = None) -> int:
    """Predict and report; the exit status."""
    arguments, options = parse(argv)
    if arguments.ablation and not arguments.paper:
        options.error("--ablation goes with --paper")
    if arguments.paper and arguments.plan:
        options.error("--paper or --plan, not both")
    try:
        check_writable(output=arguments.output, json=arguments.json)
        cluster = load(arguments.cluster)
        if arguments.overlap_grad_reduce is not None:
            cluster = replace(cluster, overlap=arguments.overlap_grad_reduce)
        if arguments.paper:
            found = paper.figures(cluster)
            lines, result = list(paper_lines(cluster, found, arguments.ablation)), paper.as_json(found)
        elif arguments.plan:
            lines, result = _planned(arguments, cluster)
        else:
            lines, result = describe(shape_of(arguments), layout_of(arguments), cluster)
    except (UsageError, ValueError) as error:
        options.error(str(error))
    print("\n".join(lines))
    if arguments.output:
        surroundings = environment("bench.predict") | {"hardware": "arithmetic; hardware does not matter"}
        arguments.output.write_text("\n".join([*heading("Prediction", surroundings), "", *lines, ""]))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))
    return 0


def _planned(arguments: Any, cluster: Cluster) -> tuple[list[str], dict[str, Any]]:
    gpus, batch = arguments.gpus, arguments.global_batch_size
    if gpus is None or batch is None or gpus < 1 or batch < 1:
        raise ValueError("--plan needs --gpus and --global-batch-size, both at least 1")
    shape = shape_of(arguments)
    zero1, reserve = arguments.use_distributed_optimizer, arguments.reserve_gb * 1e9
    candidates = plan.plan(shape, cluster, gpus, batch, zero1=zero1, reserve=reserve)
    lines = [
        f"{parameters(shape) / 1e9:.2f} billion parameters, batch {batch}, on {gpus} x {cluster.device.name} "
        f"({cluster.name})",
        "",
        *plan.table(candidates, arguments.top),
    ]
    if not candidates[0].fits:
        lines += ["", "**Nothing fits**: more devices, --use-distributed-optimizer, or a smaller batch."]
    rows = [vars(one.layout) | _numbers(one.step) | {"fits": one.fits, "why": one.why} for one in candidates]
    return lines, {"candidates": rows}


if __name__ == "__main__":
    sys.exit(main())
