"""State-dependent noise: a function of the state that is kept for a while, and a Gaussian at any one moment."""

import copy
import math

import numpy as np
import pytest
import torch

from rl_training.algorithms.noise import StateNoise
from rl_training.algorithms.ppo import PPOAgent
from rl_training.algorithms.sac import SACAgent
from rl_training.config import PPOConfig, SACConfig
from rl_training.data.replay_buffer import Transitions
from rl_training.data.rollout_buffer import RolloutBatch
from rl_training.networks.state_noise import state_log_std
from rl_training.spaces import ContinuousActions, DiscreteActions, ObservationSpec

UNIT = ContinuousActions(low=(-1.0, -1.0), high=(1.0, 1.0))
WIDE = ContinuousActions(low=(-99.0, -99.0), high=(99.0, 99.0))

# Deviations 1 and 2 for the first feature, 0.5 and 1 for the second, of two actions. At features (1, 2) the variances
# are 1 x 1 + 4 x 0.25 = 2 and 1 x 4 + 4 x 1 = 8.
LOG_STD = [[0.0, math.log(2)], [math.log(0.5), 0.0]]
FEATURES = [[1.0, 2.0]]
DEVIATIONS = [math.sqrt(2), math.sqrt(8)]
NO_NOISE = -100.0  # exp(-100) times any noise disappears beside a mean


# The deviation


def test_the_deviation_at_hand_worked_features():
    # half the logarithms of 2 and 8; at (0, 2) of 1 and 4; without features of the 1e-6 that keeps it finite
    features = torch.tensor([*FEATURES, [0.0, 2.0], [0.0, 0.0]])
    expected = [[0.346574, 1.039721], [0.0, 0.693147], [-6.907755, -6.907755]]
    torch.testing.assert_close(state_log_std(features, torch.tensor(LOG_STD)), torch.tensor(expected))


# The function


def make_noise(num_envs: int = 2, *, hold: int = 4, seed: int = 5) -> StateNoise:
    return StateNoise(num_envs, 2, 2, hold=hold, seed=seed)


def noise_at(noise: StateNoise, step: int, features: list[list[float]]) -> np.ndarray:
    return noise.at(step, np.array(features, np.float32), np.array(LOG_STD, np.float32))


ONE, OTHER = [[1.0, 2.0], [0.5, -1.0]], [[-3.0, 1.0], [2.0, 2.0]]


def test_the_function_is_kept_for_so_many_steps_and_then_changes():
    noise = make_noise(hold=4)
    values = [noise_at(noise, step, ONE).tobytes() for step in range(12)]
    assert values[0:4] == [values[0]] * 4
    assert values[4:8] == [values[4]] * 4
    assert values[8:12] == [values[8]] * 4
    assert len(set(values)) == 3


def test_noise_is_linear_in_the_features():
    noise = make_noise(hold=4)
    one, other = noise_at(noise, 1, ONE), noise_at(noise, 2, OTHER)
    np.testing.assert_array_equal(noise_at(noise, 3, (2 * np.array(ONE)).tolist()), 2 * one)
    both = noise_at(noise, 0, (np.array(ONE) + np.array(OTHER)).tolist())
    np.testing.assert_allclose(both, one + other, rtol=1e-5, atol=1e-6)
    assert noise_at(noise, 0, [[0.0, 0.0]] * 2).tolist() == [[0.0, 0.0]] * 2
    assert (np.abs(one - other) > 1e-3).all()


def test_each_deviation_scales_the_noise_of_its_feature_and_action():
    # Only the first feature and the second action have any noise; ten times the deviation is ten times the noise.
    noise = make_noise()
    log_std = np.array([[NO_NOISE, 0.0], [NO_NOISE, NO_NOISE]], np.float32)
    features = np.array(ONE, np.float32)
    small = noise.at(0, features, log_std)
    np.testing.assert_allclose(small[:, 0], 0.0, atol=1e-30)
    assert (small[:, 1] != 0).all()
    log_std[0, 1] = math.log(10)
    np.testing.assert_allclose(noise.at(0, features, log_std)[:, 1], 10 * small[:, 1], rtol=1e-5)
    features[:, 1] = 77.0
    np.testing.assert_allclose(noise.at(0, features, log_std)[:, 1], 10 * small[:, 1], rtol=1e-5)


def test_the_noise_of_a_step_does_not_depend_on_when_it_is_asked_for():
    # Sixteen functions of four steps are drawn at once: steps on both sides of the borders, forwards and backwards.
    steps = [0, 3, 4, 62, 63, 64, 65, 127, 128, 1_000]
    forwards, backwards = make_noise(), make_noise()
    expected = {step: noise_at(forwards, step, ONE).copy() for step in steps}
    for step in reversed(steps):
        np.testing.assert_array_equal(noise_at(backwards, step, ONE), expected[step])
    assert len({value.tobytes() for value in expected.values()}) == 7  # 0 3 | 4 | 62 63 | 64 65 | 127 | 128 | 1000


