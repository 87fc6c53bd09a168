"""What an environment gives and takes, in plain numbers: all that agents and buffers need to know about it."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

ImageShape = tuple[int, int, int]
"""Channels, height, width."""


@dataclass(frozen=True)
class ObservationSpec:
    """Observations as agents and buffers see them: one row each, whatever the environment gives.

    Without images a row is a float32 vector. With images it is a row of bytes: the vector's float32 numbers, if there
    are any, and then the pixels of each image, channel by channel. A row so costs what the observation itself does,
    and everything between environment and network handles one array.
    """

    size: int
    """Numbers in the vector."""
    images: tuple[ImageShape, ...] = ()
    frame_stack: int = 1
    """How many successive frames a row holds, oldest first."""

    @property
    def dtype(self) -> type[np.generic]:
        """Return the type of a row's elements."""
        return np.uint8 if self.images else np.float32

    @property
    def row_size(self) -> int:
        """Return the number of a row's elements."""
        return 4 * self.size + sum(math.prod(image) for image in self.images) if self.images else self.size

    def vectors(self, rows: NDArray[Any]) -> NDArray[Any]:
        """Return the vectors [..., size] that rows hold."""
        return np.ascontiguousarray(rows[..., : 4 * self.size]).view(np.float32) if self.images else rows


@dataclass(frozen=True)
class DiscreteActions:
    """`count` alternatives, numbered from `start` in the environment and from 0 in the agent."""

    count: int
    start: int = 0


@dataclass(frozen=True)
class MultiDiscreteActions:
    """Several choices at once, each with its own number of alternatives, numbered from 0."""

    counts: tuple[int, ...]


@dataclass(frozen=True)
class ContinuousActions:
    """Real vectors of `size` numbers between `low` and `high`, which may be infinite."""

    low: tuple[float, ...]
    high: tuple[float, ...]

    @property
    def size(self) -> int:
        """Return the number of action dimensions."""
        return len(self.low)


ActionSpec = DiscreteActions | MultiDiscreteActions | ContinuousActions


def choice_counts(actions: ActionSpec) -> tuple[int, ...]:
    """Return the number of alternatives of each discrete choice; none for continuous actions."""
    if isinstance(actions, ContinuousActions):
        return ()
    return (actions.count,) if isinstance(actions, DiscreteActions) else actions.counts


def action_layout(actions: ActionSpec) -> tuple[tuple[int, ...], Any]:
    """Return shape and dtype of one action, as buffers store it."""
    if isinstance(actions, ContinuousActions):
        return (actions.size,), np.float32
    return (() if isinstance(actions, DiscreteActions) else (len(actions.counts),)), np.int64
