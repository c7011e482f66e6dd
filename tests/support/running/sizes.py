"""On which numbers of ranks a test runs: see ``selected``, and the docstring of tests/run for the rule behind it."""

import pytest

#: the numbers of ranks of tests/run
SIZES = (1, 2, 4)
#: pytest's option, with which a run under mpiexec leaves out what does not need its number of ranks
OPTION = "--where-size-matters"


def selected(item: pytest.Item, size: int) -> bool:
    """Whether ``make test`` runs this test on ``size`` ranks, if it is marked ``mpi``.

    A test marked ``sizes`` runs on the numbers of ranks that the mark names, and one marked ``every_size`` on all, from
    its ``min_size`` on. The mark of a case counts before that of its function, and this before that of the file. Any
    other test runs on 2 ranks only, or on the smallest of SIZES that its ``min_size`` allows.
    """
    if not item.get_closest_marker("mpi"):
        return True
    least = max(mark.kwargs.get("min_size") or 1 for mark in item.iter_markers("mpi"))
    if least > max(SIZES):
        raise pytest.UsageError(
            f"{item.nodeid} needs {least} ranks, and tests/run has no run of more than {max(SIZES)}"
        )
    of_the_case = item.callspec.marks if hasattr(item, "callspec") else ()
    for mark in (*of_the_case, *item.iter_markers()):
        if mark.name in ("every_size", "sizes"):
            return size >= least and size in (mark.args or SIZES)
    return size == min(number for number in SIZES if number >= max(2, least))
