"""Values that move over the training budget; all are functions of the fraction of it that is spent."""

from rl_training.config import Schedule


def scheduled(initial: float, schedule: Schedule, progress: float) -> float:
    """Return the value at `progress` in [0, 1] of the budget."""
    if schedule is Schedule.linear:
        return initial * max(0.0, 1.0 - progress)
    return initial


def epsilon_at(progress: float, initial: float, final: float, fraction: float) -> float:
    """Fall in a straight line from `initial` to `final` over the first `fraction` of the budget, then stay."""
    if progress >= fraction:
        return final
    return initial + (final - initial) * progress / fraction


def rising(progress: float, initial: float, final: float) -> float:
    """Rise in a straight line from `initial` to `final` over the whole budget."""
    return initial + (final - initial) * min(1.0, progress)
