import pytest
import torch
from torch import nn

from rl_training.algorithms.optimization import adam, gradient_step, move_towards, set_learning_rate


def parameter(*values: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values))


def test_gradient_step_moves_its_own_parameters_only():
    mine, other = parameter(1.0), parameter(1.0)
    gradient_step((mine * other).sum(), adam([mine], learning_rate=0.1))
    # Adam's first step is the learning rate against the sign of the gradient.
    assert mine.item() == pytest.approx(0.9)
    assert other.item() == 1.0
    assert other.grad is None


def test_gradient_step_does_not_add_to_the_gradient_of_the_step_before():
    weight = parameter(1.0)
    optimizer = adam([weight], learning_rate=0.1)
    for _ in range(3):
        gradient_step((2.0 * weight).sum(), optimizer)
        assert weight.grad.item() == 2.0


def test_gradient_norm_is_clipped_over_all_parameters_together():
    first, second = parameter(0.0), parameter(0.0)
    # The gradient is (3, 4) with norm 5; clipped to norm 1 it is (0.6, 0.8).
    gradient_step((3 * first + 4 * second).sum(), adam([first, second], learning_rate=0.1), max_grad_norm=1.0)
    assert first.grad.item() == pytest.approx(0.6, rel=1e-5)
    assert second.grad.item() == pytest.approx(0.8, rel=1e-5)


def test_a_small_gradient_is_not_clipped():
    weight = parameter(0.0)
    gradient_step((0.5 * weight).sum(), adam([weight], learning_rate=0.1), max_grad_norm=1.0)
    assert weight.grad.item() == 0.5


def test_set_learning_rate_changes_the_next_step():
    weight = parameter(1.0)
    optimizer = adam([weight], learning_rate=0.1)
    set_learning_rate(optimizer, 0.5)
    gradient_step(weight.sum(), optimizer)
    assert weight.item() == pytest.approx(0.5)


@pytest.mark.parametrize(("rate", "expected"), [(1.0, [10.0, -2.0]), (0.5, [6.0, 0.0]), (0.25, [4.0, 1.0])])
def test_move_towards_goes_the_given_share_of_the_way(rate, expected):
    target, source = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        target.weight.copy_(torch.tensor([[2.0, 2.0]]))
        source.weight.copy_(torch.tensor([[10.0, -2.0]]))
    move_towards(target, source, rate)
    assert target.weight.tolist() == [expected]
    assert source.weight.tolist() == [[10.0, -2.0]]
