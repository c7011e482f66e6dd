"""Drawn results against what is known of them: ``python -m tests.bench.study.drawn --files 1000 --state FILE``.

Each file has the rows of an all-reduce whose times are alpha + n beta, or break by a factor of two at one size (all
times from there on, or the time there, with another slope beyond), with drawn sizes, calls and noise. The calls of a
row are drawn, so that its median has a standard error of at most 10%; the median and its interval are those that
bench.collectives would write. Beside them stand, in a drawn order, rows of few calls and of disturbances, and series
of other states, dtypes, reductions and transports. ``bench.study --only fit`` reads the file. The command counts

- straight lines whose alpha and beta lie in the printed intervals, and how wide these are beside those of a fit with
  known noise;
- straight lines that are called broken, and breaks that are found within one measured size;
- models that a row moved which may not be compared, or a series of another kind.

With ``--state`` the command goes on where it stopped. The exit status is 1 if a count misses its bound.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.study import fitting
from bench.timing.sampling import FEWEST, median_interval

#: what must hold: the share of straight lines in the intervals, the width of these, breaks found, and false alarms
HELD, WIDE, FOUND, FALSE = 0.90, 1.5, 0.90, 0.02
#: half a 95% interval in standard errors; a median's standard error over a mean's
NORMAL, OF_MEDIAN = 1.96, math.sqrt(math.pi / 2)
#: bytes and line: from a size on, a call takes alpha + n beta
Line = list[tuple[float, float, float]]


def row(size: int, samples: np.ndarray[Any, Any], **other: Any) -> dict[str, Any]:
    """A row as bench.collectives writes it, of these times in seconds."""
    ends, middle = median_interval(samples), float(np.median(samples))
    known = ends is not None and len(samples) >= 20 and (ends[1] - ends[0]) / 2 <= 0.05 * middle
    return {
        "operation": "all_reduce", "transport": "engine", "group": "world", "ranks": 2, "dtype": "float32",
        "redop": "sum", "root": -1, "in_place": True, "bytes": size, "count": size // 4, "iterations": len(samples),
        "converged": known, "seconds": dict.fromkeys(("p50", "mean", "min"), middle), "ci": ends, "wrong": 0,
        "state": "state 1",
    } | other  # fmt: skip


def seconds(line: Line, size: float) -> float:
    """The time of a call by the line."""
    _, alpha, beta = [part for part in line if part[0] <= size][-1]
    return alpha + size * beta


def case(draw: random.Random) -> dict[str, Any]:
    """A file's rows, those of them that may not be compared or are of another kind, and the truth."""
    noise = np.random.default_rng(draw.getrandbits(63))
    factor, count = draw.choice((2, 2, 4)), draw.randint(7, 24)
    sizes = [4 * factor**k for k in range(min(count, 24 if factor == 2 else 13))]
    alpha, beta = 10 ** draw.uniform(-6, -4), 10 ** draw.uniform(-10.5, -8.5)
    line: Line = [(0, alpha, beta)]
    broken = draw.random() < 0.5
    if broken:
        place = draw.randint(3, len(sizes) - 3)
        by = draw.choice((2.0, 0.5))
        if draw.random() < 0.5:  # all times from there on
            line.append((sizes[place], by * alpha, by * beta))
        else:  # the time there, and another slope from there on
            after, share = by * seconds(line, sizes[place]), draw.uniform(0.1, 0.9)
            line.append((sizes[place], share * after, (1 - share) * after / sizes[place]))
    error = draw.uniform(0.003, 0.1)  # of a median
    equal = draw.choice((None, FEWEST, 10, 20, 60))

    def series(line: Line, **other: Any) -> list[dict[str, Any]]:
        rows = []
        for size in sizes:
            calls = equal or draw.choice((FEWEST, 8, 15, 30, 100))
            each = error * math.sqrt(calls) / OF_MEDIAN
            rows.append(row(size, seconds(line, size) * noise.lognormal(0, each, calls), **other))
        return rows

    good = series(line)
    bad: list[dict[str, Any]] = []
    for size in draw.sample(sizes, draw.randint(0, 4)):
        wrong = seconds(line, size) * draw.choice((0.2, 0.5, 3.0, 10.0))
        calls = draw.randint(1, FEWEST - 1)
        disturbed = draw.random() < 0.5
        one = row(size, wrong * noise.lognormal(0, 0.02, 30 if disturbed else calls))
        # older files had the least and the largest of a few calls as an interval
        bad.append(one | ({"disturbed": True} if disturbed else {"ci": [0.999 * wrong, 1.001 * wrong]}))
    for name, value in (("state", "state 2"), ("dtype", "bfloat16"), ("redop", "max"), ("transport", "mpi4py")):
        if draw.random() < 0.2:
            by = draw.choice((0.5, 1.7, 3.0))
            bad += [
                row(size, np.full(FEWEST, by * seconds(line, size)), **{name: value})
                for size in (sizes if name != "state" else sizes[: len(sizes) // 2])
            ]
    if any(one["transport"] == "mpi4py" for one in bad):  # the first transport in the file counts
        rows = [*good[:1], *draw.sample([*good[1:], *bad], len(good) - 1 + len(bad))]
    else:
        rows = draw.sample([*good, *bad], len(good) + len(bad))
    return {"rows": rows, "good": good, "line": line, "sizes": sizes, "error": error}


def known_widths(line: Line, sizes: Sequence[int], error: float) -> tuple[float, float]:
    """The widths of the 95% intervals of alpha and beta of a straight line if the noise is known."""
    times = np.array([seconds(line, size) for size in sizes])
    columns = np.array([1 / times, np.array(sizes) / times]).T / error
    return tuple((2 * NORMAL * np.sqrt(np.diag(np.linalg.inv(columns.T @ columns)))).tolist())


def fitted(folder: Path, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The series of the model that --only fit makes of the rows."""
    results, model = folder / "results.json", folder / "model.json"
    results.write_text(json.dumps({"format": 1, "rows": rows}))
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        fitting.main([str(results), "--output", str(model)])
    (found,) = (one for one in json.loads(model.read_text())["series"] if one["in_model"])
    return dict(found)


def judged(seed: int, number: int, folder: Path) -> dict[str, Any]:
    """What came out of one file."""
    drawn = case(random.Random(f"{seed} {number}"))
    line, sizes = drawn["line"], drawn["sizes"]
    found = fitted(folder, drawn["rows"])
    alone = fitted(folder, drawn["good"])
    segments = found["segments"]
    result: dict[str, Any] = {"moved": segments != alone["segments"], "broken": len(line) > 1}
    called = len(segments) > 1 or found["missed"] != 0
    if result["broken"]:
        place = sizes.index(line[1][0])
        near = sizes[place - 1], sizes[min(place + 1, len(sizes) - 1)]
        result["found"] = any(near[0] <= part["from_bytes"] <= near[1] for part in segments[1:])
        result["segments"] = len(segments)
        return result
    result["false"] = called
    if not called:
        (part,) = segments
        ends = [[math.inf if one is None else one for one in part[f"{name}_interval"]] for name in ("alpha", "beta")]
        result["held"] = [low <= true <= high for (low, high), true in zip(ends, line[0][1:], strict=True)]
        widths = known_widths(line, sizes, drawn["error"])
        result["wide"] = [(high - low) / known for (low, high), known in zip(ends, widths, strict=True)]
    return result


def report(results: Sequence[dict[str, Any]]) -> tuple[list[str], bool]:
    """The counts in words, and whether all are within their bounds."""
    straight, broken = ([one for one in results if one["broken"] is kind] for kind in (False, True))
    lines, right = [f"{len(results)} files: {len(straight)} straight lines, {len(broken)} that break"], True

    def said(words: str, value: float, holds: bool) -> None:
        nonlocal right
        lines.append(f"{'' if holds else 'WRONG: '}{words}: {value:.3f}")
        right &= holds

    for index, name in enumerate(("alpha", "beta")):
        held = [one["held"][index] for one in straight if "held" in one]
        wide = [one["wide"][index] for one in straight if "wide" in one]
        said(f"{name} lies in its interval", float(np.mean(held)), float(np.mean(held)) >= HELD)
        said(f"{name}'s interval over that of known noise, median", float(np.median(wide)), np.median(wide) <= WIDE)
        lines.append(f"  mean {np.mean(wide):.2f}, 90% of them below {np.quantile(wide, 0.9):.2f}")
    false, found = (
        float(np.mean([one[name] for one in some])) for name, some in (("false", straight), ("found", broken))
    )
    said("straight lines called broken", false, false <= FALSE)
    said("breaks found", found, found >= FOUND)
    said("models that moved", sum(one["moved"] for one in results), not any(one["moved"] for one in results))
    return lines, right


def parser() -> argparse.ArgumentParser:
    """The command line."""
    options = argparse.ArgumentParser(prog="python -m tests.bench.study.drawn", description=__doc__)
    options.add_argument("--files", type=int, default=1000)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--state", type=Path, help="a line of JSON for each file that is done")
    return options


def main() -> int:
    """Judge what is left of the files, and report."""
    given = parser().parse_args()
    done: dict[int, dict[str, Any]] = {}
    if given.state and given.state.exists():
        for text in given.state.read_text().splitlines():
            with contextlib.suppress(ValueError):  # the last line of a command that was killed
                one = json.loads(text)
                if one["seed"] == given.seed:
                    done[one["number"]] = one
    with tempfile.TemporaryDirectory() as folder:
        for number in range(given.files):
            if number in done:
                continue
            done[number] = judged(given.seed, number, Path(folder)) | {"seed": given.seed, "number": number}
            if given.state:
                with given.state.open("a") as file:
                    file.write(json.dumps(done[number]) + "\n")
    lines, right = report([one for number, one in sorted(done.items()) if number < given.files])
    print("\n".join(lines))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
