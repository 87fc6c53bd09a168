import copy

import numpy as np
import pytest
import torch

from rl_training.algorithms.dqn import DQNAgent, greedy_next_values, q_loss, td_target
from rl_training.config import DQNConfig, QLoss
from rl_training.data.replay_buffer import Transitions
from rl_training.spaces import DiscreteActions, ObservationSpec


def make_agent(*, count: int = 2, start: int = 0, num_envs: int = 1, seed: int = 0, **settings) -> DQNAgent:
    """A linear agent of one observation: Q(s, a) = weight[a] * s."""
    config = DQNConfig(**{"hidden_sizes": [], "gamma": 0.5, "max_grad_norm": None, **settings})
    return DQNAgent(config, ObservationSpec(1), DiscreteActions(count, start), num_envs=num_envs, seed=seed)


def set_weights(network: torch.nn.Sequential, *weights: float) -> None:
    with torch.no_grad():
        network[0].weight.copy_(torch.tensor(weights).unsqueeze(-1))
        network[0].bias.zero_()


def weights_of(network: torch.nn.Sequential) -> list[float]:
    return network[0].weight.flatten().tolist()


def one_transition(*, reward: float = 1.0, terminated: float = 0.0) -> Transitions:
    return Transitions(
        observations=torch.ones(1, 1),
        actions=torch.tensor([0]),
        rewards=torch.tensor([reward]),
        next_observations=torch.ones(1, 1),
        terminated=torch.tensor([terminated]),
    )


def test_td_target_bootstraps_unless_the_episode_terminated():
    # 1 + 0.9 x 10 = 10 where it goes on (or was only truncated, which is not terminated); 2 where it terminated
    targets = td_target(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 1.0]), torch.tensor([10.0, 10.0]), 0.9)
    assert targets.tolist() == [10.0, 2.0]


def test_plain_q_takes_the_best_target_value():
    assert greedy_next_values(torch.tensor([[1.0, 5.0, 3.0], [7.0, 0.0, 2.0]]), None).tolist() == [5.0, 7.0]


def test_double_q_takes_the_target_value_of_the_online_choice():
    target_q = torch.tensor([[1.0, 5.0, 3.0], [7.0, 0.0, 2.0]])
    online_q = torch.tensor([[9.0, 2.0, 4.0], [0.0, 1.0, 8.0]])  # chooses the first, then the last
    assert greedy_next_values(target_q, online_q).tolist() == [1.0, 2.0]


def test_huber_loss_of_hand_worked_errors():
    # 0.5 x 0.5^2 = 0.125; beyond 1 it is |error| - 0.5: 1.5 and 2.5; mean 4.125 / 3
    loss = q_loss(torch.zeros(3), torch.tensor([0.5, 2.0, -3.0]), QLoss.huber)
    assert loss.item() == pytest.approx(1.375)


def test_mse_loss_of_hand_worked_errors():
    # (0.25 + 4 + 9) / 3
    loss = q_loss(torch.zeros(3), torch.tensor([0.5, 2.0, -3.0]), QLoss.mse)
    assert loss.item() == pytest.approx(4.416667)


@pytest.mark.parametrize(
    ("double_q", "terminated", "expected_loss"),
    [
        (False, 0.0, 1.0),  # target 1 + 0.5 x max(4, 1) = 3, prediction 2
        (True, 0.0, 0.25),  # the online network prefers the second action: 1 + 0.5 x 1 = 1.5
        (False, 1.0, 1.0),  # target 1
        (True, 1.0, 1.0),
    ],
)
def test_update_minimises_the_error_to_a_hand_worked_target(double_q, terminated, expected_loss):
    agent = make_agent(double_q=double_q, loss="mse")
    set_weights(agent.q_network, 2.0, 3.0)
    set_weights(agent.target_network, 4.0, 1.0)
    metrics = agent.update(one_transition(terminated=terminated))
    assert metrics["loss/value"].item() == pytest.approx(expected_loss)
    assert metrics["policy/q_value"].item() == 2.0


@pytest.mark.parametrize(("reward", "direction"), [(10.0, 1), (-10.0, -1)])
def test_update_moves_the_value_of_the_action_taken_and_no_other(reward, direction):
    agent = make_agent(learning_rate=0.1)
    set_weights(agent.q_network, 2.0, 3.0)
    agent.update(one_transition(reward=reward, terminated=1.0))
    # Adam's first step is the learning rate.
    assert weights_of(agent.q_network) == pytest.approx([2.0 + 0.1 * direction, 3.0])


