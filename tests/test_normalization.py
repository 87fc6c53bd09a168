import copy

import numpy as np
import pytest

from rl_training.config import EnvConfig
from rl_training.envs.normalization import Normalizer, RunningMoments


def stream(rows: int = 500, size: int = 3) -> np.ndarray:
    """Numbers far from zero, where a careless variance loses its digits."""
    return np.random.default_rng(0).normal([1e4, -2.0, 0.0], [1.0, 0.5, 3.0], (rows, size))


def in_batches(data: np.ndarray, sizes: list[int]) -> list[np.ndarray]:
    batches, start = [], 0
    for size in sizes:
        batches.append(data[start : start + size])
        start += size
    assert start == len(data)
    return batches


@pytest.mark.parametrize("sizes", [[500], [1] * 500, [10] * 50, [1, 99, 300, 100]])
def test_running_moments_equal_those_of_the_whole_stream(sizes):
    moments = RunningMoments((3,))
    for batch in in_batches(stream(), sizes):
        moments.update(batch)
    assert moments.count == 500
    np.testing.assert_allclose(moments.mean, stream().mean(0), rtol=1e-12)
    np.testing.assert_allclose(moments.variance, stream().var(0), rtol=1e-8)


def test_running_moments_do_not_depend_on_the_order_of_batches():
    forwards, backwards = RunningMoments((3,)), RunningMoments((3,))
    batches = in_batches(stream(), [1, 99, 300, 100])
    for batch in batches:
        forwards.update(batch)
    for batch in reversed(batches):
        backwards.update(batch)
    np.testing.assert_allclose(forwards.mean, backwards.mean, rtol=1e-12)
    np.testing.assert_allclose(forwards.variance, backwards.variance, rtol=1e-8)


def test_running_moments_of_hand_worked_numbers():
    # 1, 3 and then 5: mean 3, variance (4 + 0 + 4) / 3
    moments = RunningMoments()
    moments.update(np.array([1.0, 3.0]))
    moments.update(np.array([5.0]))
    assert moments.mean == pytest.approx(3.0)
    assert moments.variance == pytest.approx(8 / 3)


def normalizer(*, gamma: float = 0.5, num_envs: int = 2, **settings) -> Normalizer:
    return Normalizer(EnvConfig(id="x", num_envs=num_envs, **settings), observation_size=2, gamma=gamma)


def test_observations_get_mean_zero_and_deviation_one():
    # Column 1 sees 0 and 4 (mean 2, deviation 2), column 2 sees 10 and 30 (mean 20, deviation 10).
    scale = normalizer(normalize_observation=True)
    scale.update(np.array([[0.0, 10.0], [4.0, 30.0]], np.float32))
    scaled = scale.observations(np.array([[4.0, 0.0]], np.float32))
    assert scaled.dtype == np.float32
    np.testing.assert_allclose(scaled, [[1.0, -2.0]], rtol=1e-6)


def test_normalised_observations_are_clipped():
    scale = normalizer(normalize_observation=True, clip_observation=3.0)
    scale.update(np.array([[0.0, 10.0], [4.0, 30.0]], np.float32))
    scaled = scale.observations(np.array([[1e6, -1e6]], np.float32))
    assert scaled.tolist() == [[3.0, -3.0]]


def test_using_the_statistics_does_not_move_them():
    scale = normalizer(normalize_observation=True, normalize_reward=True)
    scale.update(np.array([[0.0, 10.0], [4.0, 30.0]], np.float32), np.float32([1.0, 2.0]), np.zeros(2, bool))
    before = scale.observations(np.ones((1, 2), np.float32)), scale.rewards(np.ones(2, np.float32))
    for _ in range(10):
        scale.observations(np.full((1, 2), 100.0, np.float32))
        scale.rewards(np.full(2, 100.0, np.float32))
    after = scale.observations(np.ones((1, 2), np.float32)), scale.rewards(np.ones(2, np.float32))
    np.testing.assert_array_equal(before[0], after[0])
    np.testing.assert_array_equal(before[1], after[1])


def observe_rewards(scale: Normalizer, rewards: list[list[float]], ends: list[list[bool]]) -> None:
    for reward, ended in zip(rewards, ends, strict=True):
        scale.update(np.zeros((len(reward), 2), np.float32), np.float32(reward), np.array(ended))


