import copy
import math

import numpy as np
import pytest
import torch

from rl_training.algorithms.sac import SACAgent, actor_loss, critic_loss, soft_td_target, temperature_loss
from rl_training.config import SACConfig
from rl_training.data.replay_buffer import Transitions
from rl_training.spaces import ContinuousActions, ObservationSpec

UNIT = ContinuousActions(low=(-1.0, -1.0), high=(1.0, 1.0))


def make_agent(actions: ContinuousActions = UNIT, *, seed: int = 0, **settings) -> SACAgent:
    config = SACConfig(**{"hidden_sizes": [8], "learning_rate": 1e-2, **settings})
    return SACAgent(config, ObservationSpec(3), actions, num_envs=2, seed=seed)


def make_batch(size: int = 16, *, actions: int = 2, seed: int = 0) -> Transitions:
    random = torch.Generator().manual_seed(seed)
    return Transitions(
        observations=torch.randn(size, 3, generator=random),
        actions=torch.rand(size, actions, generator=random) * 2 - 1,
        rewards=torch.randn(size, generator=random),
        next_observations=torch.randn(size, 3, generator=random),
        terminated=(torch.rand(size, generator=random) < 0.2).float(),
    )


def snapshot(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return copy.deepcopy(module.state_dict())


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first)


def test_soft_td_target_of_hand_worked_numbers():
    # goes on: 1 + 0.9 (10 - 0.5 x -2) = 10.9; terminated: 1
    targets = soft_td_target(
        rewards=torch.tensor([1.0, 1.0]),
        terminated=torch.tensor([0.0, 1.0]),
        next_q=torch.tensor([10.0, 10.0]),
        next_log_probs=torch.tensor([-2.0, -2.0]),
        temperature=torch.tensor(0.5),
        gamma=0.9,
    )
    torch.testing.assert_close(targets, torch.tensor([10.9, 1.0]))


def test_critic_loss_of_hand_worked_numbers():
    # first: errors 1 and 0, mean 0.5; second: errors 2 and 2, mean 4; half the sum
    targets = torch.tensor([2.0, 2.0])
    assert critic_loss(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 0.0]), targets).item() == pytest.approx(2.25)


def test_actor_loss_of_hand_worked_numbers():
    # 0.5 x -1 - 2 = -2.5; 0.5 x -3 - 4 = -5.5; mean -4
    loss = actor_loss(torch.tensor([-1.0, -3.0]), torch.tensor([2.0, 4.0]), torch.tensor(0.5))
    assert loss.item() == pytest.approx(-4.0)


def test_temperature_loss_and_its_gradient_of_hand_worked_numbers():
    # log-probs -1 and -3 plus the target entropy -1: mean -3. Loss -(0.5 x -3) = 1.5; its slope in log alpha is 3:
    # the entropy 2 is above the target -1, so descending lowers the temperature.
    log_temperature = torch.tensor(0.5, requires_grad=True)
    loss = temperature_loss(log_temperature, torch.tensor([-1.0, -3.0]), -1.0)
    assert loss.item() == pytest.approx(1.5)
    (gradient,) = torch.autograd.grad(loss, log_temperature)
    assert gradient.item() == pytest.approx(3.0)


def test_temperature_loss_does_not_move_the_policy():
    log_probs = torch.tensor([-1.0, -3.0], requires_grad=True)
    loss = temperature_loss(torch.tensor(0.5, requires_grad=True), log_probs, -1.0)
    assert torch.autograd.grad(loss, log_probs, allow_unused=True) == (None,)


@pytest.mark.parametrize(("target_entropy", "direction"), [(50.0, 1), (-50.0, -1)])
def test_the_temperature_rises_below_the_target_entropy_and_falls_above_it(target_entropy, direction):
    agent = make_agent(target_entropy=target_entropy)
    temperatures = [agent.update(make_batch())["policy/temperature"].item() for _ in range(3)]
    assert temperatures[0] == 1.0
    # Adam moves log alpha by the learning rate at each step in the same direction.
    assert temperatures[1:] == pytest.approx([math.exp(0.01 * direction), math.exp(0.02 * direction)], rel=1e-4)


