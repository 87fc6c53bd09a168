"""Dueling networks: a value of the state, advantages of the actions, and their sum."""

import copy

import numpy as np
import pytest
import torch
from test_dqn_update import one_transition

from rl_training.algorithms.dqn import DQNAgent
from rl_training.config import Activation, DQNConfig
from rl_training.networks.dueling import DuelingNetwork
from rl_training.networks.mlp import body_output_size, mlp_body
from rl_training.spaces import DiscreteActions, ObservationSpec


def dueling(inputs, hidden_sizes, actions, activation):
    return DuelingNetwork(mlp_body(inputs, hidden_sizes, activation), body_output_size(inputs, hidden_sizes), actions)


def set_layer(layer: torch.nn.Linear, weight: list[list[float]], bias: list[float]) -> None:
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(weight))
        layer.bias.copy_(torch.tensor(bias))


def linear_network(actions: int = 3) -> DuelingNetwork:
    """No hidden layers: V(s) = 3 s + 1, and A(s, .) = s, 2 s, 6 s."""
    network = dueling(1, [], actions, Activation.tanh)
    set_layer(network.value_head, [[3.0]], [1.0])
    set_layer(network.advantage_head, [[1.0], [2.0], [6.0]], [0.0, 0.0, 0.0])
    return network


def make_agent(*, seed: int = 0, inputs: int = 1, num_envs: int = 1, **settings) -> DQNAgent:
    config = DQNConfig(**{"dueling": True, "hidden_sizes": [16, 16], "gamma": 0.5, "max_grad_norm": None, **settings})
    return DQNAgent(config, ObservationSpec(inputs), DiscreteActions(4), num_envs=num_envs, seed=seed)


def random_observations(rows: int, columns: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(rows, columns)).astype(np.float32)


def test_action_values_of_hand_worked_streams():
    # s = 2: V = 7; A = 2, 4, 12 with mean 6, so 7 - 4, 7 - 2, 7 + 6. s = -1: V = -2; A = -1, -2, -6 with mean -3.
    values = linear_network()(torch.tensor([[2.0], [-1.0]]))
    torch.testing.assert_close(values, torch.tensor([[3.0, 5.0, 13.0], [0.0, -1.0, -5.0]]))


def test_both_streams_see_the_hidden_layer():
    # Hidden: relu(2 s - 1, -s) at s = 2 is (3, 0), at s = -1 it is (0, 1). V = h1 + 10 h2; A = h1, -h1 with mean 0.
    network = dueling(1, [2], 2, Activation.relu)
    set_layer(network.body[0], [[2.0], [-1.0]], [-1.0, 0.0])
    set_layer(network.value_head, [[1.0, 10.0]], [0.0])
    set_layer(network.advantage_head, [[1.0, 0.0], [-1.0, 0.0]], [0.0, 0.0])
    values = network(torch.tensor([[2.0], [-1.0]]))
    torch.testing.assert_close(values, torch.tensor([[6.0, 0.0], [10.0, 10.0]]))


def test_the_mean_of_the_action_values_is_the_value_of_the_state():
    network = dueling(3, [16], 4, Activation.tanh)
    observations = torch.from_numpy(random_observations(50, 3))
    state_values = network.value_head(network.body(observations)).squeeze(-1)
    torch.testing.assert_close(network(observations).mean(-1), state_values)


def test_what_all_advantages_have_in_common_does_not_count():
    network = linear_network()
    observations = torch.tensor([[2.0], [-1.0]])
    before = network(observations)
    with torch.no_grad():
        network.advantage_head.bias += 100.0
    torch.testing.assert_close(network(observations), before, atol=1e-4, rtol=0)


def test_the_hidden_layers_exist_once():
    # body 3 x 8 + 8 = 32, value 8 + 1 = 9, advantages 8 x 4 + 4 = 36
    network = dueling(3, [8], 4, Activation.tanh)
    assert sum(parameter.numel() for parameter in network.parameters()) == 77
    assert len(network.state_dict()) == 6


@pytest.mark.parametrize("hidden_sizes", [[], [16], [16, 16]], ids=str)
def test_the_ranking_prefers_the_action_that_the_values_prefer(hidden_sizes):
    network = dueling(3, hidden_sizes, 4, Activation.tanh)
    observations = torch.from_numpy(random_observations(500, 3))
    best = network(observations).argmax(-1)
    assert len(set(best.tolist())) > 1
    assert torch.equal(network.ranking(observations).argmax(-1), best)


@pytest.mark.parametrize("num_envs", [1, 16])
def test_an_agent_acts_by_its_action_values_also_after_it_has_learned(num_envs):
    agent = make_agent(inputs=3, num_envs=num_envs, learning_rate=0.1)
    rounds = random_observations(40 * num_envs, 3).reshape(40, num_envs, 3)
    chosen = []
    for _ in range(2):
        expected = [agent.q_network(torch.from_numpy(rows)).argmax(-1).tolist() for rows in rounds]
        assert [agent.act(rows).tolist() for rows in rounds] == expected
        assert [agent.explore(rows, step, 0.0).tolist() for step, rows in enumerate(rounds)] == expected
        chosen.append(expected)
        batch = one_transition()
        agent.update(batch._replace(observations=torch.ones(1, 3), next_observations=torch.ones(1, 3)))
    assert chosen[0] != chosen[1]


def test_an_update_moves_the_state_value_and_the_advantages_against_each_other():
    # One action of two is better than thought: dQ_0/dV = 1, dQ_0/dA_0 = 1 - 1/2, dQ_0/dA_1 = -1/2. Adam's first step
    # is the learning rate, so V and A_0 rise by 0.1 in weight and bias each, and A_1 falls. V + 0.2, A +- 0.2 around
    # the same mean: Q_0 rises by 0.4 and Q_1 not at all.
    config = DQNConfig(dueling=True, hidden_sizes=[], learning_rate=0.1, max_grad_norm=None)
    agent = DQNAgent(config, ObservationSpec(1), DiscreteActions(2))
    before = agent.q_network(torch.ones(1, 1)).detach()
    agent.update(one_transition(reward=10.0, terminated=1.0))
    moved = agent.q_network(torch.ones(1, 1)).detach() - before
    torch.testing.assert_close(moved, torch.tensor([[0.4, 0.0]]), atol=1e-5, rtol=0)


def test_the_target_network_is_a_copy_that_follows_on_request():
    agent = make_agent(learning_rate=0.1, target_update_rate=1.0)
    observations = torch.from_numpy(random_observations(10, 1))
    first = agent.q_network(observations).detach()
    agent.update(one_transition())
    assert torch.equal(agent.target_network(observations), first)
    assert not torch.equal(agent.q_network(observations), first)
    agent.update_target()
    assert torch.equal(agent.target_network(observations), agent.q_network(observations))


def test_updates_after_a_state_dict_round_trip_are_bit_equal():
    first, second = make_agent(), make_agent(seed=1)
    first.update(one_transition())
    first.update_target()
    first.update(one_transition())
    assert not torch.equal(first.q_network.value_head.weight, second.q_network.value_head.weight)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for agent in (first, second):
        agent.update(one_transition(reward=-3.0))
    for part in ("q_network", "target_network"):
        expected, got = first.state_dict()[part], second.state_dict()[part]
        assert list(expected) == list(got)
        assert all(torch.equal(expected[name], got[name]) for name in expected)
    # The numpy path acts with what was loaded.
    observations = random_observations(1, 1)
    assert first.act(observations).tolist() == second.act(observations).tolist()
