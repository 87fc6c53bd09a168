import copy
import math

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from toy_envs import Failing

from rl_training.api.algorithms import make_config
from rl_training.config import EnvConfig
from rl_training.envs import snapshots
from rl_training.envs.factory import make_env, make_vector_env, probe_spaces
from rl_training.envs.flattening import describe_spaces
from rl_training.envs.training_envs import EnvStep, Episode, TrainingEnvs
from rl_training.errors import EnvironmentFailure, UserError
from rl_training.spaces import ContinuousActions, DiscreteActions, ObservationSpec


@pytest.fixture
def training_envs(tiny_config):
    """Return a function that makes TrainingEnvs by id; they are closed after the test."""
    made = []

    def make(env_id: str, *, seed: int = 1, **env_settings) -> TrainingEnvs:
        made.append(TrainingEnvs(tiny_config("ppo", env_id, env=env_settings, seed=seed)))
        return made[-1]

    yield make
    for envs in made:
        envs.close()


def random_actions(envs: TrainingEnvs, random: np.random.Generator) -> np.ndarray:
    spec = envs.action_spec
    if isinstance(spec, DiscreteActions):
        return random.integers(spec.count, size=envs.num_envs) + spec.start
    return random.uniform(spec.low, spec.high, (envs.num_envs, spec.size)).astype(np.float32)


# Autoreset: no phantom transition, true last observations


def test_autoreset_in_the_same_step_is_the_default(tiny_config):
    envs = make_vector_env(tiny_config("dqn", "toy/Counter-v0"))
    assert envs.late_resets is False
    envs.close()


@pytest.mark.parametrize("ends", ["truncated", "terminated"])
@pytest.mark.parametrize("env_id", ["toy/Counter-v0", "toy/ReusedArrays-v0"])
def test_every_step_is_a_transition_that_happened(training_envs, env_id, ends):
    # Episodes of 3 steps; observations are (episode, step), the reward is the step. A phantom transition would show as
    # a reward of 0 after each episode. Everything is looked at after the last step: nothing may be overwritten.
    envs = training_envs(env_id, env_kwargs={"length": 3, "ends": ends})
    first = envs.reset()
    steps = [envs.step(np.array([0])) for _ in range(7)]
    assert first.tolist() == [[0, 0]]
    assert [step.rewards.tolist() for step in steps] == [[1], [2], [3], [1], [2], [3], [1]]
    ended = [[False], [False], [True], [False], [False], [True], [False]]
    assert [getattr(step, ends).tolist() for step in steps] == ended
    seen = [step.observations.tolist()[0] for step in steps]
    assert seen == [[0, 1], [0, 2], [1, 0], [1, 1], [1, 2], [2, 0], [2, 1]]
    led_to = [step.next_observations.tolist()[0] for step in steps]
    assert led_to == [[0, 1], [0, 2], [0, 3], [1, 1], [1, 2], [1, 3], [2, 1]]


def test_observations_and_rewards_are_float32(training_envs):
    # CartPole's rewards and FrozenLake's states are of other types.
    for env_id in ("CartPole-v1", "FrozenLake-v1"):
        envs = training_envs(env_id)
        assert envs.reset().dtype == np.float32
        step = envs.step(np.array([0]))
        assert {step.observations.dtype, step.next_observations.dtype, step.rewards.dtype} == {np.dtype(np.float32)}


# Episode statistics


def test_finished_episodes_come_with_return_and_length(training_envs):
    # Rewards 1 + 2 + 3 in both environments at every third step.
    envs = training_envs("toy/Counter-v0", num_envs=2, env_kwargs={"length": 3})
    envs.reset()
    episodes = [list(envs.step(np.zeros(2, np.int64)).episodes) for _ in range(6)]
    assert episodes == [[], [], [Episode(6.0, 3)] * 2, [], [], [Episode(6.0, 3)] * 2]


def test_episodes_of_environments_that_end_at_different_times_are_kept_apart(training_envs):
    # CartPole rewards every step with 1, so an environment's return and length are the steps since its last end.
    envs = training_envs("CartPole-v1", num_envs=3)
    envs.reset()
    random, lengths, counted, reported = np.random.default_rng(0), np.zeros(3, int), [], []
    for _ in range(200):
        step = envs.step(random_actions(envs, random))
        lengths += 1
        ended = step.terminated | step.truncated
        counted += lengths[ended].tolist()
        lengths[ended] = 0
        reported += step.episodes
    assert len(counted) > 10
    assert reported == [Episode(float(length), length) for length in counted]


