import math

import pytest

from rl_training.runtime.statistics import summarize


def test_the_interval_of_a_hand_worked_sample():
    # 1..5: mean 3, deviation sqrt(10 / 4) = 1.581139, t(4) = 2.776: 2.776 x 1.581139 / sqrt 5 = 1.962929
    summary = summarize([1, 2, 3, 4, 5])
    assert (summary.mean, summary.count) == (3.0, 5)
    assert summary.std == pytest.approx(1.581139, abs=1e-6)
    assert (summary.low, summary.high) == pytest.approx((1.037, 4.963), abs=1e-3)


def test_two_values_have_a_wide_interval():
    # mean 1, deviation sqrt 2, t(1) = 12.706: 12.706 x sqrt 2 / sqrt 2 = 12.706
    summary = summarize([0.0, 2.0])
    assert (summary.low, summary.high) == pytest.approx((-11.706, 13.706), abs=1e-3)


def test_one_value_has_no_deviation_and_an_infinite_interval():
    summary = summarize([7.0])
    assert (summary.mean, summary.std, summary.count) == (7.0, 0.0, 1)
    assert (summary.low, summary.high) == (-math.inf, math.inf)


def test_equal_values_have_an_interval_of_no_width():
    summary = summarize([2.5] * 10)
    assert (summary.mean, summary.std, summary.low, summary.high) == (2.5, 0.0, 2.5, 2.5)


@pytest.mark.parametrize(
    ("count", "quantile"),
    # Table values of Student's t, 97.5 %: 30, 31, 60 and 120 degrees of freedom
    [(31, 2.0423), (32, 2.0395), (61, 2.0003), (121, 1.9799)],
)
def test_the_half_width_of_long_samples_follows_students_table(count, quantile):
    values = [float(i % 7) for i in range(count)]
    summary = summarize(values)
    assert (summary.high - summary.mean) * math.sqrt(count) / summary.std == pytest.approx(quantile, abs=5e-4)


def test_a_very_long_sample_has_the_normal_interval():
    # 0 and 1 equally often: deviation 0.5 (times sqrt(n / (n - 1))); 1.959964 x 0.5 / 100 = 0.0098
    summary = summarize([0.0, 1.0] * 5_000)
    assert summary.mean == 0.5
    assert summary.high - 0.5 == pytest.approx(0.0098, rel=1e-3)
    assert 0.5 - summary.low == pytest.approx(0.0098, rel=1e-3)


def test_the_mean_of_numbers_of_very_different_size_keeps_its_digits():
    # Summed from the left in floating point, the ones would vanish.
    assert summarize([1e16, 1.0, 1.0, -1e16]).mean == 0.5
