"""Wrappers from `env.wrappers`: what each does, in which order, with which settings, and that resumes stay exact."""

import dataclasses
import sys

import gymnasium as gym
import numpy as np
import pytest
from cli_helpers import REPO
from gymnasium import spaces

import rl_training
from rl_training.config import EnvConfig
from rl_training.config.conversion import load_yaml
from rl_training.config.fields import option
from rl_training.envs import wrappers
from rl_training.envs.factory import make_env, probe_spaces
from rl_training.envs.training_envs import TrainingEnvs
from rl_training.envs.wrappers import register_wrapper
from rl_training.errors import ConfigError, UserError
from rl_training.runtime.run_card import read_run_card
from rl_training.spaces import ContinuousActions, DiscreteActions, ObservationSpec


class Ladder(gym.Env):
    """Climbs by the action; the reward is 10 times the height reached; ends at 6."""

    observation_space = spaces.Box(0.0, 100.0, (3,), np.float32)
    action_space = spaces.Discrete(4)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.height = 0
        return np.array([0, 1, 2], np.float32), {}

    def step(self, action):
        self.height += int(action)
        observation = np.array([self.height, 1, 2], np.float32)
        return observation, 10.0 * self.height, self.height >= 6, False, {}


class Named(gym.Env):
    """Observes a Dict of three keys."""

    observation_space = spaces.Dict({key: spaces.Box(-1.0, 1.0, (1,), np.float32) for key in ("far", "map", "near")})
    action_space = spaces.Box(-2.0, 6.0, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._seen(), {}

    def step(self, action):
        return self._seen(), float(action[0]), False, False, {}

    def _seen(self):
        return {key: np.full(1, value, np.float32) for key, value in (("far", 0.1), ("map", 0.2), ("near", 0.3))}


class Game(gym.Env):
    """Waits for FIRE, and loses a life at every third step after it; three lives."""

    observation_space = spaces.Box(0.0, 100.0, (1,), np.float32)
    action_space = spaces.Discrete(3)

    def get_action_meanings(self):
        return ["NOOP", "FIRE", "LEFT"]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.lives, self.since_fire = 3, None
        return np.zeros(1, np.float32), {"lives": 3}

    def step(self, action):
        if self.since_fire is None:
            self.since_fire = 0 if action == 1 else None
        else:
            self.since_fire += 1
        if self.since_fire == 3:
            self.lives, self.since_fire = self.lives - 1, None
        playing = self.since_fire is not None
        return np.array([playing], np.float32), float(playing), self.lives == 0, False, {"lives": self.lives}


for name, env_class in (("Ladder", Ladder), ("Named", Named), ("Game", Game)):
    gym.register(f"wrapped/{name}-v0", env_class)


@pytest.fixture
def wrapped(tiny_config):
    """Return a function from wrapper entries to an environment as training makes it."""
    made = []

    def make(*entries, env_id="wrapped/Ladder-v0", **settings):
        config = tiny_config("ppo", env_id, env={"wrappers": list(entries)})
        made.append(make_env(config, 0, **settings))
        return made[-1]

    yield make
    for env in made:
        env.close()


def play(env, actions):
    """Return the rewards of an episode, its info at the end, and how it ended."""
    env.reset(seed=0)
    rewards = []
    for action in actions:
        _, reward, terminated, truncated, info = env.step(action)
        rewards.append(reward)
        if terminated or truncated:
            return rewards, info["episode"], "terminated" if terminated else "truncated"
    return rewards, None, None


# What each wrapper does


def test_without_wrappers_nothing_changes(wrapped):
    assert play(wrapped(), [1, 2, 0, 2, 1]) == ([10, 30, 30, 50, 60], {"r": 180.0, "l": 5}, "terminated")


def test_time_limit_truncates(wrapped):
    env = wrapped({"name": "time_limit", "steps": 3})
    assert play(env, [1] * 9) == ([10, 20, 30], {"r": 60.0, "l": 3}, "truncated")


def test_action_repeat_sums_rewards_and_stops_at_the_end(wrapped):
    env = wrapped({"name": "action_repeat", "times": 4})
    # Heights 1 2 3 4, then 5 6: the episode ends in the second repetition of the second step.
    assert play(env, [1, 1]) == ([100.0, 110.0], {"r": 210.0, "l": 2}, "terminated")


def test_reward_scale_changes_what_is_learned_and_not_what_is_logged(wrapped):
    env = wrapped({"name": "reward_scale", "factor": 0.25})
    assert play(env, [1, 2, 3]) == ([2.5, 7.5, 15.0], {"r": 100.0, "l": 3}, "terminated")


def test_reward_clip_and_sign(wrapped):
    clipped = wrapped({"name": "reward_clip", "low": -1, "high": 25})
    assert play(clipped, [1, 2, 3]) == ([10.0, 25.0, 25.0], {"r": 100.0, "l": 3}, "terminated")
    signs = wrapped({"name": "reward_sign"})
    assert play(signs, [0, 2, 2, 2]) == ([0.0, 1.0, 1.0, 1.0], {"r": 120.0, "l": 4}, "terminated")


def test_the_sign_of_a_negative_reward_is_minus_one(wrapped):
    env = wrapped({"name": "reward_sign"}, env_id="wrapped/Named-v0")
    env.reset(seed=0)
    assert [env.step(np.array([number], np.float32))[1] for number in (-1.5, 0.0, 5.0)] == [-1.0, 0.0, 1.0]


def test_rescale_action_stretches_to_the_environments_limits(wrapped):
    env = wrapped({"name": "rescale_action", "low": -1, "high": 1}, env_id="wrapped/Named-v0")
    env.reset(seed=0)
    assert [env.step(np.array([number], np.float32))[1] for number in (-1.0, 0.0, 0.5, 1.0)] == [-2.0, 2.0, 4.0, 6.0]


@pytest.mark.parametrize(("choice", "seen"), [({"keep": [0, 2]}, [3, 2]), ({"drop": [0]}, [1, 2])])
def test_observation_filter_on_a_vector(wrapped, choice, seen):
    env = wrapped({"name": "observation_filter", **choice})
    env.reset(seed=0)
    assert env.step(3)[0].tolist() == seen
    assert env.observation_space.shape == (2,)


@pytest.mark.parametrize("choice", [{"keep": ["near", "far"]}, {"drop": ["map"]}])
def test_observation_filter_on_a_dict(wrapped, choice):
    env = wrapped({"name": "observation_filter", **choice}, env_id="wrapped/Named-v0")
    assert env.reset(seed=0)[0].tolist() == pytest.approx([0.1, 0.3])


def test_fire_reset_presses_fire_at_the_start_and_after_a_lost_life(wrapped):
    # Idle from the start: each life lasts three steps; without the wrapper the game would wait forever.
    env = wrapped({"name": "fire_reset"}, env_id="wrapped/Game-v0")
    assert play(env, [0] * 20) == ([1, 1, 1, 1, 1, 1, 1, 1, 0], {"r": 8.0, "l": 9}, "terminated")
    assert play(wrapped(env_id="wrapped/Game-v0"), [0] * 20) == ([0] * 20, None, None)


# Sticky actions: random, but from the environment's own generator


def executed(env, actions, seed):
    env.reset(seed=seed)
    heights = [0.0, *(float(env.step(action)[0][0]) for action in actions)]
    return np.diff(heights).astype(int).tolist()


def test_sticky_actions_repeat_the_previous_action_as_often_as_asked(wrapped):
    env = wrapped({"name": "sticky_actions", "probability": 0.25})
    repeated, chances = 0, 0
    for seed in range(1_000):
        done = executed(env, [1, 0, 1, 0, 1], seed)
        assert done[0] == 1  # there is nothing to repeat yet
        for previous, wanted, action in zip(done, [0, 1, 0, 1], done[1:], strict=False):
            chances += previous != wanted
            repeated += previous != wanted and action == previous
    assert repeated / chances == pytest.approx(0.25, abs=0.03)


def test_sticky_actions_are_the_same_for_the_same_seed(wrapped):
    first, second = (wrapped({"name": "sticky_actions", "probability": 0.5}) for _ in range(2))
    actions = [1, 0] * 5
    runs = [executed(first, actions, seed) for seed in range(20)]
    assert runs == [executed(second, actions, seed) for seed in range(20)]
    assert len({tuple(run) for run in runs}) > 10


@pytest.mark.parametrize("steps", [3, 47, 90])
def test_a_wrapped_environment_comes_back_exactly(tiny_config, steps):
    entries = [
        {"name": "sticky_actions", "probability": 0.5},
        {"name": "action_repeat", "times": 2},
        {"name": "time_limit", "steps": 40},
        {"name": "reward_scale", "factor": 0.5},
    ]
    config = tiny_config("ppo", "CartPole-v1", env={"num_envs": 2, "wrappers": entries})
    going_on, restored = TrainingEnvs(config), TrainingEnvs(config)
    actions = np.random.default_rng(0).integers(2, size=(steps + 60, 2))
    going_on.reset()
    for action in actions[:steps]:
        going_on.step(action)
    restored.load_state_dict(going_on.state_dict())
    assert restored.restarted == []
    for action in actions[steps:]:
        expected, found = going_on.step(action), restored.step(action)
        assert np.array_equal(found.next_observations, expected.next_observations)
        assert (found.rewards.tolist(), found.episodes) == (expected.rewards.tolist(), expected.episodes)
    going_on.close()
    restored.close()


# Order


def test_the_first_wrapper_is_the_innermost(wrapped):
    repeat, limit = {"name": "action_repeat", "times": 2}, {"name": "time_limit", "steps": 3}
    assert play(wrapped(repeat, limit), [1] * 9) == ([30.0, 70.0, 110.0], {"r": 210.0, "l": 3}, "terminated")
    assert play(wrapped(limit, repeat), [1] * 9) == ([30.0, 30.0], {"r": 60.0, "l": 2}, "truncated")


def test_the_raw_return_survives_every_wrapper_outside(wrapped):
    scale, repeat = {"name": "reward_scale", "factor": 0.5}, {"name": "action_repeat", "times": 2}
    env = wrapped(scale, repeat, {"name": "reward_clip", "low": 0, "high": 20})
    # Rewards 10 20 | 30 40 | 50 60: half of their sums, limited to 20.
    assert play(env, [1] * 3) == ([15.0, 20.0, 20.0], {"r": 210.0, "l": 3}, "terminated")


def test_spaces_are_those_behind_the_wrappers():
    filtered = {"name": "observation_filter", "keep": [1]}
    assert probe_spaces(EnvConfig(id="wrapped/Ladder-v0", wrappers=[filtered])) == (
        ObservationSpec(1),
        DiscreteActions(4),
    )
    rescaled = {"name": "rescale_action"}
    assert probe_spaces(EnvConfig(id="wrapped/Named-v0", wrappers=[rescaled]))[1] == ContinuousActions((-1.0,), (1.0,))


# In a run: returns are raw in logs and evaluations, and the run card has the order


def test_a_run_learns_from_wrapped_rewards_and_reports_raw_ones(tiny_config, tmp_path):
    entries = [{"name": "time_limit", "steps": 7}, {"name": "reward_scale", "factor": 0.5}]
    config = tiny_config("ppo", "toy/ConstantReward-v0", env={"wrappers": entries, "env_kwargs": {"length": 100}})
    result = rl_training.train_ppo(config, run_dir=tmp_path / "run")
    assert result.metrics["episode/return_mean"] == 7.0
    assert result.metrics["eval/return_mean"] == 7.0
    assert result.metrics["eval/length_mean"] == 7.0
    assert read_run_card(tmp_path / "run")["wrappers"] == [
        {"name": "time_limit", "steps": 7},
        {"name": "reward_scale", "factor": 0.5},
    ]
    assert rl_training.evaluate_checkpoint(tmp_path / "run", checkpoint="last", episodes=2).returns == (7.0, 7.0)


def test_training_sees_the_scaled_rewards(tiny_config):
    envs = TrainingEnvs(
        tiny_config("ppo", "toy/ConstantReward-v0", env={"wrappers": [{"name": "reward_scale", "factor": 0.5}]})
    )
    envs.reset()
    assert envs.step(np.array([0])).rewards.tolist() == [0.5]
    envs.close()


# Refusals: one line, with the key


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (
            [{"name": "time_limt", "steps": 2}],
            "Unknown wrapper env.wrappers[0].name=time_limt. Did you mean 'time_limit'?",
        ),
        (
            [{"name": "reward_sign"}, {"name": "reward_scale", "facter": 2}],
            "Unknown key env.wrappers[1].facter of reward_scale. Did you mean 'factor'?",
        ),
        ([{"name": "reward_sign", "x": 1}], "Unknown key env.wrappers[0].x of reward_sign. It has no settings."),
        (
            [{"name": "time_limit"}],
            "env.wrappers[0].steps is missing: time_limit needs it. Steps after which an episode is truncated.",
        ),
        ([{"name": "time_limit", "steps": 0}], "env.wrappers[0].steps must be at least 1, got 0."),
        ([{"name": "time_limit", "steps": "x"}], "env.wrappers[0].steps must be a whole number, got 'x'."),
        ([{"name": "reward_scale", "factor": "x"}], "env.wrappers[0].factor must be a number, got 'x'."),
        (
            [{"name": "sticky_actions", "probability": 1}],
            "env.wrappers[0].probability must be at least 0 and below 1, got 1.0.",
        ),
        (
            ["time_limit"],
            "env.wrappers[0] must be a mapping with a name, as in {name: time_limit, steps: 200}, got 'time_limit'.",
        ),
        (
            [{"steps": 2}],
            "env.wrappers[0] must be a mapping with a name, as in {name: time_limit, steps: 200}, got {'steps': 2}.",
        ),
    ],
)
def test_a_wrong_entry_is_refused_by_its_key(entries, message):
    with pytest.raises(ConfigError) as error:
        probe_spaces(EnvConfig(id="wrapped/Ladder-v0", wrappers=entries))
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"name": "observation_filter"}, "ValueError: give either keep or drop"),
        ({"name": "observation_filter", "keep": [0], "drop": [1]}, "ValueError: give either keep or drop"),
        ({"name": "observation_filter", "keep": [3]}, "ValueError: there is no 3. Choose from 0, 1, 2."),
        ({"name": "observation_filter", "drop": [0, 1, 2]}, "ValueError: nothing would be left to see"),
        ({"name": "reward_clip", "low": 2}, "ValueError: low=2.0 must be below high=1.0"),
        ({"name": "rescale_action"}, "TypeError: it is for real actions, not Discrete(4)"),
    ],
)
def test_a_wrapper_that_does_not_fit_is_named(entry, reason):
    with pytest.raises(UserError) as error:
        probe_spaces(EnvConfig(id="wrapped/Ladder-v0", wrappers=[{"name": "reward_sign"}, entry]))
    assert str(error.value) == f"env.wrappers[1] ({entry['name']}) cannot be put around wrapped/Ladder-v0: {reason}"


