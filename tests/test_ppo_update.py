import copy
import math

import numpy as np
import pytest
import torch
from specs import CHOICE

from rl_training.algorithms.ppo import (
    PPOAgent,
    approximate_kl,
    clipped_policy_loss,
    explained_variance,
    standardized,
    value_loss,
)
from rl_training.api.algorithms import make_config
from rl_training.config import EnvConfig, PPOConfig
from rl_training.data.rollout_buffer import RolloutBatch, RolloutBuffer
from rl_training.errors import ConfigError
from rl_training.runtime.ppo_trainer import estimate_advantages, update_epochs
from rl_training.spaces import ContinuousActions, DiscreteActions, ObservationSpec

DISCRETE = DiscreteActions(3)
CONTINUOUS = ContinuousActions(low=(-1.0, -1.0), high=(1.0, 1.0))


def make_agent(actions=DISCRETE, **settings) -> PPOAgent:
    config = PPOConfig(**{"hidden_sizes": [8], "normalize_advantage": False, "max_grad_norm": None, **settings})
    return PPOAgent(config, ObservationSpec(2), actions, num_envs=2, seed=3)


def make_batch(agent: PPOAgent, *, advantage: float, log_ratio: float = 0.0, value_error: float = 0.0) -> RolloutBatch:
    """Four transitions, as if the policy that collected them differed from the agent's by `log_ratio`."""
    observations = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [-1.0, 0.5]])
    discrete = isinstance(agent.actions, DiscreteActions)
    actions = torch.tensor([0, 1, 2, 0]) if discrete else torch.tensor([[0.5, -0.5]] * 4)
    values = agent.values(observations)
    return RolloutBatch(
        observations=observations,
        actions=actions,
        log_probs=agent.log_probs(observations, actions) - log_ratio,
        values=values,
        advantages=torch.full((4,), advantage),
        returns=values + value_error,
    )


def parameters_of(agent: PPOAgent) -> dict[str, torch.Tensor]:
    return copy.deepcopy(agent.network.state_dict())


def same_parameters(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first)


def test_clipped_policy_loss_of_hand_worked_ratios():
    # ratio x advantage, and with the ratio cut to [0.8, 1.2]; the smaller counts:
    #   1.5 x  1 =  1.5,  1.2 ->  1.2        1.5 x -1 = -1.5, -1.2 -> -1.5        1.1 x 2 = 2.2, 2.2 -> 2.2
    #   0.5 x  1 =  0.5,  0.8 ->  0.5        0.5 x -1 = -0.5, -0.8 -> -0.8
    # sum 1.6, mean 0.32
    ratios = torch.tensor([1.5, 0.5, 1.5, 0.5, 1.1])
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, 2.0])
    assert clipped_policy_loss(ratios.log(), advantages, 0.2).item() == pytest.approx(-0.32)


def test_clipped_samples_have_no_gradient_and_the_others_have_minus_ratio_times_advantage():
    # d(ratio)/d(log ratio) = ratio, so an unclipped sample of five gets -ratio x advantage / 5.
    log_ratio = torch.tensor([1.5, 0.5, 1.5, 0.5, 1.1]).log().requires_grad_()
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, 2.0])
    (gradient,) = torch.autograd.grad(clipped_policy_loss(log_ratio, advantages, 0.2), log_ratio)
    torch.testing.assert_close(gradient, torch.tensor([0.0, -0.1, 0.3, 0.0, -0.44]))


def test_value_loss_without_clipping_is_the_mean_squared_error():
    # errors 1 and -3: (1 + 9) / 2
    loss = value_loss(torch.tensor([1.0, 5.0]), torch.zeros(2), torch.tensor([2.0, 2.0]), None)
    assert loss.item() == pytest.approx(5.0)


def test_value_loss_with_clipping_takes_the_worse_of_both_predictions():
    # value 1.0, old 0.0, return 2: free error 1,  cut to 0.5: error 1.5 -> 2.25
    # value 3.0, old 2.6, return 2: free error 1,  not cut                -> 1
    # value 4.0, old 2.0, return 2: free error 2,  cut to 2.5: error 0.5  -> 4
    # (2.25 + 1 + 4) / 3 = 2.416667
    values, old = torch.tensor([1.0, 3.0, 4.0]), torch.tensor([0.0, 2.6, 2.0])
    assert value_loss(values, old, torch.full((3,), 2.0), 0.5).item() == pytest.approx(2.416667)