def test_the_target_entropy_is_minus_the_action_dimensions_unless_given():
    assert make_agent().target_entropy == -2.0
    assert make_agent(target_entropy=0.5).target_entropy == 0.5


def test_a_fixed_temperature_stays():
    agent = make_agent(learn_temperature=False, temperature=0.25)
    for _ in range(3):
        assert agent.update(make_batch())["policy/temperature"].item() == pytest.approx(0.25)
    assert agent.temperature.log.item() == pytest.approx(math.log(0.25))


@pytest.mark.parametrize("learning", ["actor", "critics"])
def test_the_actor_step_moves_no_critic_and_the_critic_step_moves_no_actor(learning):
    # Whichever optimizer has step size 0 must leave its own network to the bit; only a stray step of the other one
    # could move it.
    agent = make_agent(target_update_rate=1.0)
    frozen = agent.critic_optimizer if learning == "actor" else agent.actor_optimizer
    frozen.learning_rate = 0.0
    actor, critics = snapshot(agent.actor), snapshot(agent.critics)
    agent.update(make_batch())
    assert same(snapshot(agent.actor), actor) is (learning == "critics")
    assert same(snapshot(agent.critics), critics) is (learning == "actor")
    assert same(snapshot(agent.target_critics), critics) is (learning == "actor")


def linear_agent(**settings) -> SACAgent:
    """An agent whose actor is a standard normal and whose critics are constants, set by `set_constants`."""
    agent = make_agent(hidden_sizes=[], **settings)
    with torch.no_grad():
        for parameter in (*agent.actor.parameters(), *agent.critics.parameters(), *agent.target_critics.parameters()):
            parameter.zero_()
    return agent


def set_constants(critics: torch.nn.Module, first: float, second: float) -> None:
    with torch.no_grad():
        critics.first[0].bias.fill_(first)
        critics.second[0].bias.fill_(second)


@pytest.mark.parametrize("terminated", [0.0, 1.0])
def test_update_reports_the_critic_loss_of_a_hand_worked_target(terminated):
    # Almost no temperature, so the entropy does not count. The target critics say 4 and 2, the smaller one counts:
    # target 1 + 0.5 x 2 = 2; terminated: 1. The critics say 1.5 and 1.25, so their errors are 0.5 and 0.75 if the
    # episode goes on, half of 0.25 + 0.5625; and 0.5 and 0.25 if not, half of 0.25 + 0.0625.
    agent = linear_agent(gamma=0.5, learn_temperature=False, temperature=1e-9)
    set_constants(agent.critics, 1.5, 1.25)
    set_constants(agent.target_critics, 4.0, 2.0)
    batch = make_batch()._replace(rewards=torch.ones(16), terminated=torch.full((16,), terminated))
    metrics = agent.update(batch)
    assert metrics["loss/value"].item() == pytest.approx(0.15625 if terminated else 0.40625, rel=1e-5)
    assert metrics["policy/q_value"].item() == 1.5


def test_update_adds_the_entropy_of_the_next_action_to_its_value():
    # A standard normal squashed by tanh has entropy 1.418939 + E ln(1 - tanh(u)^2) = 0.669804 per dimension
    # (numerical integration), twice that here. All critics say 0 and temperature and gamma are 1, so the target is
    # minus the log-probability and the loss its mean square, 1.889868 by the same integration.
    agent = linear_agent(gamma=1.0, learn_temperature=False, temperature=1.0, learning_rate=1e-4)
    size = 50_000
    batch = make_batch(size)._replace(rewards=torch.zeros(size), terminated=torch.zeros(size))
    metrics = agent.update(batch)
    assert metrics["policy/entropy"].item() == pytest.approx(1.339608, abs=0.03)
    assert metrics["loss/value"].item() == pytest.approx(1.889868, abs=0.05)
    assert agent.critics.first[0].bias.item() > 0  # up towards the positive target


