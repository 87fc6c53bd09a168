import math

import pytest
import torch
from torch import distributions as oracle

from rl_training.networks.distributions import (
    categorical_log_prob_and_entropy,
    choices_log_prob_and_entropy,
    gaussian_entropy,
    gaussian_log_prob,
    squashed_gaussian_sample,
)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def test_categorical_log_prob_of_a_hand_worked_policy():
    # softmax(0, ln 3) = (1/4, 3/4); ln 1/4 = -1.386294, ln 3/4 = -0.287682
    logits = torch.tensor([[0.0, math.log(3)], [0.0, math.log(3)]])
    log_probs, _ = categorical_log_prob_and_entropy(logits, torch.tensor([0, 1]))
    torch.testing.assert_close(log_probs, torch.tensor([-1.386294, -0.287682]))


def test_categorical_entropy_of_hand_worked_policies():
    # (1/4, 3/4): 0.25 * 1.386294 + 0.75 * 0.287682 = 0.562335; uniform over two: ln 2
    logits = torch.tensor([[0.0, math.log(3)], [5.0, 5.0]])
    _, entropy = categorical_log_prob_and_entropy(logits, torch.zeros(2, dtype=torch.int64))
    torch.testing.assert_close(entropy, torch.tensor([0.562335, 0.693147]))


def test_categorical_stays_finite_when_one_action_is_certain():
    logits = torch.tensor([[1000.0, 0.0], [1000.0, 0.0]])
    log_probs, entropy = categorical_log_prob_and_entropy(logits, torch.tensor([0, 1]))
    assert log_probs.tolist() == [0.0, -1000.0]
    assert entropy.tolist() == [0.0, 0.0]


def test_categorical_agrees_with_torch():
    logits = 3 * torch.randn(64, 5, generator=generator())
    actions = torch.randint(5, (64,), generator=generator())
    expected = oracle.Categorical(logits=logits)
    log_probs, entropy = categorical_log_prob_and_entropy(logits, actions)
    torch.testing.assert_close(log_probs, expected.log_prob(actions))
    torch.testing.assert_close(entropy, expected.entropy())


def test_several_choices_of_hand_worked_policies():
    # First choice: (1/4, 3/4). Second: (1/2, 1/4, 1/4), entropy 0.5 ln 2 + 0.5 ln 4 = 1.5 ln 2 = 1.039721.
    # ln 1/4 + ln 1/2 = ln 1/8 = -2.079442; ln 3/4 + ln 1/4 = ln 3/16 = -1.673976; 0.562335 + 1.039721 = 1.602056
    logits = torch.tensor([[0.0, math.log(3), math.log(2), 0.0, 0.0]] * 2)
    log_probs, entropy = choices_log_prob_and_entropy(logits, torch.tensor([[0, 0], [1, 2]]), (2, 3))
    torch.testing.assert_close(log_probs, torch.tensor([-2.079442, -1.673976]))
    torch.testing.assert_close(entropy, torch.tensor([1.602056, 1.602056]))


@pytest.mark.parametrize("actions", [[0, 1], [[0], [1]]], ids=["a number", "a vector of one"])
def test_one_choice_is_a_categorical_however_its_actions_are_shaped(actions):
    logits = torch.tensor([[0.0, math.log(3)]] * 2)
    log_probs, entropy = choices_log_prob_and_entropy(logits, torch.tensor(actions), (2,))
    torch.testing.assert_close(log_probs, torch.tensor([-1.386294, -0.287682]))
    torch.testing.assert_close(entropy, torch.tensor([0.562335, 0.562335]))


def test_the_probabilities_of_all_combinations_add_up_to_one():
    logits = torch.randn(1, 2 + 3 + 4, generator=generator()).expand(24, -1)
    actions = torch.cartesian_prod(torch.arange(2), torch.arange(3), torch.arange(4))
    log_probs, _ = choices_log_prob_and_entropy(logits, actions, (2, 3, 4))
    assert log_probs.exp().sum().item() == pytest.approx(1.0, rel=1e-5)