def test_approximate_kl_of_hand_worked_ratios():
    # ratio 2: 2 - 1 - ln 2 = 0.306853; ratio 1: 0; mean 0.153426
    assert approximate_kl(torch.tensor([math.log(2), 0.0])).item() == pytest.approx(0.153426, abs=1e-6)


def test_standardized_advantages_of_a_hand_worked_sample():
    # mean 2, population deviation sqrt(2/3) = 0.816497, 1 / 0.816497 = 1.224745
    torch.testing.assert_close(standardized(torch.tensor([1.0, 2.0, 3.0])), torch.tensor([-1.224745, 0.0, 1.224745]))


def test_a_single_or_constant_advantage_becomes_zero():
    assert standardized(torch.tensor([7.0])).tolist() == [0.0]
    assert standardized(torch.full((4,), 0.5)).tolist() == [0.0] * 4


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, 2.0, 3.0, 4.0], 1.0),
        ([2.5, 2.5, 2.5, 2.5], 0.0),
        ([1.0, 2.0, 3.0, 3.0], 0.85),  # residuals 0 0 0 1: variance 3/16 of 5/4
        ([4.0, 3.0, 2.0, 1.0], -3.0),  # residuals -3 -1 1 3: variance 5 of 5/4
    ],
)
def test_explained_variance_of_hand_worked_predictions(values, expected):
    returns = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert explained_variance(torch.tensor(values), returns).item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("actions", [DISCRETE, CONTINUOUS])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_update_raises_the_probability_of_good_actions_and_lowers_that_of_bad_ones(actions, advantage):
    # One transition alone, so that no other action competes for the probability.
    agent = make_agent(actions)
    batch = RolloutBatch(*(field[:1] for field in make_batch(agent, advantage=advantage)[:6]))
    agent.update(batch, clip_range=0.2, learning_rate=1e-3)
    after = agent.log_probs(batch.observations, batch.actions)
    assert torch.sign(after - batch.log_probs).item() == advantage


def test_update_moves_values_towards_returns():
    agent = make_agent()
    batch = make_batch(agent, advantage=0.0, value_error=1.0)
    agent.update(batch, clip_range=0.2, learning_rate=1e-3)
    assert (agent.values(batch.observations) > batch.values).all()


def test_update_on_clipped_samples_moves_nothing():
    # The ratio 2 is already beyond 1.2 in the direction of the positive advantage.
    agent = make_agent(value_coef=0.0)
    before = parameters_of(agent)
    batch = make_batch(agent, advantage=1.0, log_ratio=math.log(2))
    agent.update(batch, clip_range=0.2, learning_rate=1e-2)
    assert same_parameters(parameters_of(agent), before)


def test_update_brings_back_a_ratio_that_went_the_wrong_way():
    agent = make_agent(value_coef=0.0)
    batch = RolloutBatch(*(field[:1] for field in make_batch(agent, advantage=-1.0, log_ratio=math.log(2))[:6]))
    before = agent.log_probs(batch.observations, batch.actions)
    agent.update(batch, clip_range=0.2, learning_rate=1e-3)
    assert agent.log_probs(batch.observations, batch.actions).item() < before.item()


@pytest.mark.parametrize("learning_rate", [1e-4, 1e-2])
def test_update_uses_the_given_learning_rate(learning_rate):
    # Adam's first step moves each parameter by the learning rate, whatever the size of its gradient.
    agent = make_agent(learning_rate=0.5)
    before = parameters_of(agent)
    agent.update(make_batch(agent, advantage=1e3), clip_range=0.2, learning_rate=learning_rate)
    after = parameters_of(agent)
    largest = max((after[name] - before[name]).abs().max().item() for name in before)
    assert largest == pytest.approx(learning_rate, rel=1e-2)


