"""Which tests ``make test`` runs on which numbers of ranks: `chosen`; the docstring of tests/run has the rule."""

import zlib
from collections import defaultdict
from collections.abc import Collection, Iterable

import pytest

#: the numbers of ranks of tests/run, and the one on which a test runs without a mark
SIZES = (1, 2, 4)
USUAL = 2
#: pytest's option, with which a run leaves out what `chosen` does
OPTION = "--chosen"
#: the cases of each function that ``make test-quick`` runs
QUICK = 2


def chosen(items: Iterable[pytest.Item], size: int, *, quick: bool = False) -> list[pytest.Item]:
    """Return the tests that ``make test`` runs on ``size`` ranks, and those that are not marked ``mpi``.

    A test runs on 2 ranks, or on the smallest of SIZES that its ``min_size`` allows. One that is marked ``every_size``,
    or ``sizes`` with other numbers, runs on these, too; of a function with several cases only one does, which its name
    draws, unless the mark is that of the case. The mark of a case counts before that of its function, and this before
    that of the file. Of a function that is marked ``some(n)`` only n cases run, which their names draw.
    quick: of no function run more than QUICK cases.
    """
    found: list[pytest.Item] = []
    drawn: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    some: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if not item.get_closest_marker("mpi"):
            some[function(item)].append(item)
            continue
        least = max(mark.kwargs.get("min_size") or 1 for mark in item.iter_markers("mpi"))
        if least > max(SIZES):
            raise pytest.UsageError(
                f"{item.nodeid} needs {least} ranks, and tests/run has no run of more than {max(SIZES)}"
            )
        usual = min(number for number in SIZES if number >= max(USUAL, least))
        mark = size_mark(item)
        sizes = (mark.args or SIZES) if mark else (usual,)
        if size < least or size not in sizes:
            continue
        if size == usual:
            some[function(item)].append(item)
        elif mark in of_the_case(item):
            found.append(item)
        else:
            drawn[function(item)].append(item)
    found += [cases[zlib.crc32(name.encode()) % len(cases)] for name, cases in drawn.items()]
    for cases in some.values():
        mark = cases[0].get_closest_marker("some")
        most = min(mark.args[0] if mark else len(cases), QUICK if quick else len(cases))
        found += sorted(cases, key=lambda item: zlib.crc32(item.name.encode()))[:most]
    there = set(found)
    return [item for item in items if item in there]


def possible(items: Iterable[pytest.Item], size: int) -> list[pytest.Item]:
    """The tests without those that are marked ``sizes(..., only=True)`` with other numbers than ``size``.

    They are written for these numbers of ranks, so ``make test-long``, which has no other rule, leaves them out, too.
    """
    marks = ((item, size_mark(item)) for item in items)
    return [item for item, mark in marks if mark is None or not mark.kwargs.get("only") or size in mark.args]


def of_the_case(item: pytest.Item) -> Collection[pytest.Mark]:
    """The marks of a case of a function, and not of the function."""
    return item.callspec.marks if hasattr(item, "callspec") else ()


def size_mark(item: pytest.Item) -> pytest.Mark | None:
    """The mark that says on which numbers of ranks a test runs. That of the case counts before its function's."""
    marks = (*of_the_case(item), *item.iter_markers())
    return next((mark for mark in marks if mark.name in ("every_size", "sizes")), None)


def function(item: pytest.Item) -> str:
    """The name of the function of a test, without that of the case."""
    return item.nodeid.partition("[")[0]
