"""Small action spaces for tests of buffers and agents."""

from rl_training.spaces import ContinuousActions, DiscreteActions

CHOICE = DiscreteActions(2)


def numbers(size: int) -> ContinuousActions:
    return ContinuousActions(low=(-1.0,) * size, high=(1.0,) * size)
