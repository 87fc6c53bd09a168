"""What a trainer's environments have in common, however they step: in turn, in processes, all at once."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[Any]
"""Observations [N, row size], laid out as the `ObservationSpec` says."""


@dataclass(slots=True)
class Endings:
    """The episodes that ended in a vector step; the fields run in parallel, in the order of the environments."""

    indices: Any = field(default_factory=list)
    observations: Any = field(default_factory=list)
    """Their true last observations."""
    returns: Any = field(default_factory=list)
    lengths: Any = field(default_factory=list)


VectorStep = tuple[
    Rows,
    NDArray[np.float32],
    NDArray[np.bool_],
    NDArray[np.bool_],
    Endings | None,
    NDArray[np.bool_] | None,
]
"""Observations, rewards, terminated, truncated, the episodes that ended, and which rows are transitions (None: all)."""

Snapshots = list[dict[str, Any]]


class VectorEnvs(Protocol):
    """Environments that step together. Every array that is handed out is new, and stays as it is."""

    late_resets: bool
    """Whether an episode's end is followed by a step that ignores the action and returns the next first observation.

    That step is no transition. Where False, an environment resets in the step that ends its episode.
    """

    def reset(self, seeds: Sequence[int]) -> Rows:
        """Start an episode in every environment."""
        ...

    def step(self, actions: NDArray[Any]) -> VectorStep:
        """Step every environment; one that fails raises `EnvironmentFailure`."""
        ...

    def snapshots(self, completed_steps: int) -> Snapshots:
        """Return how to come back to where `completed_steps` steps led: now, or just before a step that failed."""
        ...

    def restore(
        self, snapshots: Snapshots, observations: Rows, seeds: Sequence[int], completed_steps: int
    ) -> dict[int, tuple[str, Any]]:
        """Come back to where snapshots were taken and these observations were seen.

        An environment that cannot starts a new episode with its seed instead; returned are, by its index, the reason
        and the first observation.
        """
        ...

    def close(self) -> None:
        """Release the environments; a second call does nothing."""
        ...
