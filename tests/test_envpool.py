"""EnvPool with the semantics of all other environments; skipped where it is not installed."""

import copy
import sys

import numpy as np
import pytest
from cli_helpers import differences, run_card, tiny_env, tiny_run_config

from rl_training.config import EnvConfig
from rl_training.envs.factory import env_seed, make_env, probe_spaces
from rl_training.envs.training_envs import TrainingEnvs
from rl_training.errors import UserError
from rl_training.experiment import registry
from rl_training.runtime.workflows import resume_training
from rl_training.spaces import DiscreteActions, ObservationSpec


def test_without_the_package_the_pip_line_is_named(tiny_config, monkeypatch):
    monkeypatch.setitem(sys.modules, "envpool", None)
    with pytest.raises(UserError, match=r"needs EnvPool: pip install 'rl_training\[envpool\]'"):
        TrainingEnvs(tiny_config("ppo", "CartPole-v1", env={"vectorization": "envpool"}))


@pytest.fixture
def training_envs(tiny_config):
    """Return a function that makes training environments, closed after the test."""
    pytest.importorskip("envpool")
    made = []

    def make(env_id="CartPole-v1", how="envpool", num_envs=4, seed=1, **env):
        algo = "sac" if env_id == "Pendulum-v1" else "ppo"
        env = {"num_envs": num_envs, "vectorization": how, **env}
        made.append(TrainingEnvs(tiny_config(algo, env_id, env=env, seed=seed)))
        return made[-1]

    yield make
    for envs in made:
        envs.close()


def pushed_right(envs, count):
    """Step with action 1 `count` times; returns the rows (observation, reward, ends, valid) and the episodes of each
    environment.
    """
    envs.reset()
    steps = [envs.step(np.ones(envs.num_envs, np.int64)) for _ in range(count)]
    return steps, [episode for step in steps for episode in step.episodes]


def next_state(state):
    """CartPole's equations of motion (Barto, Sutton and Anderson, 1983), Euler's method, pushed to the right."""
    x, speed, angle, turning = (float(number) for number in state)
    push = (10.0 + 0.05 * turning**2 * np.sin(angle)) / 1.1
    angular = (9.8 * np.sin(angle) - np.cos(angle) * push) / (0.5 * (4 / 3 - 0.1 * np.cos(angle) ** 2 / 1.1))
    linear = push - 0.05 * angular * np.cos(angle) / 1.1
    return [x + 0.02 * speed, speed + 0.02 * linear, angle + 0.02 * turning, turning + 0.02 * angular]


@pytest.mark.parametrize("how", ["sync", "async", "vector", "envpool"])
def test_every_kind_gives_the_transitions_and_statistics_of_cartpole(training_envs, how):
    envs = training_envs(how=how)
    envs.reset()
    seen, rewards, lengths = envs.observations, np.zeros(4), np.zeros(4, int)
    episodes, expected = [], []
    for _ in range(60):
        step = envs.step(np.ones(4, np.int64))
        valid = np.ones(4, bool) if step.valid is None else step.valid
        for env in range(4):
            led_to, ended = step.next_observations[env], bool(step.terminated[env] or step.truncated[env])
            if not valid[env]:
                assert (step.rewards[env], ended) == (0.0, False)
                assert np.abs(led_to).max() <= 0.05  # a first observation
                continue
            np.testing.assert_allclose(led_to, next_state(seen[env]), atol=1e-5)
            assert ended == bool(abs(led_to[0]) > 2.4 or abs(led_to[2]) > 12 * np.pi / 180)
            rewards[env] += step.rewards[env]
            lengths[env] += 1
            if ended:
                assert bool(step.terminated[env])
                expected.append((rewards[env], lengths[env]))
                rewards[env] = lengths[env] = 0
                if not envs.late_resets:
                    assert np.abs(step.observations[env]).max() <= 0.05
        seen = step.observations
        episodes += [(episode.episode_return, episode.length) for episode in step.episodes]
    assert len(episodes) >= 16
    assert episodes == expected
    assert {length for _, length in episodes} <= {8, 9, 10, 11}