def test_gaussian_log_prob_of_a_hand_worked_point():
    # dimension 1: mean 1, std 2, value 3, so z = 1: -0.5 - ln 2 - 0.5 ln 2pi = -0.5 - 0.693147 - 0.918939 = -2.112086
    # dimension 2: mean 0, std 1, value 0:            -0.918939                                  sum -3.031024
    mean, log_std = torch.tensor([[1.0, 0.0]]), torch.tensor([[math.log(2), 0.0]])
    log_prob = gaussian_log_prob(mean, log_std, torch.tensor([[3.0, 0.0]]))
    torch.testing.assert_close(log_prob, torch.tensor([-3.031024]))


def test_gaussian_entropy_of_hand_worked_deviations():
    # std 2: ln 2 + 0.5 ln 2pi + 0.5 = 0.693147 + 1.418939 = 2.112086; std 1: 1.418939; sum 3.531024
    torch.testing.assert_close(gaussian_entropy(torch.tensor([[math.log(2), 0.0]])), torch.tensor([3.531024]))


def test_gaussian_agrees_with_torch():
    mean, log_std, values = torch.randn(3, 64, 4, generator=generator())
    expected = oracle.Independent(oracle.Normal(mean, log_std.exp()), 1)
    torch.testing.assert_close(gaussian_log_prob(mean, log_std, values), expected.log_prob(values))
    torch.testing.assert_close(gaussian_entropy(log_std), expected.entropy())


def test_squashed_sample_of_hand_worked_noise():
    # u = 0: tanh 0 = 0, no volume change, -0.918939. u = 1: tanh 1 = 0.761594, ln(1 - 0.761594^2) = -0.867562,
    # log-density -0.5 - 0.918939 + 0.867562 = -0.551377
    zeros = torch.zeros(2, 1)
    actions, log_probs = squashed_gaussian_sample(zeros, zeros, torch.tensor([[0.0], [1.0]]))
    torch.testing.assert_close(actions, torch.tensor([[0.0], [0.761594]]))
    torch.testing.assert_close(log_probs, torch.tensor([-0.918939, -0.551377]))


def test_squashed_log_prob_agrees_with_torch_at_moderate_values():
    mean, noise = torch.randn(2, 256, 3, generator=generator(), dtype=torch.float64)
    log_std = torch.randn(256, 3, generator=generator(), dtype=torch.float64).clamp(-2, 0)
    actions, log_probs = squashed_gaussian_sample(mean, log_std, noise)
    squashed = oracle.TransformedDistribution(oracle.Normal(mean, log_std.exp()), oracle.TanhTransform(cache_size=1))
    expected = oracle.Independent(squashed, 1)
    torch.testing.assert_close(log_probs, expected.log_prob(actions), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("mean", [50.0, -50.0])
def test_squashed_log_prob_and_its_gradient_stay_finite_where_tanh_saturates(mean):
    # ln(1 - tanh(50)^2) = ln 4 - 100 = -98.613706, so the log-density is -0.918939 + 98.613706 = 97.694767
    mean_tensor = torch.tensor([[mean]], requires_grad=True)
    action, log_prob = squashed_gaussian_sample(mean_tensor, torch.zeros(1, 1), torch.zeros(1, 1))
    assert action.item() == math.copysign(1.0, mean)
    assert log_prob.item() == pytest.approx(97.694767, abs=1e-4)
    (gradient,) = torch.autograd.grad(log_prob.sum(), mean_tensor)
    # d/du of -ln(1 - tanh(u)^2) is 2 tanh(u)
    assert gradient.item() == pytest.approx(math.copysign(2.0, mean))


@pytest.mark.parametrize(("mean", "std"), [(0.0, 0.5), (0.8, 0.3), (-0.4, 0.7)])
def test_squashed_density_integrates_to_one(mean, std):
    edges = torch.linspace(-1, 1, 20_001, dtype=torch.float64)
    middles = ((edges[1:] + edges[:-1]) / 2).unsqueeze(-1)
    noise = (torch.atanh(middles) - mean) / std
    log_std = torch.full_like(noise, math.log(std))
    actions, log_probs = squashed_gaussian_sample(torch.full_like(noise, mean), log_std, noise)
    torch.testing.assert_close(actions, middles)
    width = 2 / 20_000
    assert (log_probs.exp().sum() * width).item() == pytest.approx(1.0, abs=1e-4)