# Wrappers of one's own


def test_a_registered_wrapper_is_used_with_its_typed_settings(wrapped, monkeypatch):
    monkeypatch.setattr(wrappers, "_REGISTRY", dict(wrappers._REGISTRY))

    @dataclasses.dataclass
    class Settings:
        bonus: float = option(1.0, "Added to each reward.", at_least=0)

    register_wrapper(
        "bonus",
        Settings,
        lambda env, settings: gym.wrappers.TransformReward(env, lambda reward: reward + settings.bonus),
        evaluation_changes={"bonus": 0.0},
    )
    assert play(wrapped({"name": "bonus", "bonus": 5}), [3, 3])[:2] == ([35.0, 65.0], {"r": 100.0, "l": 2})
    assert play(wrapped({"name": "bonus"}, evaluation=True), [3, 3])[0] == [30.0, 60.0]
    with pytest.raises(ConfigError, match=r"env\.wrappers\[0\]\.bonus must be at least 0, got -1\.0"):
        wrapped({"name": "bonus", "bonus": -1})


def test_settings_of_a_wrapper_must_be_a_dataclass():
    with pytest.raises(TypeError, match="must be a dataclass"):
        register_wrapper("plain", dict, lambda env, settings: env)


# Atari


@pytest.mark.parametrize("game", ["pong", "breakout"])
def test_without_the_atari_package_the_answer_is_what_to_type(game, monkeypatch):
    settings = load_yaml(REPO / "conf" / "env" / f"{game}.yaml")
    del settings["defaults"]
    monkeypatch.setitem(sys.modules, "ale_py", None)
    monkeypatch.delitem(sys.modules, "rl_training.envs.atari", raising=False)
    with pytest.raises(UserError) as error:
        probe_spaces(EnvConfig(**{**settings, "frame_stack": 3}))  # unlike what another test has probed
    assert str(error.value) == f"ALE/{game.capitalize()}-v5 needs an extra: pip install 'rl_training[atari]'"


