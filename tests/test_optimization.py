"""Flat Adam is Adam: by the paper's equations, on worked numbers, with parameters that stay views of one tensor."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from rl_training.algorithms.optimization import Adam, FlatParameters


def module(*values: float) -> nn.ParameterList:
    """Return a module with one scalar parameter per value."""
    return nn.ParameterList([nn.Parameter(torch.tensor([value])) for value in values])


def values(parameters: nn.Module) -> list[float]:
    return [parameter.item() for parameter in parameters.parameters()]


def test_flattened_parameters_are_views_of_one_tensor():
    network = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    before = [parameter.clone() for parameter in network.parameters()]
    flat = FlatParameters(network).vector
    assert flat.shape == (2 * 3 + 3 + 3 + 1,)
    assert all(torch.equal(old, new) for old, new in zip(before, network.parameters(), strict=True))
    flat.fill_(0.5)
    assert all((parameter == 0.5).all() for parameter in network.parameters())
    network.load_state_dict(copy.deepcopy(network.state_dict()))
    flat.fill_(0.25)
    assert all((parameter == 0.25).all() for parameter in network.parameters())


def test_a_step_moves_its_own_parameters_only():
    mine, other = module(1.0), module(1.0)
    Adam(mine, learning_rate=0.1).minimize(mine[0] * other[0])
    # Adam's first step is the learning rate against the sign of the gradient.
    assert values(mine) == pytest.approx([0.9])
    assert values(other) == [1.0]


@pytest.mark.parametrize("max_grad_norm", [None, 0.05])
def test_many_steps_follow_the_equations_of_the_paper(max_grad_norm):
    # Algorithm 1 of Kingma and Ba in float64, on f(x) = sum of c (x - 1)^2 with the gradient 2 c (x - 1).
    curvature, start = np.array([1.0, 0.1, 3.0]), np.array([0.5, -2.0, 1.5])
    x, m, v = start.copy(), np.zeros(3), np.zeros(3)
    for t in range(1, 51):
        g = 2 * curvature * (x - 1)
        if max_grad_norm is not None and np.linalg.norm(g) > max_grad_norm:
            g *= max_grad_norm / np.linalg.norm(g)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        x -= 0.01 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-5)

    weights = module(*start)
    optimizer = Adam(weights, 0.01, eps=1e-5)
    for _ in range(50):
        loss = sum(c * (weight - 1).square().sum() for c, weight in zip(curvature.tolist(), weights, strict=True))
        optimizer.minimize(loss, max_grad_norm)
    assert values(weights) == pytest.approx(x.tolist(), rel=1e-4)
    assert values(weights) != pytest.approx(start.tolist(), rel=1e-2)


def test_the_norm_is_clipped_over_all_parameters_together():
    weights = module(0.0, 0.0)
    optimizer = Adam(weights, learning_rate=0.1)
    # The gradient is (3, 4) with norm 5; clipped to norm 1 it is (0.6, 0.8); the first moment is a tenth of it.
    optimizer.minimize((3 * weights[0] + 4 * weights[1]).sum(), max_grad_norm=1.0)
    assert optimizer.state_dict()["first_moment"].tolist() == pytest.approx([0.06, 0.08], rel=1e-5)


def test_a_small_gradient_is_not_clipped():
    weights = module(0.0)
    optimizer = Adam(weights, learning_rate=0.1)
    optimizer.minimize((0.5 * weights[0]).sum(), max_grad_norm=1.0)
    assert optimizer.state_dict()["first_moment"].tolist() == pytest.approx([0.05])


def test_the_learning_rate_can_change_between_steps():
    weights = module(1.0)
    optimizer = Adam(weights, learning_rate=0.1)
    optimizer.learning_rate = 0.5
    optimizer.minimize(weights[0].sum())
    assert values(weights) == pytest.approx([0.5])


def test_a_restored_optimizer_goes_on_with_the_same_bits():
    first, second = module(1.0, -2.0), module(1.0, -2.0)
    optimizer, restored = Adam(first, 0.1), Adam(second, 0.1)
    for _ in range(3):
        optimizer.minimize((first[0] * first[1]).sum())
    second.load_state_dict(first.state_dict())
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for _ in range(3):
        optimizer.minimize((first[0] * first[1]).sum())
        restored.minimize((second[0] * second[1]).sum())
    assert values(first) == values(second)


@pytest.mark.parametrize(("rate", "expected"), [(1.0, [10.0, -2.0]), (0.5, [6.0, 0.0]), (0.25, [4.0, 1.0])])
def test_move_towards_goes_the_given_share_of_the_way(rate, expected):
    target, source = module(2.0, 2.0), module(10.0, -2.0)
    FlatParameters(target).move_towards(FlatParameters(source), rate)
    assert values(target) == expected
    assert values(source) == [10.0, -2.0]
