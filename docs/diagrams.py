"""The diagrams of the documents as SVG: ``python docs/diagrams.py``; with ``--check`` it compares them and writes none.

groups.svg: the groups of 16 ranks, as `commengine.grid.GridLayout` has them. f-and-g.svg: the paper's f and g around
the two products of an MLP. communicators.svg: what a Communicator makes of the caller's MPI communicator.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from html import escape
from itertools import pairwise
from pathlib import Path

from commengine.grid import AXES, GridLayout

IMAGES = Path(__file__).with_name("images")
COLOURS = {"tensor": "#d55e00", "context": "#009e73", "data": "#0072b2", "pipeline": "#8250a0"}
GREY, BLACK = "#666666", "#222222"
LAYOUT = GridLayout(16, tensor=2, context=2, pipeline=2)

Point = tuple[float, float]


class Drawing:
    """The elements of an SVG file on a white ground."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            'font-family="sans-serif" font-size="14">',
            f"<title>{escape(title)}</title>",
            '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            'orient="auto-start-reverse"><path d="M0 0L10 5L0 10z" fill="context-stroke"/></marker></defs>',
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        ]

    def box(self, x: float, y: float, width: float, height: float, *, colour: str = BLACK, fill: str = "none") -> None:
        """Draw a rectangle with its upper left corner at x, y."""
        self._lines.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" fill="{fill}" stroke="{colour}" '
            'stroke-width="1.5"/>'
        )

    def text(
        self, x: float, y: float, text: str, *, colour: str = BLACK, middle: bool = True, bold: bool = False
    ) -> None:
        """Write ``text`` at its middle, or from x on."""
        style = f' text-anchor="{"middle" if middle else "start"}"' + ' font-weight="bold"' * bold
        self._lines.append(f'<text x="{x:g}" y="{y:g}" fill="{colour}"{style}>{escape(text)}</text>')

    def line(self, start: Point, end: Point, *, colour: str = BLACK, width: float = 1.5, tip: bool = True) -> None:
        """Draw a straight line, with a tip at its end."""
        tips = ' marker-end="url(#tip)"' * tip
        self._lines.append(
            f'<line x1="{start[0]:g}" y1="{start[1]:g}" x2="{end[0]:g}" y2="{end[1]:g}" stroke="{colour}" '
            f'stroke-width="{width:g}"{tips}/>'
        )

    def arc(self, start: Point, end: Point, bend: float, *, colour: str) -> None:
        """Draw a curve that bends downwards by ``bend``."""
        x, y = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2 + bend
        self._lines.append(
            f'<path d="M{start[0]:g} {start[1]:g}Q{x:g} {y:g} {end[0]:g} {end[1]:g}" fill="none" stroke="{colour}" '
            'stroke-width="4"/>'
        )

    def svg(self) -> str:
        """The text of the file."""
        return "\n".join([*self._lines, "</svg>", ""])


def groups() -> str:
    """Draw 16 ranks as two stages of two replicas, and the four groups of rank 0."""
    drawing = Drawing(860, 300, "The groups of 16 ranks")
    at = {}
    for rank in range(LAYOUT.world_size):
        place = LAYOUT.place(rank)
        at[rank] = (
            80.0 + 430 * place["pipeline"] + 190 * place["data"] + 80 * place["tensor"],
            90.0 + 70 * place["context"],
        )
    for stage in range(LAYOUT.pipeline):
        drawing.box(20 + 430 * stage, 20, 390, 200, colour=GREY)
        drawing.text(215 + 430 * stage, 42, f"stage {stage}", colour=GREY)
        for replica in range(LAYOUT.data):
            drawing.box(40 + 430 * stage + 190 * replica, 54, 160, 150, colour="#bbbbbb", fill="#f6f6f6")
    for axis in AXES:
        for one, other in pairwise(LAYOUT.group(0, axis)):
            if axis in ("tensor", "context"):
                drawing.line(at[one], at[other], colour=COLOURS[axis], width=4, tip=False)
            else:
                drawing.arc(at[one], at[other], -50 if axis == "data" else -90, colour=COLOURS[axis])
    for rank, (x, y) in at.items():
        drawing.box(x - 17, y - 15, 34, 30, fill="#ffffff")
        drawing.text(x, y + 5, str(rank))
    for number, axis in enumerate(AXES):
        said = f"{axis} group: {', '.join(map(str, LAYOUT.group(0, axis)))}"
        drawing.line((20 + 210 * number, 257), (44 + 210 * number, 257), colour=COLOURS[axis], width=4, tip=False)
        drawing.text(50 + 210 * number, 262, said, middle=False)
    drawing.text(430, 288, "The groups of rank 0. In each stage, a grey box is the part of one replica.", colour=GREY)
    return drawing.svg()


