"""Environments that step all at once and reset late: the same transitions, targets and statistics as where each resets
in the step that ends its episode, and nothing from the steps in between.
"""

import copy

import numpy as np
import pytest
import torch
from cli_helpers import differences, run_card, run_train, tiny_env, tiny_run_config
from specs import CHOICE

from rl_training.algorithms.ppo import PPOAgent, approximate_kl, clipped_policy_loss, mean_of, standardized, value_loss
from rl_training.config import EnvConfig, PPOConfig
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.data.rollout_buffer import RolloutBatch, RolloutBuffer
from rl_training.envs.normalization import Normalizer
from rl_training.envs.training_envs import TrainingEnvs
from rl_training.errors import EnvironmentFailure, UserError
from rl_training.experiment import registry
from rl_training.runtime.comparison import first_difference
from rl_training.runtime.workflows import load_run_config, resume_training
from rl_training.spaces import DiscreteActions, ObservationSpec

NUM_ENVS = 3
GAMMA, LAMBDA = 0.9, 0.8
# What environment i does in its k-th transition.
ACTIONS = np.random.default_rng(0).integers(2, size=(NUM_ENVS, 200))


@pytest.fixture
def training_envs(tiny_config):
    """Return a function that makes training environments, closed after the test."""
    made = []

    def make(how, env_id="toy/Climb-v0", num_envs=NUM_ENVS, **env):
        env = {"num_envs": num_envs, "vectorization": how, **env}
        made.append(TrainingEnvs(tiny_config("ppo", env_id, env=env)))
        return made[-1]

    yield make
    for envs in made:
        envs.close()


def played(envs, count):
    """Step `count` times; yields (observations, actions, step), where what an environment does depends on its own
    number of transitions alone.
    """
    observations, done = envs.reset(), np.zeros(envs.num_envs, int)
    ended = np.zeros(envs.num_envs, bool)
    for _ in range(count):
        actions = np.where(ended, 1, ACTIONS[np.arange(envs.num_envs), done])
        step = envs.step(actions)
        valid = np.ones(envs.num_envs, bool) if step.valid is None else step.valid
        done += valid
        ended = (step.terminated | step.truncated) if envs.late_resets else ended
        yield observations, actions, step, valid
        observations = step.observations


def transitions(envs, count):
    """Return the transitions of each environment, and its episodes in order."""
    found = [[] for _ in range(envs.num_envs)]
    episodes = []
    for observations, actions, step, valid in played(envs, count):
        for env in np.flatnonzero(valid):
            ends = bool(step.terminated[env]), bool(step.truncated[env])
            following = step.next_observations[env].tolist()
            found[env].append(
                (observations[env].tolist(), int(actions[env]), float(step.rewards[env]), following, ends)
            )
        episodes += step.episodes
    return found, episodes


# Transitions and episodes


def test_the_transitions_are_those_of_environments_that_reset_at_once(training_envs):
    expected, _ = transitions(training_envs("sync"), 60)
    found, _ = transitions(training_envs("vector"), 60)
    for one, other in zip(expected, found, strict=True):
        assert len(one) == 60
        assert 40 < len(other) < 60
        assert other == one[: len(other)]
    kinds = {ends for transitions in found for *_, ends in transitions}
    assert kinds == {(False, False), (True, False), (False, True), (True, True)}


def test_hand_worked_steps(training_envs):
    # Always a whole step up from 0: heights 1, 2 and 3, where it ends; then the first observation, 0.125.
    envs = training_envs("vector", num_envs=1)
    assert envs.reset().tolist() == [[0, 0]]
    steps = [envs.step(np.array([1])) for _ in range(5)]
    assert [step.observations.tolist()[0] for step in steps] == [[1, 1], [2, 2], [3, 3], [0.125, 0], [1.125, 1]]
    assert [step.next_observations.tolist()[0] for step in steps[:3]] == [[1, 1], [2, 2], [3, 3]]
    assert [step.valid.tolist() for step in steps] == [[True], [True], [True], [False], [True]]
    assert [step.rewards.tolist() for step in steps] == [[1], [2], [3], [0], [1.125]]
    assert [list(step.episodes) for step in steps[:2] + steps[3:]] == [[], [], [], []]
    (episode,) = steps[2].episodes
    assert (episode.episode_return, episode.length) == (6.0, 3)