def test_update_returns_detached_scalars_and_leaves_its_batch_alone():
    batch = one_transition()
    copies = copy.deepcopy(batch)
    metrics = make_agent().update(batch)
    assert set(metrics) == {"loss/value", "policy/q_value", "loss/gradient_norm"}
    assert all(value.shape == () and not value.requires_grad for value in metrics.values())
    assert all(torch.equal(value, kept) for value, kept in zip(batch[:5], copies[:5], strict=True))


def test_the_target_network_starts_equal_and_does_not_move_in_updates():
    agent = make_agent(learning_rate=0.1, hidden_sizes=[8])
    start = copy.deepcopy(agent.q_network.state_dict())
    for _ in range(3):
        agent.update(one_transition())
    target = agent.target_network.state_dict()
    assert all(torch.equal(target[name], start[name]) for name in start)
    assert any(not torch.equal(value, start[name]) for name, value in agent.q_network.state_dict().items())


@pytest.mark.parametrize(("rate", "once", "twice"), [(1.0, [8.0, -4.0], [8.0, -4.0]), (0.5, [4.0, -2.0], [6.0, -3.0])])
def test_update_target_goes_the_given_share_of_the_way(rate, once, twice):
    agent = make_agent(target_update_rate=rate)
    set_weights(agent.q_network, 8.0, -4.0)
    set_weights(agent.target_network, 0.0, 0.0)
    agent.update_target()
    assert weights_of(agent.target_network) == once
    agent.update_target()
    assert weights_of(agent.target_network) == twice
    assert weights_of(agent.q_network) == [8.0, -4.0]


def test_the_target_is_a_copy_and_not_the_network_itself():
    agent = make_agent(target_update_rate=1.0)
    agent.update_target()
    set_weights(agent.q_network, 5.0, 5.0)
    assert weights_of(agent.target_network) != [5.0, 5.0]


@pytest.mark.parametrize(
    ("epsilon", "expected"),
    [
        (0.0, [0.0, 0.0, 0.0, 1.0]),
        (0.4, [0.1, 0.1, 0.1, 0.7]),  # 0.4 spread over four actions, the rest on the best
        (1.0, [0.25, 0.25, 0.25, 0.25]),
    ],
)
def test_explore_takes_random_actions_as_often_as_epsilon_says(epsilon, expected):
    agent = make_agent(count=4, num_envs=2)
    set_weights(agent.q_network, 0.0, 1.0, 2.0, 3.0)
    observations = np.ones((2, 1), np.float32)
    actions = np.stack([agent.explore(observations, step, epsilon) for step in range(5_000)])
    for column in actions.T:
        # Five standard deviations of a frequency in 5,000 are at most 0.035.
        np.testing.assert_allclose(np.bincount(column, minlength=4) / 5_000, expected, atol=0.035)
        if epsilon == 0.0:
            assert (column == 3).all()


def test_environments_explore_independently():
    agent = make_agent(count=4, num_envs=2)
    actions = np.stack([agent.explore(np.ones((2, 1), np.float32), step, 1.0) for step in range(2_000)])
    assert (actions[:, 0] == actions[:, 1]).mean() == pytest.approx(0.25, abs=0.05)


def test_exploration_follows_the_seed():
    def actions(seed):
        agent = make_agent(count=4, seed=seed)
        return [int(agent.explore(np.ones((1, 1), np.float32), step, 1.0)[0]) for step in range(50)]

    assert actions(1) == actions(1)
    assert actions(1) != actions(2)


def test_actions_are_shifted_to_the_first_number_of_the_environment_only_for_stepping():
    agent = make_agent(count=3, start=5)
    set_weights(agent.q_network, 0.0, 1.0, 0.0)
    observations = np.ones((1, 1), np.float32)
    assert agent.env_actions(np.array([0, 1, 2])).tolist() == [5, 6, 7]
    assert agent.act(observations).tolist() == [6]
    assert agent.explore(observations, 0, 0.0).tolist() == [1]


def test_updates_after_a_state_dict_round_trip_are_bit_equal():
    first, second = make_agent(hidden_sizes=[8]), make_agent(hidden_sizes=[8], seed=1)
    first.update(one_transition())
    first.update_target()
    first.update(one_transition())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for agent in (first, second):
        agent.update(one_transition(reward=-3.0))
    for part in ("q_network", "target_network"):
        expected, got = first.state_dict()[part], second.state_dict()[part]
        assert all(torch.equal(expected[name], got[name]) for name in expected)


def test_the_seed_decides_the_first_weights_and_leaves_the_global_generator_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    assert weights_of(make_agent(seed=1).q_network) == weights_of(make_agent(seed=1).q_network)
    assert weights_of(make_agent(seed=1).q_network) != weights_of(make_agent(seed=2).q_network)
    assert torch.equal(torch.get_rng_state(), before)