@pytest.fixture
def atari(tiny_config):
    """Return a function that makes the settings of a game."""
    pytest.importorskip("ale_py")
    pytest.importorskip("cv2")

    def make(algo, game, **changes):
        settings = load_yaml(REPO / "conf" / "env" / f"{game}.yaml")
        del settings["defaults"]
        return tiny_config(algo, settings["id"], env={**settings, **changes})

    return make


@pytest.mark.parametrize(("game", "actions"), [("pong", 6), ("breakout", 4)])
def test_games_have_four_grey_frames_and_few_actions(atari, game, actions):
    config = atari("ppo", game)
    assert probe_spaces(config.env) == (ObservationSpec(0, ((4, 84, 84),), 4), DiscreteActions(actions))


def test_breakout_plays_by_itself_and_counts_bricks_not_signs(atari):
    env = make_env(atari("ppo", "breakout"), 0)
    random = np.random.default_rng(0)
    env.reset(seed=3)
    learned, ended = 0.0, False
    while not ended:
        _, reward, terminated, truncated, info = env.step(int(random.choice([0, 2, 3])))  # never FIRE
        assert reward in (0.0, 1.0)
        learned, ended = learned + reward, terminated or truncated
    assert info["lives"] == 0
    assert info["episode"]["r"] >= learned
    env.close()


