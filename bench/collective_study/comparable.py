"""The rule that says which rows of collectives may be compared: tables, answers, fits and models all ask it.

A row counts if its median has an interval and if it is of a state of the machine that is shown. A row that did not
converge counts with its wide interval, and who shows it marks it. Rows of several dtypes, reductions or states are
never taken together: `KindOfRows.of` says which of them a model has, whatever their order in a file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from bench.timing.sampling import FEWEST
from commengine import UsageError

Row = TypeVar("Row", bound=Mapping[str, Any])

#: the words for the signs of `signs`
SIGNS = {
    "~": "measured in another state only",
    "?": f"fewer than {FEWEST} calls, so no interval",
    "*": "the time was up before there were 20 calls whose median was known well enough",
}


def why_not(row: Mapping[str, Any]) -> str:
    """Why a row enters no comparison, fit or model; "" if it may. A key that older files lack says nothing against it.

    row: of bench.collectives, with its "disturbed" and "iterations" where it has them.
    """
    if row.get("wrong"):
        return f"{row['wrong']} wrong values"
    if row.get("disturbed"):
        return SIGNS["~"]
    if has_few_calls(row):
        return f"{row['iterations']} calls, and an interval needs {FEWEST}"
    return ""


def has_few_calls(row: Mapping[str, Any]) -> bool:
    """Whether a row says that its calls are too few for an interval."""
    calls = row.get("iterations")
    return calls is not None and calls < FEWEST


def comparable(rows: Iterable[Row]) -> list[Row]:
    """The rows that may be compared."""
    return [row for row in rows if not why_not(row)]


def signs(row: Mapping[str, Any]) -> str:
    """The signs of a row that does not count, or did not converge: keys of SIGNS."""
    few = has_few_calls(row)
    late = not few and not row.get("converged", True)
    return ("~" if row.get("disturbed") else "") + ("?" if few else "") + ("*" if late else "")


@dataclass(frozen=True)
class KindOfRows:
    """The one dtype, reduction and state of the rows that a model is made of. None: the rows do not say.

    words: a sentence about a choice among several, "" if there was none.
    """

    dtype: str | None
    redop: str | None
    state: str | None
    words: str = ""

    @staticmethod
    def of(rows: Sequence[Mapping[str, Any]], **given: str | None) -> KindOfRows:
        """The kind of ``rows``: what is ``given`` of dtype, redop and state, or else float32, sum, and most calls.

        Of several states the one counts in which most calls were made, and of equal ones the first by name. Raises
        UsageError that names the option if none is given of several dtypes without float32, or reductions without sum,
        and for one that no row has.
        """
        calls: dict[str, Counter[str]] = {name: Counter() for name in ("dtype", "redop", "state")}
        for row in rows:
            for name, found in calls.items():
                if row.get(name) not in (None, "none"):
                    found[str(row[name])] += max(1, int(row.get("iterations") or 1))
        chosen: dict[str, str | None] = {}
        said = []
        for name, found in calls.items():
            usual = {"dtype": "float32", "redop": "sum"}.get(name)
            there = sorted(found)
            if (wanted := given.get(name)) is not None:
                if wanted not in found:
                    said_there = ", ".join(there) or "none"
                    raise UsageError(f"--{name} {wanted}: not among the results, which have {said_there}")
                chosen[name] = wanted
            elif len(there) < 2:
                chosen[name] = there[0] if there else None
            elif usual is None:
                chosen[name] = min(there, key=lambda one: (-found[one], one))
            elif usual in found:
                chosen[name] = usual
            else:
                raise UsageError(f"--{name}: the results have several; give one of {', '.join(there)}")
            if len(there) > 1:
                said.append(f"{chosen[name]} of {', '.join(there)} (--{name} chooses)")
        return KindOfRows(**chosen, words=f"the model has {'; '.join(said)}" if said else "")

    def has(self, row: Mapping[str, Any]) -> bool:
        """Whether a row is of this kind. One that has no dtype, reduction or state is of every kind."""
        fields = ((row.get(name), getattr(self, name)) for name in ("dtype", "redop", "state"))
        return all(mine in (None, "none") or str(mine) == wanted for mine, wanted in fields)
