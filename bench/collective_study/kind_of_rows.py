"""The one dtype, reduction, state and kind of buffers of the measurements that a model is made of.

The order of the rows in a file does not count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from bench.collective_study.measurement import SeriesKey
from bench.transports.names import FRESH, NEW, SAME
from commengine import UsageError


@dataclass(frozen=True)
class KindOfRows:
    """The one dtype, reduction and state of the rows that a model is made of. None: the rows do not say.

    buffers: their kind; that of rows which do not say it is "same". words: a sentence about a choice among several, ""
    if there was none.
    """

    dtype: str | None
    redop: str | None
    state: str | None
    buffers: str = SAME
    words: str = ""

    @staticmethod
    def of(measured: Iterable[tuple[SeriesKey, int | None]], **given: str | None) -> KindOfRows:
        """The kind of (way, calls) that were measured: what is ``given``, or else float32, sum, and most calls.

        Of several states the one counts in which most calls were made, and of equal ones the first by name. Raises
        UsageError that names the option if none is given of several dtypes without float32, or reductions without sum,
        and for one that no row has. Of several kinds of buffers the freshly written ones count, which users have.
        """
        measured = list(measured)
        calls: dict[str, Counter[str]] = {name: Counter() for name in ("dtype", "redop", "state")}
        for way, count in measured:
            for name, found in calls.items():
                if (value := getattr(way, name)) not in (None, "none"):
                    found[str(value)] += max(1, count or 1)
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
        kinds = {way.buffers or SAME for way, _ in measured} or {SAME}
        buffers = next(kind for kind in (FRESH, SAME, NEW) if kind in kinds)
        if len(kinds) > 1:
            said.append(f"{buffers} buffers of {', '.join(sorted(kinds))}")
        return KindOfRows(**chosen, buffers=buffers, words=f"the model has {'; '.join(said)}" if said else "")

    def has(self, way: SeriesKey) -> bool:
        """Whether a way is of this kind. One that has no dtype, reduction or state is of every kind."""
        fields = ((getattr(way, name), getattr(self, name)) for name in ("dtype", "redop", "state"))
        same_kind = all(mine in (None, "none") or str(mine) == wanted for mine, wanted in fields)
        return same_kind and (way.buffers or SAME) == self.buffers
