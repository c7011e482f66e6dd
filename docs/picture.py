"""The picture of README.md, made from the rows of a table of bench/results: ``python docs/picture.py``.

One panel: the time of an all-reduce of fp32 on two ranks, by the engine and by MPI, from 4 bytes to 64 MB.
"""

from __future__ import annotations

import csv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "bench" / "results" / "all_reduce.csv"
PICTURE = ROOT / "docs" / "images" / "all_reduce.png"
UNITS = {"B": 1, "KB": 2**10, "MB": 2**20}
#: the ways that are drawn: their label, colour and marker
DRAWN = {
    "mpi4py": ("mpi4py over MPICH", "#999999", "s"),
    "private": ("commengine, any tensor", "#d55e00", "o"),
    "in window": ("commengine, tensor of comm.empty", "#0072b2", "o"),
}


def times(text: str) -> dict[str, dict[int, float]]:
    """Microseconds by way and size in bytes: of float32, in the first state of the machine."""
    found: dict[str, dict[int, float]] = {}
    for row in csv.DictReader(text.splitlines()):
        if (row["state"], row["dtype"]) == ("1", "float32") and row["median_us"]:
            found.setdefault(row["way"], {})[int(row["bytes"])] = float(row["median_us"])
    return found


def draw(path: Path) -> None:
    """Write the picture as ``path``."""
    from matplotlib.figure import Figure

    measured = times(TABLE.read_text(encoding="utf-8"))
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.subplots()
    for name, (label, colour, marker) in DRAWN.items():
        axes.loglog(
            *zip(*sorted(measured[name].items()), strict=True), color=colour, marker=marker, markersize=4, label=label
        )
    sizes = [4**power for power in range(1, 14)]
    names = [next(f"{size // unit} {name}" for name, unit in reversed(UNITS.items()) if size >= unit) for size in sizes]
    axes.set_xticks(sizes, names, rotation=45)
    axes.minorticks_off()
    axes.set(xlabel="size of the tensor", ylabel="microseconds")
    axes.set_title("From 64 KB on, an all-reduce takes a seventh to three fifths of MPI's time", fontsize=11)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    draw(PICTURE)