def test_environments_have_their_own_functions():
    first, second = noise_at(make_noise(), 0, [[1.0, 2.0], [1.0, 2.0]])
    assert (np.abs(first - second) > 1e-3).all()


def test_the_seed_decides_the_function():
    first, same, other = (noise_at(make_noise(seed=seed), 0, ONE) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, same)
    assert (np.abs(first - other) > 1e-3).all()


def test_over_many_functions_the_noise_has_the_stated_deviation():
    # 400 functions of 50 environments: a deviation of 20,000 numbers is within 2.5 % by five of its own.
    noise = make_noise(50, hold=3)
    values = np.concatenate([noise_at(noise, 3 * block, FEATURES * 50) for block in range(400)])
    np.testing.assert_allclose(values.std(0), [1.414214, 2.828427], rtol=0.025)
    np.testing.assert_allclose(values.mean(0), [0.0, 0.0], atol=0.1)
    assert np.corrcoef(values.T)[0, 1] == pytest.approx(0.0, abs=0.04)
    stated = state_log_std(torch.tensor(FEATURES), torch.tensor(LOG_STD)).exp()
    np.testing.assert_allclose(values.std(0), stated[0].numpy(), rtol=0.025)


# In both agents


def make_ppo(actions=WIDE, *, num_envs: int = 2, seed: int = 3, **settings) -> PPOAgent:
    config = PPOConfig(
        **{"state_dependent_noise": True, "hidden_sizes": [8, 8], "max_grad_norm": None, **settings},
    )
    return PPOAgent(config, ObservationSpec(2), actions, num_envs=num_envs, seed=seed)


def make_sac(actions=UNIT, *, num_envs: int = 2, seed: int = 3, **settings) -> SACAgent:
    config = SACConfig(**{"state_dependent_noise": True, "hidden_sizes": [8, 8], "activation": "tanh", **settings})
    return SACAgent(config, ObservationSpec(2), actions, num_envs=num_envs, seed=seed)


MAKERS = {"ppo": make_ppo, "sac": make_sac}
OBSERVATIONS = np.array([[1.0, 2.0], [-0.5, 0.25]], np.float32)


def actor_of(agent) -> torch.nn.Module:
    return agent.network if isinstance(agent, PPOAgent) else agent.actor


def set_log_std(agent, log_std) -> None:
    with torch.no_grad():
        actor_of(agent).log_std.copy_(torch.tensor(log_std))


def unsquashed(agent, actions: np.ndarray) -> np.ndarray:
    return actions if isinstance(agent, PPOAgent) else np.arctanh(actions)


def means_of(agent, observations: np.ndarray) -> np.ndarray:
    """The means as the torch modules have them, which is what updates see."""
    inputs = torch.from_numpy(observations)
    with torch.no_grad():
        return (agent.network.actor(inputs) if isinstance(agent, PPOAgent) else agent.actor(inputs)[0]).numpy()


@pytest.mark.parametrize("algo", MAKERS)
def test_there_is_one_deviation_for_each_feature_and_action(algo):
    agent = MAKERS[algo](hidden_sizes=[8, 5], initial_log_std=-1.5)
    assert actor_of(agent).log_std.shape == (5, 2)
    assert (actor_of(agent).log_std == -1.5).all()
    assert "log_std" in actor_of(agent).state_dict()


