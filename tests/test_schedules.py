import pytest

from rl_training.algorithms.schedules import epsilon_at, scheduled
from rl_training.config import Schedule


@pytest.mark.parametrize("progress", [0.0, 0.3, 1.0])
def test_a_constant_schedule_stays(progress):
    assert scheduled(0.2, Schedule.constant, progress) == 0.2


@pytest.mark.parametrize(("progress", "value"), [(0.0, 8.0), (0.25, 6.0), (0.5, 4.0), (1.0, 0.0), (1.5, 0.0)])
def test_a_linear_schedule_falls_to_zero_and_never_below(progress, value):
    assert scheduled(8.0, Schedule.linear, progress) == value


@pytest.mark.parametrize(
    ("progress", "epsilon"),
    [
        (0.0, 1.0),
        (0.05, 0.76),  # a quarter of the way from 1 to 0.04: 1 - 0.25 x 0.96
        (0.1, 0.52),  # half of it
        (0.2, 0.04),
        (0.9, 0.04),
        (1.0, 0.04),
    ],
)
def test_epsilon_falls_in_a_straight_line_and_then_stays(progress, epsilon):
    assert epsilon_at(progress, initial=1.0, final=0.04, fraction=0.2) == pytest.approx(epsilon)


def test_epsilon_may_also_rise():
    assert epsilon_at(0.25, initial=0.0, final=0.4, fraction=0.5) == pytest.approx(0.2)


def test_a_fraction_of_zero_starts_at_the_final_epsilon():
    assert epsilon_at(0.0, initial=1.0, final=0.05, fraction=0.0) == 0.05
