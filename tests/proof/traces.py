"""Recorded runs of the engine, as the model's events, and whether the model makes the same."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

from tests.support import mpirun

from .checking import NUMBERS, Model, Setting
from .programs import ALL_GATHER_V, ALL_TO_ALL_V, IN_SLOT, PEER, PRIVATE, WINDOW, Call, Program, drawn
from .stories import told

WRITES, READS, FENCES, FILLS, TAKES = range(1, 6)
ROUND, ASKED, TOLD, FILLED, REDUCED, UNFIT, SLOT = (
    NUMBERS[name] for name in ("ROUND", "ASKED", "TOLD", "FILLED", "REDUCED", "UNFIT", "SLOT")
)
#: the words of flags.py: the round, the stages, what does not fit; the words of a call; the numbers of rows
_WORDS = {0: ROUND, 8: FILLED, 9: REDUCED, 15: UNFIT}
_PLACES = {1: 0, 4: 1}
_SETS = {word: (word - 1) // 3 for word in range(1, 7)}
_NUMBERS_AT = 16

Event = tuple[int, int, int, int]


def record(runs: int, ranks: int, seed: int = 1, mutation: str | None = None, seconds: float = 600) -> dict[str, Any]:
    """Run ``runs`` drawn programs on ``ranks`` ranks, and return what they noted."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "runs.json")
        words = ["-m", "tests.proof.recording", str(output), str(runs), "--seed", str(seed)]
        words += ["--mutation", mutation] if mutation else []
        done = mpirun.run(ranks, *words, timeout=seconds)
        if done.returncode:
            raise RuntimeError(f"the recorded job failed: {done.stderr[-500:]}")
        return json.loads(output.read_text())


def events_of(noted: list[list[list[int]]], program: Program, rank: int) -> list[Event]:
    """Return the model's events of what a rank has noted in each call.

    Words that belong together are one cell, and the looks of a wait are one, its last.
    """
    events: list[Event] = []
    for number, (notes, call) in enumerate(zip(noted, program.calls, strict=True)):
        one: list[Event] = []
        written: dict[int, int] = {}
        told_unfit = False
        for what, owner, at, value in notes:
            if what in (FENCES, FILLS, TAKES):
                one.append((what, rank, {FENCES: 0}.get(what, SLOT + at), 0))
                continue
            if what == WRITES:
                written[at] = value
            cell = _cell(at, call, program.ranks)
            if cell == UNFIT and what == READS:
                if told_unfit:  # the error says who found it, and reads again
                    continue
                told_unfit = value == written.get(0)
            if cell in (TOLD, TOLD + 1):
                if what == READS and owner == rank:
                    continue
                value = _told(at, value, owner, number, call, program.ranks)
            elif cell in (ASKED, ASKED + 1):
                value = call.code if what == WRITES or written.get(at) == value else 0
            _add(one, (what, owner, cell, value))
        events += one
    return events


def _cell(at: int, call: Call, ranks: int) -> int:
    if at in _WORDS:
        return _WORDS[at]
    if at >= _NUMBERS_AT:
        return TOLD + int(at < _NUMBERS_AT + ranks + 1)
    uneven = call.code in (ALL_TO_ALL_V, ALL_GATHER_V)
    return (TOLD if uneven and at in _PLACES else ASKED) + _SETS[at]


def _told(at: int, value: int, owner: int, number: int, call: Call, ranks: int) -> int:
    """The value of TOLD: the call and the place; 0 if the word is not what its owner tells in this call."""
    rows = [call.rows[owner][owner]] if call.code == ALL_GATHER_V else call.rows[owner]
    if at in _PLACES:
        place = {-1: PRIVATE, -2: IN_SLOT}.get(value, WINDOW if value >= 0 else PEER)
        same = place == call.places[owner]
    else:
        same = value == [0, *accumulate(rows)][(at - _NUMBERS_AT) % (ranks + 1)]
    return 4 * (number + 1) + call.places[owner] if same else 0


def _add(events: list[Event], event: Event) -> None:
    """Add an event, or make one of it and those that it belongs to."""
    what, _, cell, value = event
    if what == READS and cell in (TOLD, TOLD + 1):  # once after a fence
        for back in range(len(events) - 1, -1, -1):
            if events[back][0] == FENCES:
                break
            if events[back][:3] == event[:3]:
                events[back] = (*event[:3], min(value, events[back][3]))
                return
    elif events and events[-1][:3] == event[:3]:
        before = events.pop()
        if cell in (ASKED, ASKED + 1):  # one wrong word is enough
            event = (*event[:3], min(value, before[3]))
    events.append(event)


def played(program: Program, run: list[list[Event]]) -> bytes:
    """Return a run as the file that traced.pml reads."""
    calls = program.calls + [Call(0, [0] * program.ranks, [], None)] * (4 - len(program.calls))
    parts = [
        bytes([len(program.calls)]),
        *(bytes([call.code] * program.ranks) for call in calls),
        *(bytes(call.places) for call in calls),
        *(bytes(int(call.unfit == rank) for rank in range(program.ranks)) for call in calls),
        bytes(map(len, run)),
        *(bytes(number for event in events for number in event).ljust(4 * 255, b"\0") for events in run),
    ]
    return b"".join(parts)


class Player:
    """The model, which makes the accesses of recorded runs of ``ranks`` ranks if it can."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self._model, self._ranks = Model(folder, ranks, "x86", traced=True, quick=True), ranks

    def rejected(self, noted: dict[str, Any]) -> Iterator[tuple[int, str | None]]:
        """For each run of `record`: its number, and why the model cannot make its accesses; None if it can.

        In the order of each rank, with the values, and with those of the other ranks in between.
        """
        for number, run in enumerate(noted["runs"]):
            if run is None:
                continue
            program = drawn(noted["seed"], number, self._ranks)
            events = [events_of(one, program, rank) for rank, one in enumerate(run)]
            yield number, self._why_not(program, events)

    def _why_not(self, program: Program, run: list[list[Event]]) -> str | None:
        file = self._model.folder / "run"
        file.write_bytes(played(program, run))
        said = self._model.output(Setting(), "-n", "-E", "-m20000", "-w16", run=file.resolve())
        if "assertion violated (finished" in said:
            return None
        fitted = {int(rank): int(count) for rank, count in re.findall(r"^furthest (\d+) (\d+)$", said, re.MULTILINE)}
        left = [f"{told(rank, *events[fitted[rank]])}, which is not its step {fitted[rank] + 1} in the model"
                for rank, events in enumerate(run) if fitted[rank] < len(events)]  # fmt: skip
        return "; ".join(left) or "the run ends too early"