def test_a_learning_rate_of_zero_moves_nothing():
    agent = make_agent()
    before = parameters_of(agent)
    agent.update(make_batch(agent, advantage=1.0, value_error=1.0), clip_range=0.2, learning_rate=0.0)
    assert same_parameters(parameters_of(agent), before)


@pytest.mark.parametrize("actions", [DISCRETE, CONTINUOUS])
def test_entropy_bonus_raises_the_entropy(actions):
    agent = make_agent(actions, entropy_coef=1.0, value_coef=0.0)
    if actions is DISCRETE:
        with torch.no_grad():
            agent.network.actor_head.bias.copy_(torch.tensor([2.0, 0.0, 0.0]))
    batch = make_batch(agent, advantage=0.0)
    first = agent.update(batch, clip_range=0.2, learning_rate=1e-2)["policy/entropy"]
    second = agent.update(batch, clip_range=0.2, learning_rate=1e-2)["policy/entropy"]
    assert second > first


def test_without_an_entropy_bonus_and_advantages_the_policy_stays():
    agent = make_agent(entropy_coef=0.0, value_coef=0.0)
    before = parameters_of(agent)
    agent.update(make_batch(agent, advantage=0.0), clip_range=0.2, learning_rate=1e-2)
    assert same_parameters(parameters_of(agent), before)


@pytest.mark.parametrize("shared", [True, False])
def test_the_critic_moves_the_policy_only_if_layers_are_shared(shared):
    agent = make_agent(share_network=shared)
    batch = make_batch(agent, advantage=0.0, value_error=5.0)
    before = agent.network.actor(batch.observations).detach()
    agent.update(batch, clip_range=0.2, learning_rate=1e-2)
    after = agent.network.actor(batch.observations).detach()
    assert torch.equal(before, after) is not shared


def test_shared_layers_are_counted_and_saved_once():
    # separate: two bodies 2x8+8 = 24; heads 8x3+3 = 27 and 8+1 = 9: 84. shared: one body: 60
    def parameter_count(agent):
        return sum(parameter.numel() for parameter in agent.network.parameters())

    assert parameter_count(make_agent(share_network=False)) == 84
    assert parameter_count(make_agent(share_network=True)) == 60


def layers_of(body: torch.nn.Sequential) -> list[tuple]:
    """The widths of each linear layer, and the kind of every other one."""
    return [
        (layer.in_features, layer.out_features) if isinstance(layer, torch.nn.Linear) else type(layer) for layer in body
    ]


TANH, RELU = torch.nn.Tanh, torch.nn.ReLU


@pytest.mark.parametrize(
    ("settings", "critic", "features"),
    [
        ({}, [(2, 8), TANH], 8),
        ({"critic_hidden_sizes": [32, 16]}, [(2, 32), TANH, (32, 16), TANH], 16),
        ({"critic_activation": "relu"}, [(2, 8), RELU], 8),
        ({"critic_hidden_sizes": [5], "critic_activation": "relu"}, [(2, 5), RELU], 5),
        ({"critic_hidden_sizes": []}, [], 2),  # a linear critic, which is not the same as null
    ],
    ids=str,
)
@pytest.mark.parametrize("actions", [DISCRETE, CONTINUOUS], ids=["discrete", "continuous"])
def test_the_critic_may_have_layers_of_its_own(settings, critic, features, actions):
    agent = make_agent(actions, **settings)
    assert layers_of(agent.network.actor_body) == [(2, 8), TANH]
    assert layers_of(agent.network.critic_body) == critic
    assert layers_of([agent.network.critic_head]) == [(features, 1)]
    assert layers_of([agent.network.actor_head]) == [(8, 3 if actions is DISCRETE else 2)]
    batch = make_batch(agent, advantage=0.0, value_error=1.0)
    agent.update(batch, clip_range=0.2, learning_rate=1e-3)
    assert (agent.values(batch.observations) > batch.values).all()


@pytest.mark.parametrize("settings", [{"critic_hidden_sizes": [8]}, {"critic_activation": "relu"}], ids=str)
def test_shared_layers_and_a_critic_of_its_own_are_refused_by_their_keys(settings):
    with pytest.raises(ConfigError) as refusal:
        make_config(PPOConfig(share_network=True, **settings), EnvConfig(id="CartPole-v1"))
    for key in ("algo.share_network", "algo.critic_hidden_sizes", "algo.critic_activation"):
        assert key in str(refusal.value)
    make_config(PPOConfig(share_network=True), EnvConfig(id="CartPole-v1"))
    make_config(PPOConfig(**settings), EnvConfig(id="CartPole-v1"))