def f_and_g() -> str:
    """Draw an MLP on two ranks between f and g, with the way forward above and the way backward below."""
    drawing = Drawing(860, 270, "f and g around the two products of an MLP")
    rows = (75.0, 165.0)
    for (x, name), colour in zip(((150.0, "f"), (690.0, "g")), (COLOURS["tensor"], COLOURS["data"]), strict=True):
        drawing.box(x - 22, 50, 44, 140, colour=colour, fill="#f6f6f6")
        drawing.text(x, 125, name, colour=colour, bold=True)
    drawing.text(50, 125, "X")
    drawing.line((65, 120), (126, 120))
    drawing.text(805, 125, "Z")
    drawing.line((714, 120), (790, 120))
    steps = ((260.0, "X A{}"), (420.0, "Y{0} = GeLU(X A{0})"), (590.0, "Y{0} B{0}"))
    widths = (70.0, 140.0, 70.0)
    for number, y in enumerate(rows, 1):
        left = 172.0
        for (x, name), width in zip(steps, widths, strict=True):
            drawing.line((left, y), (x - width / 2 - 2, y))
            drawing.box(x - width / 2, y - 19, width, 38, fill="#ffffff")
            drawing.text(x, y + 5, name.format(number))
            left = x + width / 2
        drawing.line((left, y), (666, y))
        drawing.text(420, y - 28, f"rank {number - 1}", colour=GREY)
    drawing.text(150, 30, "forward: identity", colour=COLOURS["tensor"])
    drawing.text(690, 30, "forward: all-reduce", colour=COLOURS["data"])
    drawing.text(150, 215, "backward: all-reduce", colour=COLOURS["tensor"])
    drawing.text(690, 215, "backward: identity", colour=COLOURS["data"])
    drawing.text(430, 250, "A is split along its columns, and B along its rows: only f and g communicate.", colour=GREY)
    return drawing.svg()


def communicators() -> str:
    """Draw the caller's communicator, the duplicates that a Communicator makes of it, and the threads and devices."""
    drawing = Drawing(860, 330, "Streams and communicators")
    host, device = COLOURS["tensor"], COLOURS["data"]

    def node(x: float, y: float, width: float, *lines: str, colour: str = BLACK) -> Point:
        drawing.box(x, y, width, 14 + 19 * len(lines), colour=colour, fill="#ffffff")
        for number, line in enumerate(lines):
            drawing.text(x + width / 2, y + 21 + 19 * number, line, bold=number == 0)
        return x + width / 2, y

    drawing.box(10, 200, 415, 100, colour="#bbbbbb", fill="#f6f6f6")
    drawing.box(435, 200, 415, 100, colour="#bbbbbb", fill="#f6f6f6")
    node(20, 20, 220, "your MPI communicator", "it stays as it is")
    node(320, 20, 240, "Communicator(mpi_comm)", "a duplicate")
    node(640, 20, 210, "its splits", "tensor, data, ...")
    drawing.line((242, 46), (318, 46))
    drawing.line((562, 46), (638, 46))
    children = (
        node(20, 120, 190, "host collectives", "the caller's thread", colour=host),
        node(230, 120, 190, "new_stream()", "a thread, a duplicate", colour=host),
        node(440, 120, 190, "device collectives", "NCCL, torch's stream", colour=device),
        node(650, 120, 200, "new_stream() on a device", "its own stream and NCCL", colour=device),
    )
    for child in children:
        drawing.line((440, 74), (child[0], child[1] - 2), colour=GREY)
    told = (
        (
            217,
            "work.wait(): the host waits",
            "calls of a stream keep their order;",
            "two streams run beside each other",
            host,
        ),
        (
            642,
            "work.wait(): the current CUDA stream waits",
            "the host goes on;",
            "the kernels keep the host's order",
            device,
        ),
    )
    for x, *lines, colour in told:
        for number, line in enumerate(lines):
            drawing.text(x, 226 + 26 * number, str(line), colour=str(colour))
    drawing.text(
        430,
        322,
        "A call on one stream cannot match a call on another one: each has a communicator of its own.",
        colour=GREY,
    )
    return drawing.svg()


DIAGRAMS: dict[str, Callable[[], str]] = {"groups": groups, "f-and-g": f_and_g, "communicators": communicators}


def stale(folder: Path) -> Iterator[Path]:
    """Yield the files of ``folder`` that are missing or not those that this file draws."""
    for name, draw in DIAGRAMS.items():
        path = folder / f"{name}.svg"
        if not path.is_file() or path.read_text(encoding="utf-8") != draw():
            yield path


def main(arguments: list[str], folder: Path = IMAGES) -> int:
    """Write the diagrams, or compare them; the exit status."""
    if arguments not in ([], ["--check"]):
        print("usage: python docs/diagrams.py [--check]", file=sys.stderr)
        return 2
    if arguments:
        old = list(stale(folder))
        for path in old:
            print(f"{path}: is not what docs/diagrams.py draws; run: python docs/diagrams.py", file=sys.stderr)
        return 1 if old else 0
    for name, draw in DIAGRAMS.items():
        (folder / f"{name}.svg").write_text(draw(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
