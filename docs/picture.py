"""The picture of README.md, made from a table of bench/results: ``python docs/picture.py``.

One panel: the time of an all-reduce of fp32 on two ranks, by the engine and by MPI, from 4 bytes to 64 MB.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "bench" / "results" / "all_reduce.md"
PICTURE = ROOT / "docs" / "images" / "all_reduce.png"
UNITS = {"B": 1, "KB": 2**10, "MB": 2**20}
#: the columns that are drawn: their label, colour and marker
DRAWN = {
    "mpi4py": ("mpi4py over MPICH", "#999999", "s"),
    "private": ("commengine, any tensor", "#d55e00", "o"),
    "in window": ("commengine, tensor of comm.empty", "#0072b2", "o"),
}


def times(text: str) -> dict[str, dict[int, float]]:
    """Microseconds by column and size in bytes: the first table of float32 of ``bench.all_reduce``'s result."""
    table = text.split("float32, microseconds:\n", 1)[1].lstrip("\n").split("\n\n", 1)[0]
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines())
    found: dict[str, dict[int, float]] = {name: {} for name in head[1:]}
    for row in rows:
        number, unit = row[0].split()
        for name, cell in zip(head[1:], row[1:], strict=True):
            if cell:
                found[name][int(number) * UNITS[unit]] = float(re.split(r"[ ~]", cell)[0])
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
