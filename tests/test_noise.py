import numpy as np
import pytest

from rl_training.algorithms.noise import NoiseBlocks, gumbel, normal, uniform


def draws(draw, count=20_000):
    return draw(np.random.default_rng(0), (count,))


def test_normal_noise_has_mean_zero_and_deviation_one():
    noise = draws(normal)
    assert noise.dtype == np.float32
    assert noise.mean() == pytest.approx(0.0, abs=0.03)
    assert noise.std() == pytest.approx(1.0, abs=0.03)


def test_uniform_noise_fills_the_interval_from_zero_to_below_one():
    noise = draws(uniform)
    assert noise.dtype == np.float32
    assert noise.min() >= 0.0
    assert noise.max() < 1.0
    np.testing.assert_allclose(np.histogram(noise, bins=4, range=(0, 1))[0] / len(noise), 0.25, atol=0.02)


def test_gumbel_noise_has_the_moments_of_the_gumbel_distribution():
    # mean: Euler's constant 0.577216; variance pi^2 / 6 = 1.644934
    noise = draws(gumbel)
    assert noise.dtype == np.float32
    assert noise.mean() == pytest.approx(0.577216, abs=0.04)
    assert noise.var() == pytest.approx(1.644934, abs=0.1)


def test_the_argmax_of_logits_and_gumbel_noise_is_a_sample_of_their_softmax():
    noise = gumbel(np.random.default_rng(0), (20_000, 3))
    chosen = (np.log([0.7, 0.2, 0.1]) + noise).argmax(-1)
    np.testing.assert_allclose(np.bincount(chosen) / 20_000, [0.7, 0.2, 0.1], atol=0.02)


def test_the_noise_of_a_step_does_not_depend_on_when_it_is_asked_for():
    # Steps on both sides of the borders between blocks of 1024, forwards by one stream and backwards by another.
    steps = [0, 1, 1023, 1024, 1025, 2047, 2048, 5000]
    forwards, backwards = (NoiseBlocks(normal, (2, 3), seed=5) for _ in range(2))
    expected = {step: forwards.at(step).copy() for step in steps}
    for step in reversed(steps):
        np.testing.assert_array_equal(backwards.at(step), expected[step])


def test_no_two_steps_have_the_same_noise():
    stream = NoiseBlocks(normal, (), seed=5)
    assert len({float(stream.at(step)) for step in range(3_000)}) > 2_990  # float32 may collide by chance


def test_noise_has_the_shape_that_was_asked_for():
    assert NoiseBlocks(uniform, (2, 4), seed=0).at(7).shape == (2, 4)


def test_the_seed_decides_the_noise():
    first, same, other = (NoiseBlocks(normal, (4,), seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.at(100), same.at(100))
    assert not np.array_equal(first.at(100), other.at(100))