def test_the_episodes_are_those_of_environments_that_reset_at_once(training_envs):
    _, expected = transitions(training_envs("sync", num_envs=1), 100)
    _, found = transitions(training_envs("vector", num_envs=1), 100)
    assert len(found) > 15
    assert found == expected[: len(found)]


@pytest.mark.parametrize("how", ["sync", "vector"])
def test_cartpole_pays_one_for_each_step_of_an_episode(training_envs, how):
    envs = training_envs(how, "CartPole-v1", num_envs=64)
    envs.reset()
    random = np.random.default_rng(0)
    episodes = [episode for _ in range(300) for episode in envs.step(random.integers(2, size=64)).episodes]
    assert len(episodes) > 500
    assert all(episode.episode_return == episode.length for episode in episodes)
    assert np.mean([episode.length for episode in episodes]) == pytest.approx(22, abs=2)


# PPO: advantages and returns


def filled_rollout(envs, count):
    rollout = RolloutBuffer(count, envs.num_envs, ObservationSpec(2), CHOICE, seed=0, masked=envs.late_resets)
    for observations, actions, step, _ in played(envs, count):
        rollout.add(
            observations, actions, step.rewards, step.terminated, step.truncated, step.next_observations, step.valid
        )
    value = torch.tensor([0.7, -0.3])
    rollout.values = rollout.obs @ value
    rollout.compute_returns_and_advantages(
        torch.from_numpy(envs.observations) @ value, GAMMA, LAMBDA, rollout.truncated_observations() @ value
    )
    return rollout


def complete_episodes(rollout, env):
    """Return (advantages, returns) of the transitions in an environment's episodes that end inside the rollout."""
    valid = torch.ones_like(rollout.dones, dtype=torch.bool) if rollout.valid is None else rollout.valid
    last = int(rollout.dones[:, env].nonzero()[-1]) + 1
    kept = valid[:last, env]
    return rollout.advantages[:last, env][kept], rollout.returns[:last, env][kept]


def test_advantages_and_returns_are_those_of_environments_that_reset_at_once(training_envs):
    expected, found = filled_rollout(training_envs("sync"), 60), filled_rollout(training_envs("vector"), 60)
    assert not found.valid.all()
    for env in range(NUM_ENVS):
        for one, other in zip(complete_episodes(expected, env), complete_episodes(found, env), strict=True):
            assert len(other) > 30
            assert differences(one[: len(other)], other) == []


def test_a_rollout_with_a_mask_is_saved_and_taken_back(training_envs):
    rollout = filled_rollout(training_envs("vector"), 20)
    other = RolloutBuffer(20, NUM_ENVS, ObservationSpec(2), CHOICE, seed=9, masked=True)
    other.load_state_dict(copy.deepcopy(rollout.state_dict()))
    assert torch.equal(other.valid, rollout.valid)
    assert differences(other.state_dict(), rollout.state_dict()) == []


def test_minibatches_carry_the_mask_of_their_rows(training_envs):
    rollout = filled_rollout(training_envs("vector"), 20)
    rollout.rewards[~rollout.valid] = torch.nan
    rollout.logprobs = rollout.valid.float()  # to recognise them by
    batches = list(rollout.iter_minibatches(25))
    assert sum(len(batch.valid) for batch in batches) == 60
    assert all(torch.equal(batch.valid, batch.log_probs == 1.0) for batch in batches)


# PPO: losses


VALID = torch.tensor([True, False, True, True, False])
NUMBERS = torch.tensor([1.0, 50.0, 2.0, 6.0, -70.0])


