"""A profile of one training step with dropout: how often the host waits for the device, and which kernels take longest.

The step is pretrain_gpt's own, of a GPT of 355M parameters on one rank, with mock data and two microbatches. Calls that
wait are counted by their CUDA names. "Places" are lines of this repository's code at which PyTorch noticed a wait. The
profiler slows the host down, so its times are no measure of speed.
"""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from bench.gpu_study.flops import seconds
from bench.gpu_study.rows import RowFile, finish
from bench.step_study.recorder import open_trainer
from commengine import Communicator
from trainers.tasks.commands import PRETRAIN_GPT
from trainers.training.trainer import Trainer

#: calls of the CUDA runtime in which the host waits for the device; cudaMemcpy without Async does, too
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
MODEL = (
    "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --vocab-size 50257 --bf16 "
    "--micro-batch-size 4 --global-batch-size 8"
)
TINY = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 500 --bf16 "
    "--micro-batch-size 1 --global-batch-size 2"
)
WARM_UP = 3
KERNELS = 20  # the rows of kernels


def profiled(trainer: Trainer, device: torch.device) -> tuple[Any, Counter[str], float]:
    """(profile, places of waits, seconds) of one step. The seconds are those of a step without the profiler."""
    alone = seconds(trainer.step, device, WARM_UP, 1)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities) as found:
        trainer.step()
        finish(device)
    return found, waits_by_place(trainer, device), alone


def waits_by_place(trainer: Trainer, device: torch.device) -> Counter[str]:
    """How often a step waits for the device, by the line that makes it wait. Empty on the CPU."""
    if device.type != "cuda":
        return Counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            trainer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    root = Path(__file__).resolve().parents[2]
    places: Counter[str] = Counter()
    for each in caught:
        if "synchroniz" in str(each.message):
            path = Path(each.filename)
            places[f"{path.relative_to(root) if path.is_relative_to(root) else path.name}:{each.lineno}"] += 1
    return places


def run(world: Communicator, given: Any) -> None:
    """Profile a step and write the counts first, then the kernels."""
    words = (TINY if given.tiny else MODEL).split()
    config = replace(PRETRAIN_GPT, name="bench.gpu").read([*words, "--mock-data", "--train-iters", "9"], world.size)
    trainer = open_trainer(config, world)
    found, places, alone = profiled(trainer, world.device)
    trainer.close()
    events = found.key_averages()
    waits = {name: sum(each.count for each in events if each.key == name) for name in WAITS}
    rows = RowFile(
        given, f"One training step with dropout, profiled on one {world.device.type} device",
        ["| what | count | ms on the device |", "|---|--:|--:|"],
        [f"{alone * 1e3:.1f} ms without the profiler; {sum(waits.values())} calls that wait for the device"],
        seconds=alone, waits=waits, places=dict(places),
    )  # fmt: skip
    for name, count in waits.items():
        rows.add([name, count, ""], {"name": name, "count": count})
    for place, count in places.most_common():
        rows.add([f"waits at {place}", count, ""], {"place": place, "count": count})
    for each in sorted(events, key=_milliseconds, reverse=True)[:KERNELS]:
        spent = _milliseconds(each)
        rows.add([each.key[:80], each.count, f"{spent:.3f}"], {"name": each.key, "count": each.count, "ms": spent})


def _milliseconds(event: Any) -> float:
    """The event's own time on the device; on the CPU if there is no device."""
    return float(event.self_device_time_total or event.self_cpu_time_total * (not torch.cuda.is_available())) / 1e3
