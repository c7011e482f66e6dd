"""One contest: the object that says what is compared, and the table that all contests have."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar

from bench.timing.turns import Spread, ratio
from commengine.options.declared import flag_of
from commengine.options.ranges import ValidRange

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")

#: seconds to the units of a table, by the least median for which a unit is used
UNITS = ((1.0, "s", 1.0), (1e-3, "ms", 1e3), (0.0, "us", 1e6))


@dataclass
class Case:
    """The sides of a contest under the same conditions: some rows of its table.

    labels: the conditions, such as {"batch": 8}. seconds: by side, the time in each round; the ratios are to those of
    the first side, or of ``baseline``. facts: by side, the further columns. errors: the reasons why it does not count.
    numbers: what only ``--json`` gets.
    """

    labels: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)
    baseline: str = ""

    @property
    def sides(self) -> list[str]:
        """The names of the sides, in the order of the table."""
        return list(self.seconds or self.facts)

    @property
    def base(self) -> str:
        """The side to which the ratios are; "" where a case has no sides."""
        return self.baseline or next(iter(self.sides), "")

    def spread(self, side: str) -> Spread:
        """The times of a side."""
        return Spread.of(self.seconds[side])

    def over(self, side: str) -> Spread:
        """The times of a side over those of the baseline, in the same rounds."""
        return ratio(self.seconds[side], self.seconds[self.base])

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON types: a row for each side."""
        rows = []
        for side in self.sides:
            row: dict[str, Any] = {"name": side, **self.facts.get(side, {})}
            if side in self.seconds:
                row |= {"seconds": self.seconds[side], "spread": asdict(self.spread(side))}
                row["ratio"] = asdict(self.over(side))
            rows.append(row)
        return {"labels": self.labels, "baseline": self.base, "rows": rows, "errors": self.errors, **self.numbers}


class Contest:
    """What `bench.contest.__main__` needs to know of a contest.

    title: of its results. rounds: how many there are if ``--rounds`` says nothing; 0: it has no rounds. on_ranks:
    whether each process of the command is a rank of a job.
    """

    title: str
    rounds = 7
    on_ranks = False

    def add_options(self, add: Callable[..., Any]) -> None:
        """Add the options that only this contest has. add: ``add_argument`` of the parser."""

    def check(self, given: Any) -> None:
        """Complete the options ``given``. Raises ValueError that names the option at fault. On the first rank only."""

    def measure(self, given: Any, world: Any) -> Sequence[Case]:
        """Measure. world: the Communicator of a contest on ranks, where all call it and rank 0's result counts."""
        raise NotImplementedError

    def notes(self, given: Any, cases: Sequence[Case]) -> list[str]:
        """The lines of the heading: what was compared, on how many ranks, which goals were reached."""
        return []

    def below(self, given: Any, cases: Sequence[Case]) -> list[str]:
        """The lines under the table."""
        return []

    def page(self, given: Any, cases: Sequence[Case]) -> list[str]:
        """The lines below the heading."""
        errors = [f"- **ERROR: {error}**" for case in cases for error in case.errors]
        return [*self.notes(given, cases), *errors, "", *table(cases), *self.below(given, cases)]

    def files(self, given: Any, cases: Sequence[Case]) -> None:
        """Write files of its own. On the first rank only."""

    def status(self, cases: Sequence[Case]) -> int:
        """The exit status of a contest that ended."""
        return int(any(case.errors for case in cases))


def add_fields(add: Callable[..., Any], kind: type[DataclassInstance], **valid: ValidRange) -> None:
    """Add an option for each field of a task that ``valid`` names, with its range and the field's default."""
    for item in fields(kind):
        if item.name in valid:
            settings = {"type": type(item.default), "default": item.default, "valid": valid[item.name]}
            add(flag_of(item.name), **settings, help="(default: %(default)s)")


def task_of(kind: Callable[..., T], given: Any, **more: Any) -> T:
    """A task with the fields that ``given`` has, such as those of `add_fields`. more: other fields."""
    names = inspect.signature(kind).parameters
    return kind(**{name: value for name, value in vars(given).items() if name in names} | more)


def table(cases: Sequence[Case]) -> Iterator[str]:
    """Yield markdown: a table for neighbours with the same columns; a row for each side of each case that has one."""

    def columns(case: Case) -> tuple[Any, ...]:
        facts = dict.fromkeys(name for side in case.sides for name in case.facts.get(side, {}))
        return tuple(case.labels), bool(case.seconds), case.base if case.seconds else "", tuple(facts)

    for (labels, timed, base, facts), found in itertools.groupby((case for case in cases if case.sides), columns):
        group = list(found)
        head, scale = [*labels, "side"], 1.0
        if timed:
            medians = [case.spread(side).median for case in group for side in case.sides]
            least = min((median for median in medians if median > 0), default=0.0)  # a difference of times may be less
            unit, scale = next((unit, scale) for limit, unit, scale in UNITS if least >= limit)
            head += [unit, f"time over {base}"]
        yield f"| {' | '.join([*head, *facts])} |"
        yield f"|{'---|' * len([*head, *facts])}"
        for case in group:
            for side in case.sides:
                cells = [*map(_cell, case.labels.values()), side]
                if timed:
                    cells += [case.spread(side).text(2 if scale * least < 100 else 1, scale), case.over(side).text()]
                own = case.facts.get(side, {})
                yield f"| {' | '.join([*cells, *(_cell(own.get(name, '')) for name in facts)])} |"
        yield ""


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
