"""Sampling refuses what is no such number, and names it."""

import math

import pytest

from tplayers import Sampling


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.1}, "temperature=-0.1: must be 0, or from 0.001 to 1000"),
        ({"temperature": math.inf}, "temperature=inf: must be 0, or from 0.001"),
        ({"temperature": 1e-38}, "temperature=1e-38: must be 0, or from 0.001"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"top_k": -1}, "top_k=-1: must not be negative"),
        ({"top_p": 0.0}, r"top_p=0.0: must be above 0, and at most 1"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"top_p": math.nan}, "top_p=nan"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0: must be from 0.001 to 1000"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty=1e-300: must be from 0.001"),
    ],
)
def test_a_value_out_of_range_is_named(values, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**values)


def test_ends_of_the_ranges_are_valid():
    assert Sampling(0, 0, 1.0, 0.001) != Sampling(1000.0, 1, 1e-9, 1000.0)


def test_the_command_has_the_same_bounds():
    """Its settings repeat them, so that its help needs no torch."""
    from tplayers.generation import sampling
    from trainers.generation import settings

    assert (settings.LEAST, settings.MOST) == (sampling.LEAST, sampling.MOST)
