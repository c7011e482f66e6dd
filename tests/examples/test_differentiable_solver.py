"""The differentiable solver runs on any number of ranks, and its numbers do not depend on it."""

import re
import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "differentiable_solver.py"

#: per cent, at the iterations that it prints, as its page shows
ERRORS = [31.6, 17.5, 13.5]


@pytest.mark.slow
@pytest.mark.mpi(min_size=1)  # on 2 ranks; make test-long runs it on 1 and 4, too
def test_it_finds_the_conductivity(mpi_world, capsys):
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    out = capsys.readouterr().out
    if mpi_world.rank:
        assert out == ""
        return
    errors = [float(percent) for percent in re.findall(r"error (\d+\.\d)%", out)]
    assert errors == pytest.approx(ERRORS, abs=0.11)