def test_a_critic_layer_without_units_is_refused_by_its_key():
    with pytest.raises(ConfigError, match=r"algo\.critic_hidden_sizes must be at least 1, got 0\."):
        PPOConfig(critic_hidden_sizes=[8, 0])


def test_orthogonal_initialisation_gives_orthogonal_rows_of_the_stated_gains():
    agent = make_agent(hidden_sizes=[8, 8])
    network = agent.network
    for body in (network.actor_body, network.critic_body):
        # A tall 8x2 layer has orthogonal columns of squared length 2 (gain sqrt 2), a square 8x8 one orthogonal rows.
        first, second = body[0].weight, body[2].weight
        torch.testing.assert_close(first.T @ first, 2.0 * torch.eye(2), atol=1e-5, rtol=0)
        torch.testing.assert_close(second @ second.T, 2.0 * torch.eye(8), atol=1e-5, rtol=0)
    actor, critic = network.actor_head.weight, network.critic_head.weight
    torch.testing.assert_close(actor @ actor.T, 1e-4 * torch.eye(3), atol=1e-8, rtol=1e-4)
    torch.testing.assert_close(critic @ critic.T, torch.ones(1, 1), atol=1e-5, rtol=0)
    biases = [parameter for name, parameter in network.named_parameters() if name.endswith("bias")]
    assert len(biases) == 6
    assert all((bias == 0).all() for bias in biases)


def test_orthogonal_initialisation_can_be_turned_off():
    biases = [p for name, p in make_agent(orthogonal_init=False).network.named_parameters() if name.endswith("bias")]
    assert all((bias != 0).any() for bias in biases)


def test_the_first_policy_is_almost_uniform():
    observations = torch.randn(64, 2, generator=torch.Generator().manual_seed(0))
    logits = make_agent().network.actor(observations)
    torch.testing.assert_close(logits.softmax(-1), torch.full((64, 3), 1 / 3), atol=0.02, rtol=0)


def test_update_returns_detached_scalars_and_leaves_its_batch_alone():
    agent = make_agent(normalize_advantage=True)
    batch = make_batch(agent, advantage=1.0, value_error=1.0)
    copies = copy.deepcopy(batch)
    metrics = agent.update(batch, clip_range=0.2, learning_rate=1e-3)
    assert set(metrics) == {
        "loss/policy",
        "loss/value",
        "policy/entropy",
        "policy/kl",
        "policy/clip_fraction",
        "loss/gradient_norm",
    }
    assert all(value.shape == () and not value.requires_grad for value in metrics.values())
    assert all(torch.equal(value, kept) for value, kept in zip(batch[:6], copies[:6], strict=True))


def test_update_reports_hand_worked_metrics():
    # Ratios 1.5, 1.5, 1, 1 and advantage 2: surrogate (2.4 + 2.4 + 2 + 2) / 4 = 2.2. KL: 1.5 - 1 - ln 1.5 = 0.094535
    # for half of them. Value error -3 everywhere: 9. Head weights of 0 make three equal actions: entropy ln 3.
    agent = make_agent()
    with torch.no_grad():
        agent.network.actor_head.weight.zero_()
    batch = make_batch(agent, advantage=2.0, value_error=3.0)
    batch.log_probs[:2] -= math.log(1.5)
    metrics = agent.update(batch, clip_range=0.2, learning_rate=1e-3)
    assert metrics["loss/policy"].item() == pytest.approx(-2.2)
    assert metrics["loss/value"].item() == pytest.approx(9.0, rel=1e-5)
    assert metrics["policy/entropy"].item() == pytest.approx(1.098612)
    assert metrics["policy/kl"].item() == pytest.approx(0.047267, abs=1e-6)
    assert metrics["policy/clip_fraction"].item() == 0.5


