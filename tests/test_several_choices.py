"""PPO with several choices in each action: MultiDiscrete and MultiBinary."""

import math

import numpy as np
import pytest
import torch

from rl_training.algorithms.ppo import PPOAgent
from rl_training.config import PPOConfig
from rl_training.data.rollout_buffer import RolloutBuffer
from rl_training.runtime.ppo_trainer import update_epochs
from rl_training.spaces import MultiDiscreteActions, ObservationSpec

COUNTS = (2, 3)


def make_agent(counts: tuple[int, ...] = COUNTS, *, num_envs: int = 1, **settings) -> PPOAgent:
    config = PPOConfig(**{"hidden_sizes": [], "learning_rate": 1e-2, **settings})
    return PPOAgent(config, ObservationSpec(1), MultiDiscreteActions(counts), num_envs=num_envs, seed=0)


def set_logits(agent: PPOAgent, logits: list[float]) -> None:
    with torch.no_grad():
        agent.network.actor_head.weight.zero_()
        agent.network.actor_head.bias.copy_(torch.tensor(logits))


@pytest.mark.parametrize("counts", [(2, 3), (4,), (2, 2, 2), (1, 5)], ids=str)
def test_every_choice_stays_within_its_own_range(counts):
    agent = make_agent(counts, num_envs=50)
    observations = np.ones((50, 1), np.float32)
    explored = np.concatenate([agent.explore(observations, step) for step in range(20)])
    assert explored.shape == (1_000, len(counts))
    assert explored.dtype == np.int64
    # The first policy is almost uniform: a thousand draws of at most five miss none.
    assert [sorted(set(column.tolist())) for column in explored.T] == [list(range(count)) for count in counts]
    assert agent.act(observations).shape == (50, len(counts))


def test_acting_takes_the_likeliest_alternative_of_each_choice():
    agent = make_agent(num_envs=2)
    set_logits(agent, [5.0, 6.0, 1.0, 3.0, 2.0])
    assert agent.act(np.zeros((2, 1), np.float32)).tolist() == [[1, 1], [1, 1]]
    set_logits(agent, [7.0, 6.0, 1.0, 3.0, 4.0])
    assert agent.act(np.zeros((2, 1), np.float32)).tolist() == [[0, 2], [0, 2]]


def test_exploring_follows_the_probabilities_of_each_choice():
    # softmax: (1/4, 3/4) and (1/2, 1/3, 1/6), independent of each other
    agent = make_agent(num_envs=100)
    set_logits(agent, [0.0, math.log(3), math.log(3), math.log(2), 0.0])
    observations = np.zeros((100, 1), np.float32)
    explored = np.concatenate([agent.explore(observations, step) for step in range(200)])
    joint = np.bincount(3 * explored[:, 0] + explored[:, 1], minlength=6) / len(explored)
    # Five standard deviations of a frequency in 20,000 are at most 0.018.
    expected = [1 / 8, 1 / 12, 1 / 24, 3 / 8, 1 / 4, 1 / 8]
    np.testing.assert_allclose(joint, expected, atol=0.018)


def test_log_probs_of_a_rollout_are_sums_over_the_choices():
    # ln 1/4 + ln 1/2 = -2.079442; ln 3/4 + ln 1/6 = -2.079442; ln 3/4 + ln 1/2 = -0.980829
    agent = make_agent()
    set_logits(agent, [0.0, math.log(3), math.log(3), math.log(2), 0.0])
    log_probs = agent.log_probs(torch.zeros(3, 1), torch.tensor([[0, 0], [1, 2], [1, 0]]))
    torch.testing.assert_close(log_probs, torch.tensor([-2.079442, -2.079442, -0.980829]))


def test_the_environment_gets_the_choices_as_they_are():
    chosen = np.array([[1, 2]])
    assert make_agent().env_actions(chosen) is chosen


def test_a_rollout_of_several_choices_is_learned_from_and_comes_back():
    # Reward 1 for (1, 2) and 0 for all else: its probability rises.
    agent = make_agent(num_envs=4, num_steps=64, minibatch_size=64, num_epochs=4)
    rollout = RolloutBuffer(64, 4, ObservationSpec(1), MultiDiscreteActions(COUNTS), seed=0)
    observations, no = np.ones((4, 1), np.float32), np.zeros(4, np.bool_)
    one, wanted = torch.ones(1, 1), torch.tensor([[1, 2]])
    before = agent.log_probs(one, wanted).item()
    for step in range(64):
        actions = agent.explore(observations, step)
        rewards = (actions == [1, 2]).all(-1).astype(np.float32)
        rollout.add(observations, actions, rewards, ~no, no, observations)
    assert rollout.actions.shape == (64, 4, 2)
    restored = RolloutBuffer(64, 4, ObservationSpec(1), MultiDiscreteActions(COUNTS), seed=1)
    restored.load_state_dict(rollout.state_dict())
    assert torch.equal(restored.actions, rollout.actions)
    for batch in rollout.iter_minibatches(100):
        assert batch.actions.shape == (len(batch.observations), 2)
    update_epochs(agent, rollout, torch.ones(4, 1), clip_range=0.2, learning_rate=1e-2)
    assert agent.log_probs(one, wanted).item() > before + 0.05