# Both ways of acting: 2 environments go through numpy, 8 with wide layers through torch.
@pytest.mark.parametrize(("num_envs", "hidden_sizes"), [(2, []), (2, [8, 8]), (8, [128, 128])], ids=str)
@pytest.mark.parametrize("algo", MAKERS)
def test_without_deviation_exploring_takes_the_means_of_the_actor(algo, num_envs, hidden_sizes):
    agent = MAKERS[algo](num_envs=num_envs, hidden_sizes=hidden_sizes, initial_log_std=NO_NOISE)
    assert agent.acting_path == ("torch" if num_envs == 8 else "numpy")
    observations = np.random.default_rng(0).normal(size=(num_envs, 2)).astype(np.float32)
    means = means_of(agent, observations)
    assert np.ptp(means) > 1e-3
    np.testing.assert_allclose(unsquashed(agent, agent.explore(observations, 9)), means, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("algo", MAKERS)
def test_the_same_state_gets_the_same_action_until_the_function_changes(algo):
    agent = MAKERS[algo](noise_hold=3)
    actions = [agent.explore(OBSERVATIONS, step).tobytes() for step in range(9)]
    assert actions == [actions[0]] * 3 + [actions[3]] * 3 + [actions[6]] * 3
    assert len(set(actions)) == 3


@pytest.mark.parametrize("algo", MAKERS)
def test_exploring_has_the_deviation_that_the_update_computes_with(algo):
    # Without hidden layers the features are the observations (1, 2): deviations sqrt 2 and sqrt 8, here a tenth of it.
    agent = MAKERS[algo](hidden_sizes=[], noise_hold=1)
    set_log_std(agent, (np.array(LOG_STD) - math.log(10)).tolist())
    observations = np.array(FEATURES * 2, np.float32)
    actions = unsquashed(agent, np.concatenate([agent.explore(observations, step) for step in range(4_000)]))
    np.testing.assert_allclose(actions.std(0), [0.1414214, 0.2828427], rtol=0.04)
    np.testing.assert_allclose(actions.mean(0), means_of(agent, observations)[0], atol=0.02)


@pytest.mark.parametrize("algo", MAKERS)
def test_acting_without_exploration_knows_no_noise(algo):
    quiet, loud = MAKERS[algo](initial_log_std=NO_NOISE), MAKERS[algo](initial_log_std=1.0)
    assert quiet.act(OBSERVATIONS).tobytes() == loud.act(OBSERVATIONS).tobytes()
    assert quiet.explore(OBSERVATIONS, 0).tobytes() != loud.explore(OBSERVATIONS, 0).tobytes()


@pytest.mark.parametrize("algo", MAKERS)
def test_a_restored_agent_explores_with_the_restored_deviation(algo):
    saved, restored = MAKERS[algo](initial_log_std=-2.0), MAKERS[algo](initial_log_std=0.5)
    restored.load_state_dict(copy.deepcopy(saved.state_dict()))
    for step in (0, 7, 8, 200):
        assert saved.explore(OBSERVATIONS, step).tobytes() == restored.explore(OBSERVATIONS, step).tobytes()


@pytest.mark.parametrize("algo", MAKERS)
def test_the_deviation_trains_the_hidden_layers_in_sac_only(algo):
    # PPO's stay with the mean, as published. SAC's would let the features fade to nothing, and the noise with them.
    agent = MAKERS[algo]()
    observations = torch.from_numpy(OBSERVATIONS)
    if algo == "ppo":
        _, log_std = agent.network.log_probs_and_entropy(observations, torch.zeros(2, 2))  # the entropy, which is it
        body = list(agent.network.actor_body.parameters())
    else:
        _, log_std = agent.actor(observations)
        body = list(agent.actor.network.parameters())
    through_weights, *through_body = torch.autograd.grad(
        log_std.sum(), [actor_of(agent).log_std, *body], allow_unused=True
    )
    assert (through_weights != 0).all()
    if algo == "ppo":
        assert through_body == [None] * len(body)
    else:
        *hidden, head_weight, head_bias = through_body
        assert all((gradient != 0).any() for gradient in hidden)
        assert head_weight is head_bias is None


# In PPO


def test_log_probabilities_and_entropies_of_a_hand_worked_policy():
    # Mean (0.5, -1), deviations sqrt 2 and sqrt 8. One deviation off in the first action, none in the second:
    #   -0.5 - 0.346574 - 0.918939 = -1.765513   and   -1.039721 - 0.918939 = -1.958660: together -3.724172
    # Entropy: 0.346574 + 1.039721 + 2 x 1.418939 = 4.224172
    agent = make_ppo(hidden_sizes=[])
    set_log_std(agent, LOG_STD)
    with torch.no_grad():
        agent.network.actor_head.weight.zero_()
        agent.network.actor_head.bias.copy_(torch.tensor([0.5, -1.0]))
    actions = torch.tensor([[0.5 + DEVIATIONS[0], -1.0]])
    log_probs, entropy = agent.network.log_probs_and_entropy(torch.tensor(FEATURES), actions)
    assert log_probs.item() == pytest.approx(-3.724172, abs=1e-5)
    assert entropy.item() == pytest.approx(4.224172, abs=1e-5)
    assert agent.log_probs(torch.tensor(FEATURES), actions).item() == log_probs.item()


def test_log_probabilities_train_the_hidden_layers_through_the_mean_alone():
    # A head without weights cuts off the mean; what is left of the gradient would have come through the deviation.
    agent = make_ppo()
    body = list(agent.network.actor_body.parameters())

    def gradients():
        log_probs, _ = agent.network.log_probs_and_entropy(torch.from_numpy(OBSERVATIONS), torch.ones(2, 2))
        return torch.autograd.grad(log_probs.sum(), [agent.network.log_std, *body])

    assert all((gradient != 0).any() for gradient in gradients())
    with torch.no_grad():
        agent.network.actor_head.weight.zero_()
    through_weights, *through_body = gradients()
    assert (through_weights != 0).all()
    assert not any((gradient != 0).any() for gradient in through_body)


def test_an_agent_explores_with_the_deviation_that_it_has_learned():
    # An entropy bonus alone: Adam's first step raises every logarithm by the learning rate 2, the noise by e^2 = 7.389.
    agent = make_ppo(hidden_sizes=[], entropy_coef=1.0, value_coef=0.0, normalize_advantage=False)
    before = agent.explore(OBSERVATIONS, 0) - means_of(agent, OBSERVATIONS)
    zeros, observations = torch.zeros(2), torch.from_numpy(OBSERVATIONS)
    log_probs = agent.log_probs(observations, torch.zeros(2, 2))
    batch = RolloutBatch(observations, torch.zeros(2, 2), log_probs, zeros, zeros, zeros)
    agent.update(batch, clip_range=0.2, learning_rate=2.0)
    after = agent.explore(OBSERVATIONS, 0) - means_of(agent, OBSERVATIONS)
    np.testing.assert_allclose(after, 7.389056 * before, rtol=1e-3)


def test_discrete_actions_have_no_such_noise():
    agent = make_ppo(DiscreteActions(3))
    assert not agent.network.state_noise
    assert not any("log_std" in name for name, _ in agent.network.named_parameters())
    assert set(np.concatenate([agent.explore(OBSERVATIONS, step) for step in range(100)]).tolist()) == {0, 1, 2}


# In SAC


def test_the_actor_gives_a_hand_worked_mean_and_deviation():
    # mean 2 x 1 + 0.5 = 2.5, which is cut to 2, and -0.25 x 2 = -0.5
    agent = make_sac(hidden_sizes=[])
    set_log_std(agent, LOG_STD)
    with torch.no_grad():
        agent.actor.network[0].weight.copy_(torch.tensor([[2.0, 0.0], [0.0, -0.25]]))
        agent.actor.network[0].bias.copy_(torch.tensor([0.5, 0.0]))
    mean, log_std = agent.actor(torch.tensor(FEATURES))
    torch.testing.assert_close(mean, torch.tensor([[2.0, -0.5]]))
    torch.testing.assert_close(log_std, torch.tensor([[0.346574, 1.039721]]))


def test_explored_actions_lie_inside_the_range_and_differ():
    agent = make_sac(initial_log_std=-1.0)
    actions = np.stack([agent.explore(OBSERVATIONS, step) for step in range(0, 800, 8)])
    assert actions.dtype == np.float32
    assert (np.abs(actions) < 1).all()
    assert len({action.tobytes() for action in actions}) == 100


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_mean_is_cut_at_two_wherever_it_is_used(sign):
    # tanh 2 = 0.964028; without the cut it would be 1
    agent = make_sac(initial_log_std=NO_NOISE)
    with torch.no_grad():
        agent.actor.network[-1].bias.fill_(50.0 * sign)
    expected = np.full((2, 2), 0.964028 * sign)
    np.testing.assert_allclose(agent.act(OBSERVATIONS), expected, atol=1e-6)
    np.testing.assert_allclose(agent.explore(OBSERVATIONS, 0), expected, atol=1e-6)
    actions, _ = agent.actor.sample(torch.from_numpy(OBSERVATIONS), torch.zeros(2, 2))
    np.testing.assert_allclose(actions.detach().numpy(), expected, atol=1e-6)


def test_an_update_moves_the_deviation_and_exploring_follows():
    # A temperature far above all values: the entropy decides, so the noise must grow. Adam's first step is 0.5 in every
    # logarithm: e^0.5 = 1.648721 times the noise. The hidden layer is left out, so that the features stay.
    agent = make_sac(hidden_sizes=[], temperature=1e6, learn_temperature=False, learning_rate=0.5)
    before = unsquashed(agent, agent.explore(OBSERVATIONS, 0)) - means_of(agent, OBSERVATIONS)
    random = torch.Generator().manual_seed(0)
    observations = torch.randn(64, 2, generator=random)
    batch = Transitions(observations, torch.zeros(64, 2), torch.zeros(64), observations, torch.zeros(64))
    agent.update(batch)
    assert (agent.actor.log_std > -2.51).all()
    after = unsquashed(agent, agent.explore(OBSERVATIONS, 0)) - means_of(agent, OBSERVATIONS)
    np.testing.assert_allclose(after, 1.648721 * before, rtol=1e-2, atol=1e-4)
