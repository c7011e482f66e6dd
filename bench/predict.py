"""Predict a training step on a machine that a YAML file describes: time, efficiency, memory, communication.

    python -m bench.predict --paper --ablation                 # the paper's 13 scaling figures, published and predicted
    python -m bench.predict --paper 2021                       # the ten rows of Narayanan et al. 2021
    python -m bench.predict --preset bert-3.9b --cluster dgx-a100 --gpus 64
    python -m bench.predict --model 8.3b --gpus 512 --tensor-model-parallel-size 8 --recompute-granularity full
    python -m bench.predict --plan --model 8.3b --cluster dgx-a100 --gpus 64 --global-batch-size 512
    python -m bench.predict --measure --overhead overhead.json --output this-machine.yaml

With --measure, the command writes the file of this machine, which ``--cluster this-machine`` then reads: it runs matrix
products and passes over memory in fp32 with one thread, for about a second. The links follow from the results of
bench.collectives --only overhead on two ranks: alpha is the engine's time at 8 bytes, beta the slope at the largest
size. Without them the links are those of bench/clusters/amd-epyc.yaml, and the machine's name says so.

Otherwise the command only computes; it needs no GPU and no MPI. bench/prediction/model_cost.py and
bench/prediction/kernels.py explain the model, and bench/clusters/ has the numbers of each machine with their sources.
The
options of training are those of pretrain_gpt, and without one of them the preset's value or that command's counts, but
for --micro-batch-size (8) and --overlap-grad-reduce (the cluster's); --plan searches those of the layout that are not
given. The model covers training with eager or fused kernels and with tensor, data and pipeline parallelism, without
skew between ranks.
"""

from __future__ import annotations

from bench.command.start import answer_help, run_alone, user_errors
from bench.prediction.flags import DEFAULTS, FAMILY, LAYOUT, PIPELINE, SHAPE, predict_parser

if __name__ == "__main__":  # before the other imports, which take seconds
    answer_help("bench.predict", lambda: predict_parser(__doc__))

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench.clusters.cluster import Cluster, load
from bench.command.machine import environment, heading
from bench.prediction import own_machine, paper, paper_2021, plan
from bench.prediction.model_cost import slowdown
from bench.prediction.options import batch_of, dropout_of, layout_of, shape_of
from bench.prediction.step_report import calibration, describe, numbers_of
from commengine.options.declared import flag_of
from commengine.options.parser import OneLineParser
from tplayers.formulas import StepLayout, TransformerShape, parameters
from trainers import presets
from trainers.settings.layout import METHODS

COMMAND = "bench.predict"
RESERVE_GB, TOP = presets.RESERVE_GB, 12  # TOP: rows of --plan that are printed


def parser() -> OneLineParser:
    """The command line."""
    return predict_parser(__doc__)


def check(arguments: Any) -> None:
    """Raise ValueError for options that exclude each other and for numbers without a meaning."""
    for option, needed in (("overhead", "measure"), ("ablation", "paper"), ("reserve_gb", "plan")):
        if getattr(arguments, option) not in (None, False) and not getattr(arguments, needed):
            raise ValueError(f"{flag_of(option)} goes with {flag_of(needed)}")
    pairs = (("paper", "plan"), ("preset", "model"), ("measure", "paper"), ("measure", "plan"), ("measure", "json"))
    for one, other in pairs:
        if getattr(arguments, one) and getattr(arguments, other):
            raise ValueError(f"{flag_of(one)} or {flag_of(other)}, not both")
    if arguments.ablation and arguments.paper != "2019":
        raise ValueError("--ablation: is of --paper 2019")
    plain = dict.fromkeys(("preset", "model", *SHAPE, "gpus", *LAYOUT, *PIPELINE)) | {
        name: DEFAULTS[name] for name in FAMILY
    }
    for name, default in plain.items():
        if getattr(arguments, name) != default and arguments.paper and name != "overlap_grad_reduce":
            raise ValueError(f"--paper takes no {flag_of(name)}: the models and layouts are the paper's")


