"""Groups that span nodes: MPICH can be told that the ranks of one machine are on several."""

import pytest

from tests.support import mpirun
from tests.support.lab.hosts import is_mpich

pytestmark = pytest.mark.slow

PROGRAM = str(mpirun.JOBS / "two_levels.py")


@pytest.fixture(scope="module", autouse=True)
def _mpich():
    if not is_mpich():
        pytest.skip("only MPICH can be told where nodes end")


@pytest.mark.parametrize(
    ("ranks", "variable", "per_node"),
    [
        pytest.param(4, "MPIR_CVAR_NUM_CLIQUES=2", 2, id="two-nodes"),
        pytest.param(4, "MPIR_CVAR_ODD_EVEN_CLIQUES=1", 2, id="two-nodes-interleaved", marks=pytest.mark.long),
        pytest.param(3, "MPIR_CVAR_NUM_CLIQUES=2", 0, id="uneven-nodes", marks=pytest.mark.long),
    ],
)
def test_reductions_over_nodes(ranks, variable, per_node):
    """Right in two levels; with another number of ranks on one node, by MPI alone and as right."""
    name, value = variable.split("=")
    done = mpirun.run(ranks, PROGRAM, str(per_node), timeout=100, env={name: value})
    assert done.returncode == 0 and done.stdout == "right\n", done
