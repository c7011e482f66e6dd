"""Which source a draw comes from: counted by brute force, at every prefix."""

import math
import random
from fractions import Fraction

import pytest

from trainers.data.stream import Apportionment

#: weights by name; the bounds of a prefix are 1/2 for two sources, and below 2 for more
WEIGHTS = {
    "two": [Fraction("0.7"), Fraction("0.3")],
    "two, far apart": [Fraction("1e-3"), Fraction(1)],
    "two, no common denominator": [Fraction("0.333333333"), Fraction("0.6666")],
    "three": [Fraction(5), Fraction(3), Fraction(2)],
    "three alike": [Fraction(1)] * 3,
    "fifty": [Fraction(number) for number in range(1, 51)],
    "fifty alike": [Fraction(1)] * 50,
    "fifty, one large": [Fraction(100)] + [Fraction(1, 7)] * 49,
    "fifty, halves": [Fraction(1, 2**number) for number in range(50)],
    "fifty, Fibonacci": [Fraction(round(1.618**number)) for number in range(50)],
}


def largest_error(weights: list[Fraction], draws: int) -> Fraction:
    """The largest distance of a source's count from its exact share, over all prefixes; the draws are counted here."""
    made, scale = Apportionment(weights), math.lcm(*(weight.denominator for weight in weights))
    whole = [int(weight * scale) for weight in weights]  # in integers, which are faster
    total = sum(whole)
    counts, worst = [0] * len(weights), 0
    for n in range(1, draws + 1):
        source, k = made.draw(n - 1)
        assert k == counts[source]  # the k-th of its source
        counts[source] += 1
        worst = max(worst, *(abs(count * total - n * weight) for count, weight in zip(counts, whole, strict=True)))
        if n % 97 == 0:
            assert made.counts(n) == counts
    return Fraction(worst, total)


@pytest.mark.parametrize("name", WEIGHTS)
def test_every_prefix_holds_each_source_by_its_weight(name: str) -> None:
    weights = WEIGHTS[name]
    worst = largest_error(weights, 300 if len(weights) > 3 else 3000)
    assert worst <= Fraction(1, 2) if len(weights) == 2 else worst < 2
    assert worst > 0


@pytest.mark.long
def test_no_weights_are_further_off() -> None:
    """Weights of many shapes, in any order, over long prefixes."""
    draw = random.Random(11)
    shapes = [
        lambda n: draw.randint(1, 1000), lambda n: Fraction(2, 3) ** n, lambda n: Fraction(1, (n + 1) ** 2),
        lambda n: Fraction(round(1e6 * draw.random() ** 8) + 1), lambda n: round(1.4656**n) + 1,
    ]  # fmt: skip
    for trial in range(150):
        weights = [Fraction(shapes[trial % len(shapes)](n)) for n in range(draw.choice([2, 3, 4, 5, 7, 20, 50]))]
        draw.shuffle(weights)
        worst = largest_error(weights, 1500)
        assert worst <= Fraction(1, 2) if len(weights) == 2 else worst < 2, weights


@pytest.mark.parametrize("name", ["two", "fifty", "fifty, halves"])
def test_draws_far_away_follow_from_their_number_alone(name: str) -> None:
    made, shares = Apportionment(WEIGHTS[name]), [weight / sum(WEIGHTS[name]) for weight in WEIGHTS[name]]
    for n in (10**9, 10**18 + 7):
        counts = made.counts(n)
        assert sum(counts) == n
        assert all(abs(count - n * share) < 2 for count, share in zip(counts, shares, strict=True))
        for number in range(n, n + 200):
            source, k = made.draw(number)
            assert k == counts[source]
            counts[source] += 1
        assert made.counts(n + 200) == counts


def test_two_sources_alternate_as_evenly_as_they_can() -> None:
    """Sources of 0.7 and 0.3, by hand: the first has 0.7, 1.4, 2.1, 2.8, 3.5, 4.2 ... of the draws, rounded."""
    made = Apportionment([Fraction("0.7"), Fraction("0.3")])
    assert [made.draw(n)[0] for n in range(10)] == [0, 1, 0, 0, 0, 1, 0, 0, 1, 0]
    assert [made.draw(n)[1] for n in range(10)] == [0, 0, 1, 2, 3, 1, 4, 5, 2, 6]


def test_the_scale_of_the_weights_does_not_count_and_a_weight_of_0_is_never_drawn() -> None:
    one, other = Apportionment([Fraction("0.7"), Fraction("0.3")]), Apportionment([Fraction(14), Fraction(6)])
    assert [one.draw(n) for n in range(100)] == [other.draw(n) for n in range(100)]
    some = Apportionment([Fraction(0), Fraction(1), Fraction(0), Fraction(1)])
    assert {some.draw(n)[0] for n in range(100)} == {1, 3} and some.counts(100) == [0, 50, 0, 50]
    assert [Apportionment([Fraction(5)]).draw(n) for n in range(3)] == [(0, 0), (0, 1), (0, 2)]