# Seeds


def test_environments_start_differently_and_reproducibly(training_envs):
    first, again, other = (training_envs("CartPole-v1", num_envs=3, seed=seed).reset() for seed in (1, 1, 2))
    assert len({tuple(row) for row in first.tolist()}) == 3
    np.testing.assert_array_equal(first, again)
    assert not (first == other).any()


def test_the_index_seeds_the_action_space(tiny_config):
    def samples(index, seed=1):
        env = make_env(tiny_config("sac", "Pendulum-v1", seed=seed), index)
        return [float(env.action_space.sample()[0]) for _ in range(3)]

    assert samples(0) == samples(0)
    assert samples(0) != samples(1)
    assert samples(0) != samples(0, seed=2)


# Discrete observations and offsets


def test_offsets_of_observations_and_actions_go_through_a_whole_environment(training_envs):
    # Naming the state that is seen must always pay.
    kwargs = {"observation_start": 4, "action_start": -1}
    envs = training_envs("toy/Identity-v0", num_envs=2, env_kwargs=kwargs)
    assert envs.observation_spec == ObservationSpec(6)
    assert envs.action_spec == DiscreteActions(6, start=-1)
    observations = envs.reset()
    for _ in range(30):
        assert observations.sum(-1).tolist() == [1, 1]
        step = envs.step(observations.argmax(-1) - 1)
        assert step.rewards.tolist() == [1, 1]
        observations = step.observations
    assert envs.step(np.array([-1, -1])).next_observations.shape == (2, 6)


# What can be used, and what is said of the rest


def test_spaces_are_described_in_plain_numbers():
    observation, actions = describe_spaces(
        spaces.Box(-1, 1, (7,)), spaces.Box(np.float32([-1, 0]), np.float32([3, np.inf])), "x"
    )
    assert observation == ObservationSpec(7)
    assert actions == ContinuousActions(low=(-1.0, 0.0), high=(3.0, math.inf))


VECTOR, CHOICE = spaces.Box(-1, 1, (2,)), spaces.Discrete(2)


@pytest.mark.parametrize("space", [spaces.Text(5), spaces.Dict(word=spaces.Text(5), key=CHOICE)], ids=str)
def test_unsupported_observations_are_refused_in_one_line_that_names_them(space):
    with pytest.raises(UserError) as refusal:
        describe_spaces(space, CHOICE, "My-v0")
    message = str(refusal.value)
    assert message.startswith("My-v0 has observations Text(")
    assert "\n" not in message


@pytest.mark.parametrize("space", [spaces.Box(0, 5, (2,), np.int64), spaces.Dict(a=CHOICE)], ids=str)
def test_unsupported_actions_are_refused_in_one_line_that_names_them(space):
    with pytest.raises(UserError) as refusal:
        describe_spaces(VECTOR, space, "My-v0")
    message = str(refusal.value)
    assert message.startswith(f"My-v0 has actions {type(space).__name__}(")
    assert "\n" not in message


def test_an_unsupported_environment_is_refused_when_it_is_probed():
    with pytest.raises(UserError, match=r"toy/TextObservations-v0 has observations Text"):
        probe_spaces(EnvConfig(id="toy/TextObservations-v0"))


def refusal_of(**settings) -> str:
    with pytest.raises(UserError) as refusal:
        probe_spaces(EnvConfig(**settings))
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


@pytest.mark.parametrize(
    ("typed", "meant"), [("CartPol-v1", "CartPole-v1"), ("CartPole-v9", "CartPole-v1"), ("pendulum-v1", "Pendulum-v1")]
)
def test_an_unknown_id_is_answered_with_the_closest_one(typed, meant):
    message = refusal_of(id=typed)
    assert f"env.id={typed}" in message
    assert f"Did you mean '{meant}'?" in message


def test_an_id_like_no_other_is_answered_with_the_way_to_register_it():
    message = refusal_of(id="Zzyzx-v0")
    assert "env.id=Zzyzx-v0" in message
    assert "env.import_module=" in message


