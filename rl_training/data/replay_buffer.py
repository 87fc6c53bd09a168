"""What DQN and SAC learn from: the last `capacity` transitions, sampled uniformly."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_training.errors import UserError
from rl_training.runtime.system import available_memory


class Transitions(NamedTuple):
    """A batch of transitions; `next_observations` are true even where an episode ended."""

    observations: Tensor
    actions: Tensor
    rewards: Tensor
    next_observations: Tensor
    terminated: Tensor


Scaling = Callable[[NDArray[np.float32]], NDArray[np.float32]]


class ReplayBuffer:
    """A ring of transitions in CPU memory, with its own random generator.

    Observations and rewards are stored raw; `sample` scales them, so that old transitions follow the statistics of now.
    """

    def __init__(
        self,
        capacity: int,
        num_envs: int,
        observation_size: int,
        action_size: int | None,
        *,
        seed: int,
        device: torch.device | None = None,
    ) -> None:
        """Allocate after checking free memory; `action_size` is None for discrete actions."""
        self.capacity = capacity - capacity % num_envs  # a vector step is never split at the end of the ring
        self.num_envs = num_envs
        self.device = device or torch.device("cpu")
        columns: dict[str, tuple[tuple[int, ...], Any]] = {
            "observations": ((observation_size,), np.float32),
            "actions": ((), np.int64) if action_size is None else ((action_size,), np.float32),
            "rewards": ((), np.float32),
            "next_observations": ((observation_size,), np.float32),
            "terminated": ((), np.float32),
        }
        _check_memory(self.capacity, columns)
        self._columns = {name: np.zeros((self.capacity, *shape), dtype) for name, (shape, dtype) in columns.items()}
        self._sampler = np.random.Generator(np.random.PCG64(seed))
        self.added = 0

    def __len__(self) -> int:
        """Return how many transitions can be sampled."""
        return min(self.added, self.capacity)

    def add(
        self,
        observations: NDArray[np.float32],
        actions: NDArray[Any],
        rewards: NDArray[np.float32],
        next_observations: NDArray[np.float32],
        terminated: NDArray[np.bool_],
    ) -> None:
        """Store one vector step of `num_envs` transitions over the oldest ones."""
        start = self.added % self.capacity
        rows = slice(start, start + self.num_envs)
        columns = self._columns
        columns["observations"][rows] = observations
        columns["actions"][rows] = actions
        columns["rewards"][rows] = rewards
        columns["next_observations"][rows] = next_observations
        columns["terminated"][rows] = terminated
        self.added += self.num_envs

    def sample(
        self, batch_size: int, scale_observations: Scaling | None = None, scale_rewards: Scaling | None = None
    ) -> Transitions:
        """Draw transitions with replacement, each stored one equally likely."""
        rows = self._sampler.integers(0, len(self), size=batch_size)
        batch = {name: column.take(rows, axis=0) for name, column in self._columns.items()}
        if scale_observations is not None:
            batch["observations"] = scale_observations(batch["observations"])
            batch["next_observations"] = scale_observations(batch["next_observations"])
        if scale_rewards is not None:
            batch["rewards"] = scale_rewards(batch["rewards"])
        return Transitions(**{name: torch.from_numpy(values).to(self.device) for name, values in batch.items()})

    def state_dict(self) -> dict[str, Any]:
        """Return the stored transitions and the sampler."""
        return {
            "added": self.added,
            "columns": {name: column[: len(self)].copy() for name, column in self._columns.items()},
            "sampler": self._sampler.bit_generator.state,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self.added = state["added"]
        for name, column in self._columns.items():
            column[: len(self)] = state["columns"][name]
        self._sampler.bit_generator.state = state["sampler"]


def _check_memory(capacity: int, columns: dict[str, tuple[tuple[int, ...], Any]]) -> None:
    needed = sum(capacity * int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in columns.values())
    free = available_memory()
    if free is not None and needed > free:
        fitting = int(capacity * 0.8 * free / needed)
        raise UserError(
            f"A replay buffer of algo.buffer_size={capacity} needs {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB of "
            f"memory are free. Try algo.buffer_size={fitting}."
        )