def test_means_and_losses_of_hand_worked_rows():
    assert mean_of(NUMBERS, VALID).item() == 3.0
    assert mean_of(NUMBERS, torch.zeros(5, dtype=torch.bool)).item() == 0.0
    # deviations -2, -1, 3: variance 14/3
    expected = torch.tensor([-2.0, -1.0, 3.0]) / (14 / 3) ** 0.5
    assert torch.allclose(standardized(NUMBERS, VALID)[VALID], expected)
    assert value_loss(NUMBERS, NUMBERS, torch.zeros(5), None, VALID).item() == pytest.approx((1 + 4 + 36) / 3)
    log_ratio = torch.where(VALID, 0.0, 9.0)
    assert clipped_policy_loss(log_ratio, NUMBERS, 0.2, VALID).item() == -3.0
    assert approximate_kl(log_ratio, VALID).item() == 0.0


@pytest.mark.parametrize(
    "settings", [{}, {"value_clip_range": 0.2, "entropy_coef": 0.01}, {"normalize_advantage": False}]
)
def test_an_update_with_a_mask_is_an_update_without_the_masked_rows(settings):
    random = torch.Generator().manual_seed(0)
    valid = torch.rand(64, generator=random) > 0.3
    columns = [torch.randn(64, 2, generator=random), torch.randint(2, (64,), generator=random)]
    columns += [torch.randn(64, generator=random) for _ in range(4)]
    columns[2] = columns[2] - 3.0  # log-probabilities
    spoiled = [column.clone() for column in columns]
    for column in (spoiled[3], spoiled[4], spoiled[5]):
        column[~valid] = 1e6
    spoiled[2][~valid] = -1e3  # a ratio that overflows
    agents = []
    for batch in (RolloutBatch(*(column[valid] for column in columns)), RolloutBatch(*spoiled, valid)):
        agent = PPOAgent(PPOConfig(hidden_sizes=[16], **settings), ObservationSpec(2), DiscreteActions(2), seed=3)
        metrics = agent.update(batch, clip_range=0.2, learning_rate=1e-2)
        agents.append((agent, {name: value.item() for name, value in metrics.items()}))
    (one, expected), (other, found) = agents
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
    for name, parameter in one.network.state_dict().items():
        assert torch.allclose(parameter, other.network.state_dict()[name], atol=1e-5), name


# Replay


def filled_replay(envs, count, **settings):
    replay = ReplayBuffer(1_000, envs.num_envs, ObservationSpec(2), CHOICE, seed=0, masked=envs.late_resets, **settings)
    for observations, actions, step, _ in played(envs, count):
        replay.add(
            *(observations, actions, step.rewards, step.next_observations, step.terminated, step.truncated, step.valid)
        )
    return replay


def samples(replay, count=4_000):
    batch = replay.sample(count)
    columns = [batch.observations, batch.actions, batch.rewards, batch.next_observations, batch.terminated]
    columns += [] if batch.discounts is None else [batch.discounts]
    return {str([column[row].tolist() for column in columns]) for row in range(count)}


@pytest.mark.parametrize("settings", [{}, {"priority_exponent": 0.6}, {"n_step": 3, "gamma": 0.9}], ids=str)
def test_what_is_sampled_are_the_transitions_of_environments_that_reset_at_once(training_envs, settings):
    # Both play the same episodes to their ends: 20 of one environment. n-step returns never cross an end.
    count = {}
    for how in ("sync", "vector"):
        envs = training_envs(how, num_envs=1)
        ends = np.cumsum([len(step.episodes) for *_, step, _ in played(envs, 150)])
        count[how] = int(np.searchsorted(ends, 20)) + 1
    found = {how: samples(filled_replay(training_envs(how, num_envs=1), count[how], **settings)) for how in count}
    assert count["vector"] == count["sync"] + 19
    assert len(found["sync"]) > 50
    assert found["vector"] == found["sync"]