def test_a_retired_version_is_answered_with_its_successor():
    message = refusal_of(id="LunarLander-v2")
    assert "env.id=LunarLander-v2" in message
    assert "v3" in message


def test_an_empty_id_is_refused():
    assert "env.id is empty" in refusal_of(id="")


def test_a_missing_extra_is_named_with_its_pip_line():
    assert "pip install 'rl_training[box2d]'" in refusal_of(id="toy/NeedsPackage-v0", extra="box2d")


def test_a_missing_package_without_an_extra_is_named():
    assert "no_such_engine" in refusal_of(id="toy/NeedsPackage-v0")


def test_import_module_registers_environments(tmp_path, monkeypatch):
    (tmp_path / "my_robots.py").write_text(
        "import gymnasium as gym\ngym.register('mine/Robot-v0', 'gymnasium.envs.classic_control:PendulumEnv')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert "mine/Robot-v0" in refusal_of(id="mine/Robot-v0")
    try:
        observation, _ = probe_spaces(EnvConfig(id="mine/Robot-v0", import_module="my_robots"))
        assert observation == ObservationSpec(3)
    finally:
        gym.registry.pop("mine/Robot-v0", None)


def test_a_module_that_cannot_be_imported_is_named_with_its_key():
    message = refusal_of(id="CartPole-v1", import_module="no_such_module")
    assert "env.import_module=no_such_module" in message


def test_env_kwargs_reach_the_environment(training_envs):
    envs = training_envs("toy/Counter-v0", env_kwargs={"length": 2})
    envs.reset()
    assert [envs.step(np.array([0])).truncated.item() for _ in range(4)] == [False, True, False, True]


def test_unknown_env_kwargs_are_named():
    message = refusal_of(id="toy/Counter-v0", env_kwargs={"lenght": 2})
    assert "env.id=toy/Counter-v0" in message
    assert "lenght" in message


def test_probing_tells_apart_environments_that_differ_only_in_their_arguments():
    def start(number):
        return probe_spaces(EnvConfig(id="toy/Identity-v0", env_kwargs={"action_start": number}))[1].start

    assert [start(0), start(5), start(0)] == [0, 5, 0]


# Snapshots: the same future after a restore

ENVIRONMENTS = [
    "CartPole-v1",
    "Pendulum-v1",
    "FrozenLake-v1",
    max(env_id for env_id in gym.registry if env_id.startswith("Taxi-")),  # v3 or v4, as Gymnasium has it
    "Hopper-v5",
    "LunarLander-v3",
    "toy/InPlaceActions-v0",
]


def reach(envs: TrainingEnvs, moment: str, random: np.random.Generator) -> None:
    """Step to a moment that is worth saving."""
    envs.reset()
    if moment == "at the start":
        return
    if moment == "in the first episode":
        for _ in range(3):
            envs.step(random_actions(envs, random))
        return
    while True:  # until environment 0 has just begun its second episode
        step = envs.step(random_actions(envs, random))
        if step.terminated[0] or step.truncated[0]:
            break
    if moment == "in the second episode":
        for _ in range(4):
            envs.step(random_actions(envs, random))


def assert_same_step(first: EnvStep, second: EnvStep) -> None:
    for name in ("observations", "next_observations", "rewards", "terminated", "truncated"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name), err_msg=name)
    assert first.episodes == second.episodes


MOMENTS = ["at the start", "in the first episode", "after an autoreset", "in the second episode"]


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("env_id", ENVIRONMENTS)
def test_restored_environments_have_the_same_future(training_envs, env_id, moment):
    if env_id == "Hopper-v5":
        pytest.importorskip("mujoco")
    if env_id == "LunarLander-v3":
        pytest.importorskip("Box2D")
    random = np.random.default_rng(3)
    original, restored = training_envs(env_id, num_envs=2), training_envs(env_id, num_envs=2)
    reach(original, moment, random)
    restored.load_state_dict(copy.deepcopy(original.state_dict()))
    assert restored.inexact_reason is None
    np.testing.assert_array_equal(restored.observations, original.observations)
    # Long enough for further episodes, which only the restored generators can begin in the same way.
    for _ in range(210):
        actions = random_actions(original, random)
        assert_same_step(original.step(actions.copy()), restored.step(actions.copy()))


