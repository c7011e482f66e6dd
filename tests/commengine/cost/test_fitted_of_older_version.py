"""Model files that an older version of `bench.study --only fit` wrote are still read, and give the same seconds."""

from pathlib import Path

import pytest

from commengine.cost import FittedModel

#: written by commit 21090a0 from bench.collectives on 2 ranks, its list of series emptied
OLD = Path(__file__).with_name("model_written_by_21090a0.json")


@pytest.mark.parametrize(
    ("operation", "nbytes", "seconds"),
    [
        ("all_reduce", 8, 4.008946723928917e-06),
        ("all_reduce", 4096, 5.15875029307124e-06),
        ("all_reduce", 1 << 20, 0.000150302755781196),
        ("all_gather", 8, 4.583576160455506e-06),
        ("all_gather", 4096, 5.108902514564091e-06),
        ("all_gather", 1 << 20, 2.4085177894584464e-05),
    ],
)
def test_seconds_are_those_of_the_older_version(operation, nbytes, seconds):
    assert FittedModel.load(OLD).seconds(operation, nbytes, 2) == pytest.approx(seconds, rel=1e-12)