def paper_lines(cluster: Cluster, found: list[paper.Figure], with_ablation: bool) -> Iterator[str]:
    """Yield the lines of --paper."""
    slow = slowdown(cluster)
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
    """Predict and report. Returns the exit status."""
    with user_errors(COMMAND):
        arguments = parser().parse_args(argv)
        if arguments.preset == presets.LIST:
            print("\n".join(presets.table()))
            return 0
        check(arguments)
        if arguments.measure:
            text = own_machine.measured(arguments.overhead)
            print(text, end="")
            if arguments.output:
                Path(arguments.output).write_text(text, encoding="utf-8")
            return 0
        arguments.cluster = arguments.cluster or ("selene" if arguments.paper == "2021" else "dgx-2h")
        cluster = load(arguments.cluster)
        if arguments.overlap_grad_reduce is not None:
            cluster = replace(cluster, overlap=arguments.overlap_grad_reduce)
        if arguments.paper == "2021":
            rows, read = paper_2021.table_1(cluster), paper_2021.figures(cluster)
            lines, result = list(paper_2021.lines(cluster, rows, read)), paper.as_json([*rows, *read])
        elif arguments.paper:
            found = paper.figures(cluster)
            lines, result = list(paper_lines(cluster, found, arguments.ablation)), paper.as_json(found)
        elif arguments.plan:
            lines, result = _planned(arguments, cluster)
        else:
            shape, layout = shape_of(arguments), layout_of(arguments)
            lines, numbers = describe(shape, layout, cluster)
            result = _context(arguments, shape, cluster) | {"layout": _layout(layout)} | numbers
    print("\n".join(lines))
    if arguments.output:
        Path(arguments.output).write_text("\n".join([*heading("Prediction", _surroundings()), "", *lines, ""]))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(result, indent=1))
    if arguments.plan and not any(one["fits"] for one in result["candidates"]):
        print("python -m bench.predict --plan: nothing fits", file=sys.stderr)
        return 1
    return 0


def _surroundings() -> dict[str, Any]:
    return environment(COMMAND) | {"hardware": "arithmetic; hardware does not matter"}


def _context(arguments: Any, shape: TransformerShape, cluster: Cluster) -> dict[str, Any]:
    """The subject of a prediction, for --json."""
    device = cluster.device
    model = {"name": arguments.preset or arguments.model} | asdict(shape) | {"parameters": parameters(shape)}
    machine = {
        "name": cluster.name, "file": arguments.cluster, "device": device.name, "peak_flops": device.peak_flops,
        "memory_bytes": device.memory_bytes, "overlap_grad_reduce": cluster.overlap,
        "calibrated": cluster.calibration is not None,
    }  # fmt: skip
    return _surroundings() | {"model": model, "cluster": machine}


def _layout(layout: StepLayout) -> dict[str, Any]:
    return asdict(layout) | {"gpus": layout.ranks, "global_batch_size": layout.batch}


def _planned(arguments: Any, cluster: Cluster) -> tuple[list[str], dict[str, Any]]:
    gpus, batch = arguments.gpus, batch_of(arguments)
    if gpus is None or batch is None:
        raise ValueError("--plan needs --gpus and --global-batch-size")
    shape, room = shape_of(arguments), cluster.device.memory_bytes
    reserve = 1e9 * (RESERVE_GB if arguments.reserve_gb is None else arguments.reserve_gb)
    if not 0 <= reserve < room:
        raise ValueError(f"--reserve-gb {reserve / 1e9:g}: at least 0, and less than a device's {room / 1e9:.1f}")
    given = {field: getattr(arguments, option[2:].replace("-", "_")) for field, option in plan.SEARCHED.items()}
    fixed = {field: value for field, value in given.items() if value is not None}
    like = replace(dropout_of(arguments), chunk_layers=arguments.num_layers_per_virtual_pipeline_stage)
    methods = (METHODS[arguments.cp_comm_type],) if arguments.cp_comm_type else plan.SHARING
    candidates = plan.plan(shape, cluster, gpus, batch, fixed=fixed, reserve=reserve, like=like, methods=methods)
    lines = [
        f"{parameters(shape) / 1e9:.2f} billion parameters, batch {batch}, on {gpus} x {cluster.device.name} "
        f"({cluster.name})",
        "",
        *plan.table(candidates, TOP),
        "",
        f"- {calibration(cluster)}",
    ]
    if not candidates[0].fits:
        lines += [
            "",
            f"**Nothing fits**: the least that a layout needs is {candidates[0].step.memory_total / 1e9:.1f} GB a "
            f"device, of {(room - reserve) / 1e9:.1f} GB. It takes more or larger devices"
            + (f", or others than the given {', '.join(plan.SEARCHED[one] for one in fixed)}." if fixed else "."),
        ]
    rows = [asdict(one.layout) | numbers_of(one.step) | {"fits": one.fits, "why": one.why} for one in candidates]
    asked = {"gpus": gpus, "global_batch_size": batch, "reserve_bytes": reserve, "fixed": fixed}
    return lines, _context(arguments, shape, cluster) | asked | {"candidates": rows}


if __name__ == "__main__":
    run_alone(main)