def test_the_actor_follows_the_smaller_critic():
    # The first critic rises with the first action, the second falls twice as fast: the minimum falls where a > 0 and
    # rises where a < 0 (min(a, -2a)), so the best action is 0. Alone, the first critic would pull towards 1.
    agent = linear_agent(gamma=0.0, learn_temperature=False, temperature=1e-9, learning_rate=1e-2)
    with torch.no_grad():
        agent.critics.first[0].weight[0, 3] = 1.0
        agent.critics.second[0].weight[0, 3] = -2.0
        agent.actor.network[0].bias.copy_(torch.tensor([1.0, 0.0, -3.0, 0.0]))  # mean 1, small deviation
    agent.critic_optimizer.learning_rate = 0.0
    before = agent.act(np.zeros((1, 3), np.float32))[0, 0]
    agent.update(make_batch())
    assert agent.act(np.zeros((1, 3), np.float32))[0, 0] < before


def test_target_critics_go_the_given_share_of_the_way_to_the_updated_critics():
    agent = make_agent(target_update_rate=0.25)
    before = snapshot(agent.target_critics)
    agent.update(make_batch())
    after, critics = snapshot(agent.target_critics), snapshot(agent.critics)
    for name, value in after.items():
        torch.testing.assert_close(value, 0.75 * before[name] + 0.25 * critics[name])
    assert not same(after, before)


def test_target_critics_start_equal_to_the_critics():
    agent = make_agent()
    assert same(snapshot(agent.target_critics), snapshot(agent.critics))


def test_the_two_critics_start_different():
    critics = make_agent().critics
    assert not same(snapshot(critics.first), snapshot(critics.second))


def test_update_returns_detached_scalars_and_leaves_its_batch_alone():
    batch = make_batch()
    copies = copy.deepcopy(batch)
    metrics = make_agent().update(batch)
    assert set(metrics) == {
        "loss/value",
        "loss/policy",
        "policy/entropy",
        "policy/q_value",
        "policy/temperature",
        "loss/gradient_norm",
    }
    assert all(value.shape == () and not value.requires_grad for value in metrics.values())
    assert all(torch.equal(value, kept) for value, kept in zip(batch[:5], copies[:5], strict=True))


def test_actions_are_scaled_to_asymmetric_bounds():
    # (-1, 0, 1) to [-1, 3] is (-1, 1, 3); to [-10, -2] it is (-10, -6, -2)
    agent = make_agent(ContinuousActions(low=(-1.0, -10.0), high=(3.0, -2.0)))
    actions = np.array([[-1.0, -1.0], [0.0, 0.0], [1.0, 1.0]], np.float32)
    assert agent.env_actions(actions).tolist() == [[-1.0, -10.0], [1.0, -6.0], [3.0, -2.0]]
    assert agent.env_actions(actions).dtype == np.float32


def test_no_action_leaves_the_bounds_even_where_scaling_rounds():
    # (0.1 + 0.7) / 2 + (0.7 - 0.1) / 2 is 0.70000005 in float32: one step outside, which strict environments refuse.
    random = np.random.default_rng(0)
    low = np.concatenate([[0.1], random.uniform(-3, 0, 999)]).astype(np.float32)
    high = np.concatenate([[0.7], random.uniform(0, 3, 999)]).astype(np.float32)
    agent = make_agent(ContinuousActions(tuple(low.tolist()), tuple(high.tolist())))
    for extreme in (-1.0, 1.0):
        actions = agent.env_actions(np.full((1, 1000), extreme, np.float32))[0]
        assert ((low <= actions) & (actions <= high)).all()


def test_every_kind_of_action_is_inside_the_bounds():
    agent = make_agent(ContinuousActions(low=(-1.0, 0.0), high=(3.0, 0.5)))
    with torch.no_grad():
        agent.actor.network[-1].weight.mul_(50.0)  # a policy that saturates
    observations = np.random.default_rng(0).normal(size=(2, 3)).astype(np.float32)
    for step in range(200):
        for actions in (agent.explore(observations, step), agent.random_actions(step)):
            assert (np.abs(actions) <= 1).all()
            scaled = agent.env_actions(actions)
            assert ((scaled >= [-1.0, 0.0]) & (scaled <= [3.0, 0.5])).all()
        assert ((agent.act(observations) >= [-1.0, 0.0]) & (agent.act(observations) <= [3.0, 0.5])).all()