def test_a_restored_environment_can_be_saved_and_restored_again(training_envs):
    random = np.random.default_rng(3)
    original, second, third = (training_envs("CartPole-v1", num_envs=2) for _ in range(3))
    reach(original, "in the second episode", random)
    second.load_state_dict(copy.deepcopy(original.state_dict()))
    for _ in range(2):
        actions = random_actions(original, random)
        original.step(actions)
        second.step(actions)
    third.load_state_dict(copy.deepcopy(second.state_dict()))
    assert third.inexact_reason is None
    for _ in range(100):
        actions = random_actions(original, random)
        assert_same_step(original.step(actions), third.step(actions))


def test_taking_a_snapshot_changes_nothing(training_envs):
    watched, left_alone = training_envs("LunarLander-v3"), training_envs("LunarLander-v3")
    random = np.random.default_rng(0)
    for envs in (watched, left_alone):
        envs.reset()
    for _ in range(100):
        watched.state_dict()
        actions = random_actions(watched, random)
        assert_same_step(watched.step(actions), left_alone.step(actions))


def test_an_environment_with_hidden_state_is_reset_and_the_reason_kept(training_envs):
    # Counter numbers its episodes for as long as it lives, which no replay of the last episode brings back.
    original, restored = training_envs("toy/Counter-v0"), training_envs("toy/Counter-v0")
    original.reset()
    for _ in range(7):
        original.step(np.array([0]))
    assert original.observations.tolist() == [[2, 1]]
    restored.load_state_dict(original.state_dict())
    assert "environment 0" in restored.inexact_reason
    assert "another observation" in restored.inexact_reason
    episode, step = restored.observations[0].tolist()
    assert step == 0
    assert restored.step(np.array([0])).observations.tolist() == [[episode, 1]]


def forge(state: dict, **changes) -> dict:
    """Return a state whose first environment has another snapshot."""
    forged = copy.deepcopy(state)
    forged["environments"][0].update(changes)
    return forged


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"actions": np.ones(40, np.int64), "steps": 40}, "ended early"),
        ({"actions": np.ones(4, np.int64), "steps": 5}, "longer than"),
        ({"actions": np.array([0, 0, 0]), "steps": 3}, "another observation"),
        ({"seed": 12345}, "random numbers"),
    ],
)
def test_a_snapshot_that_leads_elsewhere_resets_only_its_own_environment(training_envs, changes, reason):
    original, restored = training_envs("CartPole-v1", num_envs=2), training_envs("CartPole-v1", num_envs=2)
    original.reset()
    for _ in range(3):
        original.step(np.array([1, 0]))
    restored.load_state_dict(forge(original.state_dict(), **changes))
    assert "environment 0" in restored.inexact_reason
    assert reason in restored.inexact_reason
    assert not np.array_equal(restored.observations[0], original.observations[0])
    np.testing.assert_array_equal(restored.observations[1], original.observations[1])
    for _ in range(5):
        expected, got = original.step(np.array([0, 1])), restored.step(np.array([0, 1]))
        np.testing.assert_array_equal(got.observations[1], expected.observations[1])


def test_an_episode_longer_than_the_recorder_remembers_is_reset(training_envs, monkeypatch):
    monkeypatch.setattr(snapshots, "MAX_RECORDED_STEPS", 5)
    original, restored = training_envs("Pendulum-v1"), training_envs("Pendulum-v1")
    original.reset()
    for steps in range(7):
        restored.inexact_reason = None
        restored.load_state_dict(original.state_dict())
        assert (restored.inexact_reason is None) is (steps <= 5)
        original.step(np.zeros((1, 1), np.float32))
    assert "longer than" in restored.inexact_reason


def test_the_reset_of_an_environment_that_cannot_be_restored_is_reproducible(training_envs):
    original = training_envs("CartPole-v1")
    original.reset()
    for _ in range(3):
        original.step(np.array([1]))
    state = forge(original.state_dict(), seed=12345)
    first, second = training_envs("CartPole-v1"), training_envs("CartPole-v1")
    for envs in (first, second):
        envs.load_state_dict(copy.deepcopy(state))
    np.testing.assert_array_equal(first.observations, second.observations)
    assert_same_step(first.step(np.array([0])), second.step(np.array([0])))