def test_every_transition_is_equally_likely_and_a_masked_row_is_never_drawn():
    replay = ReplayBuffer(10, 2, ObservationSpec(1), CHOICE, seed=0, masked=True)
    for step in range(5):
        numbers = np.array([[2 * step], [2 * step + 1]], np.float32)
        valid = np.array([step != 2, True])
        replay.add(numbers, np.zeros(2, int), numbers[:, 0], numbers, np.zeros(2, bool), np.zeros(2, bool), valid)
    drawn = replay.sample(90_000).rewards.numpy().astype(int)
    counts = np.bincount(drawn, minlength=10)
    assert counts[4] == 0
    assert np.abs(np.delete(counts, 4) - 10_000).max() < 500  # 5 standard deviations


def test_stacks_of_frames_begin_anew_after_a_masked_row():
    # Frames are numbered; the episode ends with frame 2, the row after it leads to frame 10, the first of the next.
    spec = ObservationSpec(0, ((2, 1, 1),), frame_stack=2)
    replay = ReplayBuffer(20, 1, spec, CHOICE, seed=0, masked=True)
    stacks = [([0, 0], [0, 1]), ([0, 1], [1, 2]), ([1, 2], [10, 10]), ([10, 10], [10, 11]), ([10, 11], [11, 12])]
    for row, (before, after) in enumerate(stacks):
        terminated, valid = np.array([row == 1]), np.array([row != 2])
        observations, following = np.array([before], np.uint8), np.array([after], np.uint8)
        nothing = np.zeros(1, bool)
        replay.add(observations, np.zeros(1, int), np.zeros(1, np.float32), following, terminated, nothing, valid)
    batch = replay.sample(200)
    assert {tuple(row) for row in batch.observations.tolist()} == {(0, 0), (0, 1), (10, 10), (10, 11)}
    kept = batch.terminated == 0.0
    pairs = {
        (*one, *other)
        for one, other in zip(batch.observations[kept].tolist(), batch.next_observations[kept].tolist(), strict=True)
    }
    assert pairs == {(0, 0, 0, 1), (10, 10, 10, 11), (10, 11, 11, 12)}


def test_a_buffer_in_which_every_row_could_be_masked_is_refused():
    with pytest.raises(UserError, match=r"algo\.buffer_size=5 is too small .* at least 6\."):
        ReplayBuffer(5, 3, ObservationSpec(1), CHOICE, seed=0, masked=True)


# Normalisation


def test_the_normaliser_takes_in_what_it_does_where_environments_reset_at_once(training_envs):
    statistics = {}
    for how in ("sync", "vector"):
        envs = training_envs(how, num_envs=1)
        config = EnvConfig(id="x", num_envs=1, normalize_observation=True, normalize_reward=True)
        normalizer, episodes = Normalizer(config, 2, GAMMA), 0
        for number, (observations, _, step, valid) in enumerate(played(envs, 200)):
            if number == 0:
                normalizer.update(observations)
            if episodes == 20 and how == "sync":
                break
            if episodes == 20 and not valid[0]:  # takes in the first observation after the last episode
                normalizer.update(step.observations, step.rewards, step.terminated, step.truncated, valid=step.valid)
                break
            normalizer.update(step.observations, step.rewards, step.terminated, step.truncated, valid=step.valid)
            episodes += len(step.episodes)
        statistics[how] = normalizer.state_dict()
    for part in ("observations", "returns"):
        one, other = statistics["sync"][part], statistics["vector"][part]
        assert one["count"] == other["count"]
        np.testing.assert_allclose(other["mean"], one["mean"], rtol=1e-9)
        np.testing.assert_allclose(other["variance"], one["variance"], rtol=1e-9)
    assert statistics["vector"]["discounted_returns"] == statistics["sync"]["discounted_returns"] == 0.0


# Resume


