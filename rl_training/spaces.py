"""What an environment gives and takes, in plain numbers: all that agents and buffers need to know about it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ObservationSpec:
    """Observations as the agent sees them: float32 vectors of `size` numbers (a Discrete observation is one-hot)."""

    size: int


@dataclass(frozen=True)
class DiscreteActions:
    """`count` alternatives, numbered from `start` in the environment and from 0 in the agent."""

    count: int
    start: int = 0


@dataclass(frozen=True)
class ContinuousActions:
    """Real vectors of `size` numbers between `low` and `high`, which may be infinite."""

    low: tuple[float, ...]
    high: tuple[float, ...]

    @property
    def size(self) -> int:
        """Return the number of action dimensions."""
        return len(self.low)


ActionSpec = DiscreteActions | ContinuousActions
