"""Predict from measurements with the commands that a user of a real cluster runs: fits, then bench.predict."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from bench.clusters.device_rates import DeviceRates
from bench.collective_study.measurement import Measurement, comparable
from bench.collective_study.results import FORMAT, measurements
from bench.emulator.layouts import MODEL, LayoutRun
from bench.prediction.group_cost import place_of
from commengine import UsageError
from commengine.cost import bus_factor
from commengine.options.declared import flag_of
from trainers.settings.commands import GPTSettings

SIZES = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "vocab_size")


def write_cluster(folder: Path, name: str, found: dict[str, Any], step: GPTSettings, node: int) -> Path:
    """The file of a cluster, for bench.predict, from what was measured on it (`bench.emulator.job.everything`).

    step: of one rank, which was measured, too. node: the ranks of a node.
    """
    rates, ranks = DeviceRates(**found["rates"]), found["ranks"]
    models: dict[tuple[tuple[int, int], int], dict[str, Any]] = {}
    links = []
    for tensor, rows in found["collectives"].items():
        for group in sorted({row["group"] for row in rows}):
            found_here = [row for row in rows if row["group"] == group]
            mine = measurements(found_here)
            place = place_of(group, int(tensor), ranks // int(tensor), node)
            if (place, mine[0].ranks) in models:
                continue
            results, model = folder / f"{name}-{group}-{tensor}.json", folder / f"{name}-{group}-{tensor}-fit.json"
            results.write_text(json.dumps({"format": FORMAT, "rows": found_here}))
            _run("bench.study", "--only", "fit", str(results), "--output", str(model))
            lie = {"members_per_node": place[0], "groups_per_node": place[1], "fitted": model.name}
            models[place, mine[0].ranks] = lie
            links.append((mine[0].ranks > place[0], _link(mine)))
    inside = min((link for between, link in links if not between), default=links[0][1])
    between = min((link for between, link in links if between), default=inside)
    data = {
        "name": name,
        "device": {"name": "a drawn device"} | rates.section() | {
            "cache_gb_per_s": 100000, "memory_gb": 80, "launch_us": round(1e6 * rates.dispatch, 3),
        },
        "node": {"ranks": node, "nics": 1},
        "collective_base_us": 0,
        **{which: {"alpha_us": round(alpha * 1e6, 3), "gb_per_s": round(rate / 1e9, 3)}
           for which, (alpha, rate) in (("inside", inside), ("between", between))},
        "overlap": False,
        "calibration": {
            "model": {_option(key): getattr(step, key) for key in SIZES}, "micro_batch_size": step.micro_batch_size,
            "recompute": "none", "seconds": round(found["step"], 6),
        },
        "measured": list(models.values()),
    }  # fmt: skip
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    return path


def predict(cluster: Path, run: LayoutRun, result: Path) -> float:
    """The seconds of a step that bench.predict says."""
    _run("bench.predict", *arguments(cluster, run), "--json", str(result))
    return float(json.loads(result.read_text())["step_s"])


def arguments(cluster: Path, run: LayoutRun) -> list[str]:
    """The command line of a prediction."""
    options = ["--cluster", str(cluster), "--gpus", str(run.ranks)]
    for key, value in (MODEL | run.options).items():
        name = flag_of(_option(key))
        options += [name] if value is True else [name, str(value)]
    return options


def _option(name: str) -> str:
    """The name that bench.predict has for an option of pretrain_gpt."""
    return "padded_vocab_size" if name == "vocab_size" else name


def _link(rows: list[Measurement]) -> tuple[float, float]:
    """Alpha in seconds and the rate in bytes a second of a ring through a group, from its all-reduces."""
    found = (row for row in comparable(rows) if row.operation == "all_reduce")
    mine = sorted((row.bytes, row.p50) for row in found)
    ranks = rows[0].ranks
    (_, least), (size, longest) = mine[0], mine[-1]
    return least / (2 * (ranks - 1)), bus_factor("all_reduce", ranks) * size / longest


def _run(*words: str) -> None:
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise UsageError(f"python -m {' '.join(words)}: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
