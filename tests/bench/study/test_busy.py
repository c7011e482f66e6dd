"""The line that says that a machine was busy: when it appears, and what it names."""

import os

from bench.study import busy


def row(size, spent, transport="engine", operation="all_reduce"):
    return {"operation": operation, "transport": transport, "bytes": size, "seconds": {"p50": spent}}


QUIET = [row(4, 4e-6), row(4, 9e-6, "mpi4py"), row(1 << 10, 5e-6), row(64 << 10, 1e-5), row(1 << 20, 1e-4)]


def test_an_idle_machine_gets_no_line():
    assert busy.remark(0.3, os.cpu_count() or 1, QUIET) == ""
    assert busy.remark(0.0, 1, [row(4, 6e-6), row(64, 5e-6), row(1 << 20, 1e-4)]) == ""  # a matter of the MPI's routes


def test_the_load_of_other_programs_is_named():
    cores = os.cpu_count() or 1
    said = busy.remark(3.14, cores, QUIET)
    assert said.startswith(f"**The machine was busy**: the load average before it was 3.1, beside {cores} ranks on")
    assert "repeat the study on an idle machine" in said and "\n" not in said


def test_a_small_size_that_takes_longer_than_a_large_one_is_named():
    """The defect's own figures. The other way of the size, and the other operation, are not slow."""
    rows = [row(4, 1e-6, operation="broadcast"), *QUIET[1:4], row(4, 26.2e-6), row(64 << 10, 10.8e-6)]
    rows = [one for one in rows if one["transport"] == "engine"]
    said = busy.remark(0.0, 1, rows)
    assert "all_reduce of 4 B took 26.2 us, and of 1 KB 5 us" in said