def test_random_actions_are_uniform_over_the_range():
    agent = make_agent()
    actions = np.stack([agent.random_actions(step) for step in range(2_000)])
    np.testing.assert_allclose(actions.mean(0), 0.0, atol=0.07)
    np.testing.assert_allclose(np.square(actions).mean(0), 1 / 3, atol=0.04)


def test_explore_samples_the_squashed_gaussian():
    agent = linear_agent()
    with torch.no_grad():
        agent.actor.network[0].bias.copy_(torch.tensor([0.5, -0.5, math.log(0.1), math.log(0.2)]))
    observations = np.zeros((2, 3), np.float32)
    unsquashed = np.arctanh(np.stack([agent.explore(observations, step) for step in range(2_000)]))
    np.testing.assert_allclose(unsquashed.mean((0, 1)), [0.5, -0.5], atol=0.02)
    np.testing.assert_allclose(unsquashed.std((0, 1)), [0.1, 0.2], atol=0.02)
    # tanh 0.5 = 0.462117
    np.testing.assert_allclose(agent.act(observations), [[0.462117, -0.462117]] * 2, atol=1e-6)


def test_updates_after_a_state_dict_round_trip_are_bit_equal():
    first, second = make_agent(seed=0), make_agent(seed=1)
    for step in range(3):
        first.update(make_batch(seed=step))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for agent in (first, second):
        for step in range(3, 5):
            agent.update(make_batch(seed=step))
    for part in ("actor", "critics", "target_critics"):
        assert same(first.state_dict()[part], second.state_dict()[part])
    assert torch.equal(first.temperature.log, second.temperature.log)


def test_another_seed_gives_other_updates():
    first, second = make_agent(seed=0), make_agent(seed=1)
    for part in ("actor", "critics", "target_critics"):
        getattr(second, part).load_state_dict(getattr(first, part).state_dict())
    for agent in (first, second):
        agent.update(make_batch())
    assert not same(first.state_dict()["actor"], second.state_dict()["actor"])


def layer_kinds(network: torch.nn.Sequential) -> list[str]:
    return [type(layer).__name__ for layer in network]


def test_layer_normalisation_is_in_all_critics_and_not_in_the_actor():
    agent = make_agent(hidden_sizes=[8, 6], activation="tanh", critic_layer_norm=True)
    for critics in (agent.critics, agent.target_critics):
        for network in (critics.first, critics.second):
            assert layer_kinds(network) == ["Linear", "LayerNorm", "Tanh", "Linear", "LayerNorm", "Tanh", "Linear"]
            assert [network[1].normalized_shape, network[4].normalized_shape] == [(8,), (6,)]
    assert layer_kinds(agent.actor.network) == ["Linear", "Tanh", "Linear", "Tanh", "Linear"]
    plain = make_agent(hidden_sizes=[8, 6], activation="tanh")
    assert layer_kinds(plain.critics.first) == layer_kinds(plain.actor.network)


@pytest.mark.parametrize("normalized", [True, False])
def test_normalised_critics_do_not_see_the_scale_of_their_first_layer(normalized):
    # Ten times the weights and biases are ten times the numbers, which normalising takes back.
    agent = make_agent(critic_layer_norm=normalized)
    batch = make_batch()
    before, _ = agent.critics(batch.observations, batch.actions)
    with torch.no_grad():
        agent.critics.first[0].weight.mul_(10.0)
        agent.critics.first[0].bias.mul_(10.0)
    after, _ = agent.critics(batch.observations, batch.actions)
    assert torch.allclose(before, after, atol=1e-3) is normalized


def test_updates_move_the_normalisation_and_its_targets_follow():
    # Weights and biases of the normalisation begin at 1 and 0.
    agent = make_agent(critic_layer_norm=True, target_update_rate=0.25)
    agent.update(make_batch())
    for critics, share in ((agent.critics, 1.0), (agent.target_critics, 0.25)):
        # Adam's first step is the learning rate 0.01, and the targets go a quarter of it.
        assert (critics.first[1].weight - 1.0).abs().max().item() == pytest.approx(0.01 * share, rel=1e-2)
        assert critics.second[1].bias.abs().max().item() == pytest.approx(0.01 * share, rel=1e-2)