# Environments that fail


@pytest.mark.parametrize("steps_before", [1, 2])  # in the second case environment 0 ends its episode in the failed step
@pytest.mark.parametrize("action", ["raise", "bad shape"])
def test_a_failed_step_names_its_environment_and_leaves_the_state_before_it(training_envs, steps_before, action):
    original, restored, untouched = (training_envs("toy/Failing-v0", num_envs=2) for _ in range(3))
    for envs in (original, untouched):
        envs.reset()
        for _ in range(steps_before):
            envs.step(np.array([0, 0]))
    with pytest.raises(EnvironmentFailure, match=r"toy/Failing-v0 \(environment 1\)"):
        original.step(np.array([0, Failing.ACTIONS.index(action)]))
    restored.load_state_dict(copy.deepcopy(original.state_dict()))
    assert restored.inexact_reason is None
    np.testing.assert_array_equal(restored.observations, untouched.observations)
    for _ in range(8):
        assert_same_step(untouched.step(np.array([0, 0])), restored.step(np.array([0, 0])))


def test_a_restored_environment_that_fails_leaves_the_state_before_it_too(training_envs):
    first, second, third, untouched = (training_envs("toy/Failing-v0", num_envs=2) for _ in range(4))
    for envs in (first, untouched):
        envs.reset()
        for _ in range(7):  # into the third episode
            envs.step(np.array([0, 0]))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    with pytest.raises(EnvironmentFailure):
        second.step(np.array([0, Failing.ACTIONS.index("raise")]))
    third.load_state_dict(copy.deepcopy(second.state_dict()))
    assert third.inexact_reason is None
    for _ in range(8):
        assert_same_step(untouched.step(np.array([0, 0])), third.step(np.array([0, 0])))


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", "MountainCar-v0"])
def test_the_lean_vector_environment_returns_what_gymnasium_returns(tiny_config, env_id):
    algo = "sac" if env_id == "Pendulum-v1" else "ppo"
    config = tiny_config(algo, env_id, env={"num_envs": 3})
    lean = make_vector_env(config)
    makers = [lambda: gym.wrappers.RecordEpisodeStatistics(gym.make(env_id)) for _ in range(3)]
    reference = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)
    lean.reset([1, 2, 3])
    reference.reset(seed=[1, 2, 3])
    reference.action_space.seed(0)
    ends = 0
    for _ in range(450):
        actions = reference.action_space.sample()
        ours, theirs = lean.step(actions), reference.step(actions)
        for mine, expected in zip(ours[:4], theirs[:4], strict=True):
            assert mine.dtype == expected.dtype or (mine.dtype, expected.dtype) == (np.float32, np.float64)  # rewards
            assert np.array_equal(mine, expected.astype(mine.dtype))
        endings, valid = ours[4:]
        assert valid is None
        if "final_obs" not in theirs[4]:
            assert endings is None
            continue
        ends += 1
        mask = theirs[4]["_final_obs"]
        assert endings.indices == np.flatnonzero(mask).tolist()
        assert np.array_equal(endings.observations, np.stack(theirs[4]["final_obs"][mask]))
        statistics = theirs[4]["final_info"]["episode"]
        assert endings.returns == pytest.approx(statistics["r"][mask].tolist(), rel=1e-12)
        assert endings.lengths == statistics["l"][mask].tolist()
    assert ends >= 2


# The shipped groups


@pytest.mark.parametrize(
    ("group", "observation", "actions"),
    [
        ("lunarlander_continuous", 8, 2),
        ("bipedalwalker", 24, 4),
        ("walker2d", 17, 6),
        ("ant", 105, 8),
        ("swimmer", 8, 2),
        ("reacher", 10, 2),
        ("inverted_double_pendulum", 9, 1),
        ("humanoid", 348, 17),
    ],
)
def test_a_continuous_group_makes_its_environment(group, observation, actions):
    pytest.importorskip("Box2D" if group in ("lunarlander_continuous", "bipedalwalker") else "mujoco")
    seen, taken = probe_spaces(make_config("ppo", group).env)
    assert (seen.size, taken.size) == (observation, actions)
