"""The paired bootstrap on data whose answer is known."""

import numpy as np
import pytest

from bench.matrix.statistics import NON_INFERIOR, Difference, Pair, compare, estimate


def pair(a: list[float], b: list[float], under: float = 1.0) -> Pair:
    weight = np.full(len(a), under)
    return Pair(np.array(a, float), weight, np.array(b, float), weight)


def test_equal_arms_differ_by_nothing_at_all() -> None:
    rng = np.random.default_rng(1)
    values = list(rng.random(50))
    answer = compare([pair(values, values)])
    assert answer is not None
    assert (answer.difference, answer.low, answer.high) == (0.0, 0.0, 0.0)
    assert answer.non_inferior
    assert not answer.significant
    assert answer.ratio == 1.0


def test_a_constant_difference_has_no_width() -> None:
    """Pairing takes out what both arms share: requests differ wildly, the difference does not."""
    b = [0.0, 10.0, 500.0, 3.0]
    answer = compare([pair([x + 2 for x in b], b), pair([x + 2 for x in b], b)])
    assert answer is not None
    assert answer.difference == pytest.approx(2)
    assert answer.low == pytest.approx(2)
    assert answer.high == pytest.approx(2)


def test_the_interval_of_a_mean_is_the_textbook_one() -> None:
    values = np.random.default_rng(2).normal(5, 2, 400)
    found = estimate([(values, np.ones(400))])
    assert found is not None
    half = 1.96 * values.std() / 20
    assert found.low == pytest.approx(values.mean() - half, abs=0.03)
    assert found.high == pytest.approx(values.mean() + half, abs=0.03)


def test_coverage_is_near_what_it_says() -> None:
    """Of 200 samples with a true difference of 0.1, about 95% of intervals hold it."""
    rng = np.random.default_rng(3)
    held = 0
    for _ in range(200):
        b = rng.random(80)
        a = b + 0.1 + rng.normal(0, 0.2, 80)
        answer = compare([pair(list(a), list(b))], draws=500)
        assert answer is not None
        held += answer.low <= 0.1 <= answer.high
    assert 180 <= held <= 199


def test_seeds_that_disagree_widen_the_interval() -> None:
    same = compare([pair([0.2] * 30, [0.0] * 30)] * 3)
    apart = compare([pair([x] * 30, [0.0] * 30) for x in (-0.2, 0.2, 0.6)])
    assert same is not None
    assert apart is not None
    assert same.difference == pytest.approx(apart.difference)
    assert same.low == pytest.approx(0.2)
    assert apart.low == pytest.approx(-0.2)
    assert apart.high == pytest.approx(0.6)
    assert not apart.significant


def test_ratios_weigh_requests_by_what_they_ask() -> None:
    a = Pair(
        np.array([0.0, 90.0]), np.array([10.0, 90.0]), np.array([0.0, 45.0]), np.array([10, 90.0])
    )
    answer = compare([a])
    assert answer is not None
    assert (answer.a, answer.b) == (0.9, 0.45)
    assert answer.ratio == pytest.approx(2.0)


@pytest.mark.parametrize(("low", "holds"), [(-0.029, True), (-0.03, False), (-0.1, False)])
def test_no_loss_is_three_points(low: float, holds: bool) -> None:
    assert NON_INFERIOR == -0.03
    assert Difference(0.5, 0.5, 0.0, low, 0.1).non_inferior is holds


def test_nothing_to_compare() -> None:
    assert compare([]) is None
    assert compare([pair([], [])]) is None
    assert compare([pair([1.0], [1.0], under=0.0)]) is None
    assert estimate([]) is None


def test_the_same_data_give_the_same_interval() -> None:
    rng = np.random.default_rng(4)
    one = [pair(list(rng.random(20)), list(rng.random(20)))]
    assert compare(one) == compare(one)