def test_advantages_are_standardized_if_asked():
    # Standardized advantages have mean 0, so that at ratio 1 the surrogate is 0; raw ones have mean 5.
    for normalize, expected in ((True, 0.0), (False, -5.0)):
        agent = make_agent(normalize_advantage=normalize)
        batch = make_batch(agent, advantage=0.0)._replace(advantages=torch.tensor([2.0, 4.0, 6.0, 8.0]))
        loss = agent.update(batch, clip_range=0.2, learning_rate=1e-3)["loss/policy"]
        assert loss.item() == pytest.approx(expected, abs=1e-6)


def test_updates_after_a_state_dict_round_trip_are_bit_equal():
    first, second = make_agent(), make_agent(orthogonal_init=False)
    first.update(make_batch(first, advantage=1.0), clip_range=0.2, learning_rate=1e-2)
    assert not same_parameters(parameters_of(first), parameters_of(second))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    batch = make_batch(first, advantage=-1.0, value_error=2.0)
    for agent in (first, second):
        agent.update(batch, clip_range=0.1, learning_rate=1e-3)
    assert same_parameters(parameters_of(first), parameters_of(second))


def test_explore_samples_the_policy():
    # Logits ln 1, ln 2, ln 5 for every observation: probabilities 1/8, 2/8, 5/8.
    agent = make_agent()
    with torch.no_grad():
        agent.network.actor_head.weight.zero_()
        agent.network.actor_head.bias.copy_(torch.tensor([1.0, 2.0, 5.0]).log())
    observations = np.zeros((2, 2), np.float32)
    actions = np.stack([agent.explore(observations, step) for step in range(4_000)])
    for column in actions.T:
        np.testing.assert_allclose(np.bincount(column) / 4_000, [0.125, 0.25, 0.625], atol=0.03)
    # The environments draw on their own: they agree with probability 1/64 + 4/64 + 25/64 = 0.469.
    assert (actions[:, 0] == actions[:, 1]).mean() == pytest.approx(0.469, abs=0.03)
    assert (agent.act(observations) == 2).all()


def test_explore_samples_a_gaussian_policy_and_the_environment_gets_it_clipped():
    agent = make_agent(CONTINUOUS, initial_log_std=math.log(2.0))
    with torch.no_grad():
        agent.network.actor_head.weight.zero_()
        agent.network.actor_head.bias.copy_(torch.tensor([0.5, -3.0]))
    observations = np.zeros((2, 2), np.float32)
    actions = np.stack([agent.explore(observations, step) for step in range(4_000)])
    np.testing.assert_allclose(actions.mean((0, 1)), [0.5, -3.0], atol=0.1)
    np.testing.assert_allclose(actions.std((0, 1)), [2.0, 2.0], atol=0.1)
    clipped = agent.env_actions(actions[0])
    assert clipped.dtype == np.float32
    assert (np.abs(clipped) <= 1).all()
    np.testing.assert_array_equal(agent.act(observations), np.tile(np.float32([0.5, -1.0]), (2, 1)))


def test_discrete_actions_are_shifted_to_the_first_number_of_the_environment():
    agent = PPOAgent(PPOConfig(hidden_sizes=[8]), ObservationSpec(2), DiscreteActions(3, start=5))
    assert agent.env_actions(np.array([0, 1, 2])).tolist() == [5, 6, 7]
    assert agent.act(np.zeros((4, 2), np.float32)).min() >= 5
    assert max(agent.explore(np.zeros((1, 2), np.float32), step)[0] for step in range(100)) == 2


def full_rollout(agent: PPOAgent) -> RolloutBuffer:
    random = np.random.default_rng(0)
    rollout = RolloutBuffer(8, 2, ObservationSpec(2), CHOICE, seed=0)
    for step in range(8):
        observations = random.normal(size=(2, 2)).astype(np.float32)
        actions = agent.explore(observations, step)
        ended = np.zeros(2, bool)
        rollout.add(observations, actions, random.normal(size=2).astype(np.float32), ended, ended, observations)
    estimate_advantages(agent, rollout, torch.zeros(2, 2))
    return rollout


