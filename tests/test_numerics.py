import numpy as np
import pytest

from rl_training.errors import NonFiniteError
from rl_training.numerics import all_finite, require_finite

NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize("numbers", [[], [0.0, -1.5], [1e30, -1e30], [3.4e38] * 4, [1e-40]])
def test_finite_numbers_pass_however_large(numbers):
    # The square of 1e30 is no float32; that must neither count as infinite nor warn.
    assert all_finite(np.array(numbers, np.float32))


@pytest.mark.parametrize("bad", [NAN, INFINITY, -INFINITY])
def test_one_bad_number_among_many_is_found(bad):
    numbers = np.ones((5, 3), np.float32)
    numbers[2, 1] = bad
    assert not all_finite(numbers)


def test_the_message_names_the_first_bad_environment_and_its_env_step():
    # Rows are vector steps 7, 8 and 9, counted from 0; environment 2 of 4 is bad in the second: env step 9 x 4.
    rewards = np.zeros((3, 4), np.float32)
    rewards[1, 2] = rewards[2, 0] = NAN
    with pytest.raises(NonFiniteError, match=r"The reward of environment 2 is NaN or infinite at step 36\."):
        require_finite("reward", rewards, first_vector_step=7, num_envs=4)