def test_a_lost_life_ends_training_episodes_if_asked_and_never_those_of_evaluation(atari):
    wrappers_ = [{"name": "atari", "terminal_on_life_loss": True}, {"name": "fire_reset"}]
    config = atari("ppo", "breakout", wrappers=wrappers_)
    lives = []
    for evaluation in (False, True):
        env = make_env(config, 0, evaluation=evaluation)
        env.reset(seed=0)
        ended = False
        while not ended:
            _, _, ended, _, info = env.step(0)
        lives.append(info["lives"])
        env.close()
    assert lives == [4, 0]


STICKY_GAME = {"env_kwargs": {"frameskip": 1, "repeat_action_probability": 0.25}}
STICKY_WRAPPER = {"wrappers": [{"name": "sticky_actions"}, {"name": "atari"}, {"name": "reward_sign"}]}


@pytest.mark.parametrize("changes", [{}, STICKY_GAME, STICKY_WRAPPER], ids=["plain", "sticky game", "sticky wrapper"])
def test_a_game_comes_back_exactly_in_its_first_episode_and_later(atari, changes):
    config = atari("ppo", "pong", **changes)
    random = np.random.default_rng(0)
    going_on = TrainingEnvs(config)
    going_on.reset()
    episodes = 0
    for step in range(1_200):
        episodes += len(going_on.step(random.integers(6, size=1)).episodes)
        if step == 150 or (episodes and step % 150 == 0):
            restored = TrainingEnvs(config)
            restored.load_state_dict(going_on.state_dict())
            assert restored.inexact_reason is None
            restored.close()
    assert episodes >= 1
    going_on.close()
