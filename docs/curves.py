"""The table and the picture of docs/moe.md: ``python docs/curves.py FOLDER``, with the runs dense-SEED and moe-SEED.

A run is a folder that ``trainers.pretrain_gpt --save`` wrote. The table goes to standard output, the picture to
``FOLDER/moe.png``.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

#: the runs of a kind: their label, and their colour
KINDS = {"dense": ("dense", "#999999"), "moe": ("8 experts, 2 of them for each token", "#0072b2")}

#: held-out losses of the runs of a kind, by step
Losses = dict[int, list[float]]


def held_out(folder: Path, kind: str) -> Losses:
    """The losses of all runs of a kind. Raises ValueError if the runs were not evaluated at the same steps."""
    found: Losses = {}
    runs = sorted(folder.glob(f"{kind}-*"))
    for run in runs:
        for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if "validation_loss" in row:
                found.setdefault(row["iteration"], []).append(row["validation_loss"])
    if not runs or any(len(losses) != len(runs) for losses in found.values()):
        raise ValueError(f"{folder}: the runs {kind}-* are missing, or were not evaluated at the same steps")
    return found


def table(both: dict[str, Losses]) -> str:
    """Means over the seeds, with the lowest and the highest."""
    head = "| step | " + " | ".join(KINDS[kind][0] for kind in both) + " | experts - dense |\n"
    rows = [head, "|--:" * (len(both) + 2) + "|\n"]
    for step in both["dense"]:
        cells = [
            f"{statistics.mean(of[step]):.4f} [{min(of[step]):.4f} to {max(of[step]):.4f}]" for of in both.values()
        ]
        gap = statistics.mean(both["moe"][step]) - statistics.mean(both["dense"][step])
        rows.append(f"| {step} | {' | '.join(cells)} | {gap:+.4f} |\n")
    return "".join(rows)


def draw(both: dict[str, Losses], path: Path) -> None:
    """A line of means for each kind, and a band from the lowest to the highest."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.subplots()
    for kind, losses in both.items():
        label, colour = KINDS[kind]
        steps = list(losses)
        axes.plot(steps, [statistics.mean(losses[step]) for step in steps], color=colour, marker="o", markersize=4,
                  label=label)  # fmt: skip
        axes.fill_between(
            steps, [min(losses[step]) for step in steps], [max(losses[step]) for step in steps], color=colour, alpha=0.3
        )
    axes.set_xlabel("step")
    axes.set_ylabel("held-out loss, nats a token")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Print the table, and write the picture."""
    folder = Path(sys.argv[1])
    both = {kind: held_out(folder, kind) for kind in KINDS}
    sys.stdout.write(table(both))
    draw(both, folder / "moe.png")


if __name__ == "__main__":
    main()