@pytest.mark.parametrize("env_id", ["CartPole-v1", "toy/Climb-v0"])
def test_a_vector_environment_is_restored_with_every_bit(training_envs, env_id):
    original, restored = (training_envs("vector", env_id, num_envs=16) for _ in range(2))
    original.reset()
    random = np.random.default_rng(0)
    for _ in range(77):
        original.step(random.integers(2, size=16))
    restored.load_state_dict(copy.deepcopy(original.state_dict()))
    assert (restored.restarted, restored.inexact_reason) == ([], None)
    for _ in range(100):
        actions = random.integers(2, size=16)
        one, other = original.step(actions), restored.step(actions)
        for name in ("observations", "rewards", "terminated", "truncated", "valid"):
            assert differences(getattr(one, name), getattr(other, name)) == []
        assert one.episodes == other.episodes
    assert differences(original.state_dict(), restored.state_dict()) == []


@pytest.mark.parametrize(
    ("oddity", "reason"),
    [
        ("object", "its attribute simulator of type object cannot be saved"),
        ("shared memory", "its attributes state and heights share memory"),
    ],
)
def test_one_that_cannot_be_restored_says_why_and_starts_anew(training_envs, oddity, reason):
    original, restored = (training_envs("vector", env_kwargs={"oddity": oddity}) for _ in range(2))
    original.reset()
    original.step(np.ones(NUM_ENVS, int))
    restored.load_state_dict(copy.deepcopy(original.state_dict()))
    assert restored.restarted == [0, 1, 2]
    assert sorted(restored.inexact_reason.split("because ")[1].split()) == sorted(reason.split())
    assert restored.observations[:, 1].tolist() == [0, 0, 0]
    assert restored.step(np.ones(NUM_ENVS, int)).valid.all()


def test_one_that_fails_is_named_and_starts_anew_on_resume(training_envs):
    envs, restored = (training_envs("vector", env_kwargs={"oddity": "raise"}) for _ in range(2))
    envs.reset()
    for _ in range(3):
        envs.step(np.zeros(NUM_ENVS, int))
    with pytest.raises(EnvironmentFailure, match=r"toy/Climb-v0 failed in step: RuntimeError: the simulator broke"):
        envs.step(np.zeros(NUM_ENVS, int))
    restored.load_state_dict(copy.deepcopy(envs.state_dict()))
    assert "because it failed in the middle of a step" in restored.inexact_reason


@pytest.mark.parametrize("algo", ["ppo", "dqn"])
def test_a_run_is_resumed_with_every_bit(algo, tmp_path):
    def train(run_dir, **settings):
        env = tiny_env(algo, num_envs=8, vectorization="vector", normalize_observation=True, normalize_reward=True)
        config = tiny_run_config(algo, env=env, total_timesteps=2_048, **settings)
        return registry.get(algo).load_train()(config, run_dir=run_dir)

    train(tmp_path / "straight")
    train(tmp_path / "stopped", stop_at_step=1_000)
    resume_training(tmp_path / "stopped")
    assert first_difference(tmp_path / "straight", tmp_path / "stopped") is None
    card = run_card(tmp_path / "stopped")
    assert (card["exact"], card["vectorization"]) == (True, "vector")
    assert load_run_config(tmp_path / "stopped").env.vectorization.name == "vector"


# What is refused


def test_an_environment_without_a_vectorised_version_is_refused_in_one_line(tmp_path):
    result = run_train("algo=ppo", "env=gym", "env.id=Acrobot-v1", "env.vectorization=vector", cwd=tmp_path)
    assert result.returncode == 1
    assert result.stderr == (
        "error: Acrobot-v1 has no vectorised version in Gymnasium. Use env.vectorization=sync, or async if "
        "it is slow.\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_vectorised_version_of_another_task_is_refused(training_envs):
    with pytest.raises(UserError, match=r"toy/Climb-v0 has other spaces than the environment itself"):
        training_envs("vector", env_kwargs={"oddity": "other spaces"})


def test_stacked_frames_are_refused(training_envs):
    wrappers = [{"name": "time_limit", "steps": 5}]
    with pytest.raises(UserError, match=r"env\.wrappers do not go with env\.vectorization=vector"):
        training_envs("vector", "CartPole-v1", wrappers=wrappers)
    with pytest.raises(UserError, match=r"env\.frame_stack=2 does not go with env\.vectorization=vector"):
        training_envs("vector", "CartPole-v1", frame_stack=2)
