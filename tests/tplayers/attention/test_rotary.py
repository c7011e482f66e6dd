"""Rotary positions against a rotation of complex numbers, transformers' tables, and what makes them relative."""

import cmath

import pytest
import torch

from tests.support.models.llama import LLAMA3, S, ours, theirs, turns
from tplayers import RopeScaling
from tplayers.attention.rotary import frequencies, rotation

HEAD = 12


def turned(x, positions):
    return rotation(positions, frequencies(HEAD, 100.0), torch.float64)(x)


def test_a_pair_of_components_turns_as_a_complex_number(random):
    x = random(S, 1, 1, HEAD)
    found = turned(x, torch.arange(S))
    for position in range(S):
        for pair in range(HEAD // 2):
            number = complex(x[position, 0, 0, pair], x[position, 0, 0, pair + HEAD // 2])
            number *= cmath.exp(1j * position * 100.0 ** (-2 * pair / HEAD))
            assert complex(found[position, 0, 0, pair], found[position, 0, 0, pair + HEAD // 2]) == pytest.approx(
                number
            )


def test_scores_depend_on_the_distance_alone(random, close):
    q, k = random(S, 1, 1, HEAD), random(S, 1, 1, HEAD, seed=1)

    def scores(positions):
        return torch.einsum("sbhd,tbhd->bhst", turned(q, positions), turned(k, positions))

    here, there = torch.arange(S), torch.arange(S) + 1000
    close(scores(here), scores(there))


def test_rows_at_different_positions(random):
    x, positions = random(S, 3, 2, HEAD), torch.arange(S) + torch.tensor([[0], [5], [2]])
    found = turned(x, positions)
    for row in range(3):
        assert torch.equal(found[:, row : row + 1], turned(x[:, row : row + 1], positions[row]))


@pytest.mark.parametrize("case", ["2 of 8, tied", "all heads, llama3", "biases, linear"])
def test_frequencies(case):
    """Against numbers that are written out, and transformers' in float32. All three parts of llama3 are there."""
    transformers = pytest.importorskip("transformers", reason="the independent peer is transformers' Llama")
    config = ours(case)
    found = frequencies(config.head_size, config.rotary_base, config.rope_scaling)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, turns(config), rtol=1e-14, atol=0)
    peer = theirs(case, transformers, exact=False).model.rotary_emb.inv_freq
    torch.testing.assert_close(found.float(), peer, rtol=1e-6, atol=0)


def test_llama3_leaves_short_waves_and_divides_long_ones():
    plain, scaled = frequencies(64, 1e4), frequencies(64, 1e4, RopeScaling())
    waves = 2 * torch.pi / plain
    assert torch.equal(scaled[waves < 8192 / 4], plain[waves < 8192 / 4])
    torch.testing.assert_close(scaled[waves > 8192], plain[waves > 8192] / 8, rtol=1e-15, atol=0)
    between = (waves > 8192 / 4) & (waves < 8192)
    assert between.any() and ((scaled < plain) & (scaled > plain / 8))[between].all()


@pytest.mark.parametrize(
    "values, words",
    [
        ({"kind": "yarn"}, "rope_scaling='yarn' must be one of linear, llama3"),
        ({"factor": 0.5}, "factor=0.5 must be at least 1"),
        ({"factor": float("inf")}, "factor=inf must be at least 1, and finite"),
        ({"low_freq_factor": 4.0}, "low_freq_factor=4.0 must be above 0 and below high_freq_factor=4.0"),
        ({"original_max_position_embeddings": 0}, "original_max_position_embeddings=0 must be at least 1"),
    ],
)
def test_scalings_that_do_not_exist(values, words):
    with pytest.raises(ValueError, match=words):
        RopeScaling(**values)
    assert RopeScaling("llama3", 8.0, 1.0, 4.0, 8) == LLAMA3


def test_far_positions_are_exact_in_float32():
    """2^20 positions: an angle in float32 would be wrong by up to 0.06."""
    far = torch.tensor([2**20 + 1])
    found = rotation(far, frequencies(HEAD, 100.0), torch.float32)
    exact = torch.tensor([float(far) * 100.0 ** (-2 * pair / HEAD) for pair in range(HEAD // 2)], dtype=torch.float64)
    torch.testing.assert_close(found.cos[0, 0, 0].double(), exact.cos(), rtol=0, atol=1e-7)


def test_a_head_of_odd_size_is_refused():
    with pytest.raises(ValueError, match="kv_channels=5 is odd"):
        frequencies(5, 1e4)
