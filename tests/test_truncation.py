"""A time limit is not an end: where only a time limit ends episodes, a reward of 1 forever is worth 1 / (1 - gamma).

Each algorithm learns that value through its whole trainer. The negative control is the same environment with a true
end: a learner that confused the two would find that value in both.
"""

import numpy as np
import pytest
import torch
from specs import CHOICE

from rl_training.api.algorithms import train_dqn, train_ppo, train_sac
from rl_training.data.rollout_buffer import RolloutBuffer
from rl_training.runtime.callbacks import Callback
from rl_training.spaces import ObservationSpec

# gamma 0.9, episodes of 5 steps. Truncated: V = 1 + 0.9 V = 10. Terminated: one step in five has no future, and the
# learner does not see which, so on average V = 1 + 0.9 x 4/5 V = 1 / 0.28.
TRUNCATED_VALUE, TERMINATED_VALUE = 10.0, 3.571

EXPECTED = pytest.mark.parametrize(
    ("ends", "expected"), [("truncated", TRUNCATED_VALUE), ("terminated", TERMINATED_VALUE)]
)
STATE = torch.ones(1, 1)


class KeepAgent(Callback):
    """Holds on to the trained agent."""

    def on_train_end(self, state, result):
        self.agent = state.agent


@pytest.fixture
def trained(tiny_config, tmp_path):
    """Return a function that trains on ConstantReward and returns the agent."""

    def train(train_function, algo, ends, *, total_timesteps, continuous=False, **algo_settings):
        config = tiny_config(
            algo,
            "toy/ConstantReward-v0",
            env={"env_kwargs": {"ends": ends, "length": 5, "continuous": continuous}},
            algo={"gamma": 0.9, "hidden_sizes": [], **algo_settings},
            eval={"episodes": 0},
            total_timesteps=total_timesteps,
        )
        keep = KeepAgent()
        train_function(config, run_dir=tmp_path, callbacks=[keep])
        return keep.agent

    return train


@EXPECTED
@pytest.mark.parametrize("num_steps", [50, 48])  # rollouts that end with the episode, and in the middle of one
def test_ppo_values_a_truncated_state_by_its_future_and_a_terminated_one_by_nothing(trained, ends, expected, num_steps):
    agent = trained(
        train_ppo,
        "ppo",
        ends,
        total_timesteps=num_steps * 120,
        num_steps=num_steps,
        minibatch_size=num_steps,
        num_epochs=10,
        gae_lambda=0.0,
        learning_rate=0.02,
        max_grad_norm=None,
        value_coef=1.0,
    )
    assert agent.values(STATE).item() == pytest.approx(expected, abs=0.3)


@EXPECTED
@pytest.mark.parametrize("double_q", [True, False])
def test_dqn_values_a_truncated_state_by_its_future_and_a_terminated_one_by_nothing(trained, ends, expected, double_q):
    agent = trained(
        train_dqn,
        "dqn",
        ends,
        total_timesteps=1_500,
        train_every=1,
        target_update_every=10,
        learning_rate=0.02,
        batch_size=128,
        double_q=double_q,
        loss="mse",
    )
    with torch.no_grad():
        value = agent.q_network(STATE).max().item()
    assert value == pytest.approx(expected, abs=0.4)


@EXPECTED
def test_sac_values_a_truncated_state_by_its_future_and_a_terminated_one_by_nothing(trained, ends, expected):
    # A tiny fixed temperature leaves the rewards alone to count.
    agent = trained(
        train_sac,
        "sac",
        ends,
        total_timesteps=1_500,
        continuous=True,
        learning_rate=0.02,
        batch_size=128,
        target_update_rate=0.1,
        learn_temperature=False,
        temperature=1e-6,
    )
    with torch.no_grad():
        value = torch.minimum(*agent.critics(STATE, torch.zeros(1, 1))).item()
    assert value == pytest.approx(expected, abs=0.4)


def test_the_same_truncated_rollout_has_another_value_if_its_end_counts_as_nothing():
    # Reward 1, all values at their true 10, gamma 0.9: with the bootstrap every advantage is 1 + 9 - 10 = 0. Without,
    # the last step's is 1 - 10 = -9: the critic would be pulled away from the truth.
    rollout = RolloutBuffer(5, 1, ObservationSpec(1), CHOICE, seed=0)
    state, action, reward = np.ones((1, 1), np.float32), np.array([0]), np.ones(1, np.float32)
    for step in range(5):
        rollout.add(state, action, reward, np.array([False]), np.array([step == 4]), state)
    rollout.values = torch.full((5, 1), 10.0)
    last = torch.tensor([10.0])

    rollout.compute_returns_and_advantages(last, 0.9, 0.0, truncated_values=torch.tensor([10.0]))
    torch.testing.assert_close(rollout.advantages.flatten(), torch.zeros(5))
    rollout.compute_returns_and_advantages(last, 0.9, 0.0, truncated_values=None)
    torch.testing.assert_close(rollout.advantages.flatten(), torch.tensor([0.0, 0.0, 0.0, 0.0, -9.0]))
