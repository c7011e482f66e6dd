"""How evenly the tokens of a run go to the experts of each layer: for metrics, warnings, the report and a picture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

#: the begin of the names, in metrics.jsonl, of each layer's busiest expert
LOAD = "expert_load/layer_"
#: the name there of how many experts of all layers had no token
IDLE = "idle_experts"

#: [layer][expert]: how many tokens had the expert
Tokens = Sequence[Sequence[int]]

#: experts that a line of text names
NAMED = 4

#: tokens of an even share from which on it is no chance that an expert has none
ENOUGH = 32


def load(counts: Sequence[int], count: int) -> float:
    """``count`` of a layer's tokens as a multiple of an even share; 0 without tokens."""
    return count * len(counts) / max(sum(counts), 1)


class ExpertWatch:
    """What a run says about its experts. It is made and asked on rank 0, with the tokens of all ranks.

    say: prints a line for people.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._dead: set[tuple[int, int]] = set()
        #: of the last interval that was logged
        self.tokens: Tokens = ()

    def row(self, iteration: int, tokens: Tokens) -> dict[str, float]:
        """The fields of a row of metrics.jsonl. It warns once of an expert that has had no token since the last row."""
        self.tokens = tokens
        idle = {(n, expert) for n, counts in enumerate(tokens) for expert, count in enumerate(counts) if not count}
        dead = {(n, expert) for n, expert in idle if sum(tokens[n]) >= ENOUGH * len(tokens[n])}
        if new := sorted(dead - self._dead):
            names = ", ".join(f"expert {expert} of layer {layer}" for layer, expert in new[:NAMED])
            more = f" and {len(new) - NAMED} more" if len(new) > NAMED else ""
            self._say(
                f"warning: step {iteration}: {names}{more}: no token since the last row of the metrics; such an expert "
                "learns nothing (a larger --moe-aux-loss-coeff spreads the tokens)"
            )
        self._dead = dead
        busiest = {f"{LOAD}{layer}": load(counts, max(counts)) for layer, counts in enumerate(tokens)}
        return {**busiest, IDLE: len(idle)}


def expert_lines(tokens: Tokens) -> Iterator[str]:
    """The part of a report for people."""
    yield "experts in the last interval of the metrics: tokens as multiples of an even share; none is dropped"
    yield f"  {'layer':>7}{'busiest':>18}{'least':>18}{'without tokens':>17}"
    for layer, counts in enumerate(tokens):
        ends = [extreme(range(len(counts)), key=counts.__getitem__) for extreme in (max, min)]
        busiest, least = (f"{load(counts, counts[expert]):.2f} (expert {expert})" for expert in ends)
        yield f"  {layer:>7}{busiest:>18}{least:>18}{sum(not count for count in counts):>17}"


def draw(path: Path, rows: Sequence[Mapping[str, Any]], tokens: Tokens) -> None:
    """Write a picture: each layer's busiest expert over time, and all experts in the last interval.

    rows: of metrics.jsonl. tokens: of the last interval. Raises OSError.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    over_time, now = figure.subplots(1, 2)
    over_time.set(xlabel="iteration", ylabel="tokens of the busiest expert, times an even share")
    layers = len(tokens)
    for layer in range(layers):
        points = [(row["iteration"], row[f"{LOAD}{layer}"]) for row in rows if row.get(f"{LOAD}{layer}") is not None]
        shade = (0.15, 0.35 + 0.5 * layer / max(layers - 1, 1), 0.75 - 0.5 * layer / max(layers - 1, 1))
        name = f"layer {layer}" if layer in (0, layers - 1) else None
        over_time.plot(*zip(*points, strict=True), color=shade, linewidth=1, label=name)
    over_time.axhline(1, linestyle=":", color="grey", label="even")
    over_time.legend(frameon=False)
    shares = [[load(counts, count) for count in counts] for counts in tokens]
    image = now.imshow(shares, aspect="auto", vmin=0, vmax=max(2.0, *map(max, shares)), cmap="viridis")
    now.set(xlabel="expert", ylabel="layer", title="times an even share, last interval")
    now.set_yticks(range(layers) if layers <= 16 else range(0, layers, layers // 8))
    figure.colorbar(image, ax=now)
    figure.savefig(path, dpi=120)