@pytest.mark.parametrize(("target_kl", "epochs"), [(None, 5), (1e9, 5), (1e-3, 2)])
def test_epochs_end_early_when_the_policy_moves_beyond_the_target_kl(target_kl, epochs):
    # The first epoch is one minibatch with the policy that collected it, so its divergence is zero; the second sees
    # what a large learning rate did.
    agent = make_agent(num_epochs=5, minibatch_size=16, target_kl=target_kl)
    metrics = update_epochs(agent, full_rollout(agent), torch.zeros(2, 2), clip_range=0.2, learning_rate=0.05)
    assert len(metrics) == epochs
    assert metrics[0]["policy/kl"] < 1e-6
    assert metrics[1]["policy/kl"] > 2e-3


def test_every_epoch_goes_over_all_minibatches():
    agent = make_agent(num_epochs=3, minibatch_size=5)
    metrics = update_epochs(agent, full_rollout(agent), torch.zeros(2, 2), clip_range=0.2, learning_rate=1e-3)
    assert len(metrics) == 3 * 4  # 16 transitions in minibatches of 5, 5, 5 and 1
    assert all("policy/explained_variance" in entry for entry in metrics)


def constant_rollout() -> RolloutBuffer:
    """Four steps of one environment that observes nothing and pays 1; the second step terminates, the third is cut."""
    rollout = RolloutBuffer(4, 1, ObservationSpec(2), CHOICE, seed=0)
    nothing, one = np.zeros((1, 2), np.float32), np.ones(1, np.float32)
    for step in range(4):
        rollout.add(nothing, np.array([step % 3]), one, np.array([step == 1]), np.array([step == 2]), nothing)
    return rollout


@pytest.mark.parametrize("recompute", [True, False])
def test_advantages_are_estimated_anew_before_each_epoch_if_asked(recompute):
    # Every state is worth the critic's bias b. At gamma 0.5 and lambda 0 the advantage is 1 + 0.5 b - b, and 1 - b
    # where the episode terminated. First b = 0: advantages 1, returns 1. Adam moves b towards 1 by its learning rate
    # 0.1: advantages 0.95 and 0.9, returns (advantage + b) 1.05 and 1.
    agent = make_agent(
        hidden_sizes=[],
        gamma=0.5,
        gae_lambda=0.0,
        num_epochs=2,
        minibatch_size=4,
        recompute_advantages=recompute,
    )
    seen = []
    plain_update = agent.update

    def update(batch, **scheduled):
        seen.append({name: value.tolist() for name, value in batch._asdict().items() if value is not None})
        return plain_update(batch, **scheduled)

    agent.update = update
    rollout = constant_rollout()
    log_probs = agent.log_probs(torch.zeros(4, 2), torch.tensor([0, 1, 2, 0]))
    update_epochs(agent, rollout, torch.zeros(1, 2), clip_range=0.2, learning_rate=0.1)
    first, second = seen
    assert first["values"] == [0.0] * 4
    assert first["advantages"] == [1.0] * 4
    assert first["returns"] == [1.0] * 4
    if recompute:
        assert second["values"] == pytest.approx([0.1] * 4, abs=1e-5)
        assert sorted(second["advantages"]) == pytest.approx([0.9, 0.95, 0.95, 0.95], abs=1e-5)
        assert sorted(second["returns"]) == pytest.approx([1.0, 1.05, 1.05, 1.05], abs=1e-5)
    else:
        assert [second[name] for name in ("values", "advantages", "returns")] == [[0.0] * 4, [1.0] * 4, [1.0] * 4]
    # The ratio is always to the policy that collected, which has changed by now.
    for epoch in seen:
        assert sorted(epoch["log_probs"]) == pytest.approx(sorted(log_probs.tolist()))
    assert not torch.allclose(agent.log_probs(torch.zeros(4, 2), torch.tensor([0, 1, 2, 0])), log_probs)


def test_a_single_epoch_is_the_same_with_advantages_estimated_anew():
    agents = [make_agent(num_epochs=1, minibatch_size=4, recompute_advantages=value) for value in (True, False)]
    for agent in agents:
        update_epochs(agent, full_rollout(agent), torch.zeros(2, 2), clip_range=0.2, learning_rate=0.01)
    assert same_parameters(*(parameters_of(agent) for agent in agents))