@pytest.mark.parametrize("how", ["sync", "envpool"])
def test_a_time_limit_is_a_truncation_and_its_last_observation_a_true_one(training_envs, how):
    envs = training_envs("Pendulum-v1", how, num_envs=2)
    envs.reset()
    steps = [envs.step(np.zeros((2, 1), np.float32)) for _ in range(201)]
    last = steps[199]
    assert last.truncated.all()
    assert not last.terminated.any()
    assert not any(step.truncated.any() for step in (*steps[:199], steps[200]))
    assert [episode.length for episode in last.episodes] == [200, 200]
    total = sum(step.rewards.astype(np.float64) for step in steps[:200])
    np.testing.assert_allclose([episode.episode_return for episode in last.episodes], total, rtol=1e-6)
    # The angle moves on by a twentieth of the speed, also in the last step.
    before, after = steps[198].next_observations, last.next_observations
    moved = np.arctan2(after[:, 1], after[:, 0]) - np.arctan2(before[:, 1], before[:, 0])
    np.testing.assert_allclose(np.angle(np.exp(1j * moved)), 0.05 * after[:, 2], atol=1e-4)
    if how == "envpool":
        assert steps[200].valid.tolist() == [False, False]


def test_each_environment_has_its_own_seed_derived_from_that_of_the_run(training_envs):
    first, same, other = training_envs(), training_envs(), training_envs(seed=2)
    rows = first.reset()
    assert len({tuple(row) for row in rows.tolist()}) == 4
    assert differences(rows, same.reset()) == []
    assert not (rows == other.reset()).any()
    for _ in range(50):
        actions = np.random.default_rng(0).integers(2, size=4)
        assert differences(first.step(actions).observations, same.step(actions).observations) == []


def test_evaluation_plays_the_same_simulator_with_the_seed_it_is_given(training_envs, tiny_config):
    envs = training_envs()
    rows = envs.reset()
    config = tiny_config("ppo", "CartPole-v1", env={"vectorization": "envpool"})
    env = make_env(config, 0)
    for _ in range(2):
        observation, _ = env.reset(seed=env_seed(config, 0))
        assert differences(np.asarray(observation), rows[0]) == []
    env.close()


def test_a_resumed_run_starts_new_episodes_and_says_why(training_envs):
    original, restored = training_envs(), training_envs()
    original.reset()
    original.step(np.zeros(4, np.int64))
    restored.load_state_dict(copy.deepcopy(original.state_dict()))
    assert restored.restarted == [0, 1, 2, 3]
    assert restored.inexact_reason.endswith("because EnvPool cannot hand over the state of its environments")
    assert np.abs(restored.observations).max() <= 0.05
    assert restored.step(np.zeros(4, np.int64)).valid.all()


@pytest.mark.parametrize("algo", ["ppo", "dqn", "sac"])
def test_training_and_resuming(algo, tmp_path, finite_rows):
    pytest.importorskip("envpool")
    env = tiny_env(algo, num_envs=4, vectorization="envpool", normalize_observation=True, normalize_reward=True)
    config = tiny_run_config(algo, env=env, total_timesteps=2_000, stop_at_step=1_200)
    registry.get(algo).load_train()(config, run_dir=tmp_path)
    resume_training(tmp_path)
    card = run_card(tmp_path)
    assert (card["status"], card["exact"], card["vectorization"]) == ("finished", False, "envpool")
    assert "EnvPool cannot hand over the state" in card["inexact_reasons"][0]
    assert finite_rows(tmp_path)


def test_frames_are_stacked_by_envpool_and_described_as_elsewhere(training_envs):
    env = EnvConfig(id="Pong-v5", vectorization="envpool", frame_stack=4)
    pytest.importorskip("envpool")
    assert probe_spaces(env) == (ObservationSpec(0, ((4, 84, 84),), 4), DiscreteActions(6))
    envs = training_envs("ALE/Pong-v5", num_envs=2, frame_stack=4)
    rows = envs.reset()
    assert (rows.dtype, rows.shape) == (np.uint8, (2, 4 * 84 * 84))
    before = rows
    for _ in range(5):  # the three newest frames become the three oldest
        after = envs.step(np.zeros(2, np.int64)).observations
        assert np.array_equal(after[:, : 3 * 84 * 84], before[:, 84 * 84 :])
        before = after


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"id": "CartPole-v9"}, r"EnvPool has no CartPole-v9\. Did you mean 'CartPole-v"),
        ({"id": "toy/Climb-v0"}, r"EnvPool has no toy/Climb-v0\."),
        ({"id": "CartPole-v1", "frame_stack": 2}, r"env\.frame_stack=2 does not go with env\.vectorization=envpool"),
        ({"id": "CartPole-v1", "env_kwargs": {"no_such": 1}}, r"Cannot make env\.id=CartPole-v1"),
    ],
)
def test_what_envpool_does_not_have_is_refused_in_one_line(training_envs, env, message):
    with pytest.raises(UserError, match=message) as raised:
        training_envs(env.pop("id"), **env)
    assert "\n" not in str(raised.value)