def test_rewards_are_divided_by_the_deviation_of_the_discounted_return_and_not_shifted():
    # gamma 0.5: environment 1 gets 1, 1: returns 1, 1.5; environment 2 gets 2, 4: returns 2, 5.
    # mean of 1, 1.5, 2, 5: 2.375; variance (1.890625 + 0.765625 + 0.140625 + 6.890625) / 4 = 2.421875
    scale = normalizer(normalize_reward=True)
    observe_rewards(scale, [[1.0, 2.0], [1.0, 4.0]], [[False, False], [False, False]])
    # 1 / sqrt(2.421875) = 0.642575
    scaled = scale.rewards(np.float32([1.0, -2.0, 0.0]))
    assert scaled.dtype == np.float32
    np.testing.assert_allclose(scaled, [0.642575, -1.285150, 0.0], rtol=1e-5)


def test_the_discounted_return_starts_again_after_the_end_of_an_episode():
    # gamma 1, one environment, reward 1 each: returns 1, 2 | 1, 2 with an end after the second step: variance 1/4.
    # Without the restart they would be 1, 2, 3, 4 with variance 5/4.
    def scaled_one(second_ends):
        scale = normalizer(gamma=1.0, num_envs=1, normalize_reward=True)
        observe_rewards(scale, [[1.0]] * 4, [[False], [second_ends], [False], [False]])
        return scale.rewards(np.float32([1.0]))[0]

    assert scaled_one(second_ends=True) == pytest.approx(2.0, rel=1e-5)
    assert scaled_one(second_ends=False) == pytest.approx(0.894427, rel=1e-5)


def test_only_the_environment_that_ended_starts_again():
    # gamma 1, rewards 1: the first environment ends each step and stays at 1, the second counts 1, 2, 3.
    # 1, 1, 1, 1, 2, 3: mean 1.5, variance (4 x 0.25 + 0.25 + 2.25) / 6 = 0.583333
    scale = normalizer(gamma=1.0, normalize_reward=True)
    observe_rewards(scale, [[1.0, 1.0]] * 3, [[True, False]] * 3)
    np.testing.assert_allclose(scale.rewards(np.float32([1.0])), [1.309307], rtol=1e-5)


def test_normalised_rewards_are_clipped():
    scale = normalizer(normalize_reward=True, clip_reward=5.0)
    observe_rewards(scale, [[1.0, 2.0]], [[False, False]])
    assert scale.rewards(np.float32([1e6, -1e6])).tolist() == [5.0, -5.0]


def test_what_is_switched_off_passes_through_untouched():
    scale = normalizer()
    observations, rewards = np.float32([[1e6, -3.0]]), np.float32([1e6, -3.0])
    scale.update(observations, rewards, np.zeros(2, bool))
    np.testing.assert_array_equal(scale.observations(observations), observations)
    np.testing.assert_array_equal(scale.rewards(rewards), rewards)


def test_the_first_reset_moves_observation_statistics_only():
    scale = normalizer(normalize_observation=True, normalize_reward=True)
    scale.update(np.array([[0.0, 10.0], [4.0, 30.0]], np.float32))
    np.testing.assert_allclose(scale.observations(np.float32([[2.0, 20.0]])), [[0.0, 0.0]], atol=1e-6)
    np.testing.assert_allclose(scale.rewards(np.float32([3.0])), [3.0], rtol=1e-6)


def test_a_restored_normalizer_goes_on_like_the_original():
    original, restored = (normalizer(normalize_observation=True, normalize_reward=True) for _ in range(2))
    data = stream(40, 3)[:, 1:].astype(np.float32)

    def feed(scale, rows):
        for row in rows:
            ended = np.array([row % 3 == 0, row % 5 == 0])
            scale.update(data[2 * row : 2 * row + 2], data[row : row + 2, 0], ended)

    feed(original, range(10))
    feed(restored, range(3))
    restored.load_state_dict(copy.deepcopy(original.state_dict()))
    for scale in (original, restored):
        feed(scale, range(10, 20))
    np.testing.assert_array_equal(original.observations(data), restored.observations(data))
    np.testing.assert_array_equal(original.rewards(data[:, 0]), restored.rewards(data[:, 0]))
