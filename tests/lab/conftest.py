"""A Slurm that the tests of this folder share."""

from collections.abc import Iterator

import pytest

from tests.support.lab.slurm import SlurmCluster, slurm_cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[SlurmCluster]:
    """Two nodes. A test that takes a node down starts a Slurm of its own."""
    with slurm_cluster(2) as cluster:
        yield cluster
