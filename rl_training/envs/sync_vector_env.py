"""Environments that step one after the other and reset in the step that ends an episode, as SAME_STEP in Gymnasium.

Gymnasium's own SyncVectorEnv collects every info of every step, copies each observation twice and dispatches on the
spaces: with one CartPole that is more work than the environment's. Here observations go straight into the batch, and
infos are read only where an episode ends. A test compares the two.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_training.envs.snapshots import EpisodeRecorder, RestoreError
from rl_training.envs.vector_env import Endings, Rows, Snapshots, VectorStep
from rl_training.errors import EnvironmentFailure


class SameStepVectorEnv:
    """Steps environments one after the other; one that ends its episode is reset in the same step."""

    late_resets = False

    def __init__(self, makers: Sequence[Callable[[], EpisodeRecorder[Any, Any]]]) -> None:
        self.envs = [make() for make in makers]
        self._space = self.envs[0].observation_space
        self._row_shape = self._space.shape
        self.row_dtype = np.uint8 if self._space.dtype == np.uint8 else np.float32

    def reset(self, seeds: Sequence[int]) -> Rows:
        """Start an episode in every environment."""
        rows = np.empty((len(self.envs), *(self._row_shape or ())), self.row_dtype)
        for index, (env, seed) in enumerate(zip(self.envs, seeds, strict=True)):
            observation, _ = env.reset(seed=seed)
            self._write(rows, index, observation)
        return rows

    def step(self, actions: NDArray[Any]) -> VectorStep:
        """Step every environment."""
        # New arrays, filled in place, are cheaper than copies of old ones.
        shape, count = self._row_shape, len(self.envs)
        observations = np.empty((count, *(shape or ())), self.row_dtype)
        rewards = np.empty(count, np.float32)
        terminated, truncated = np.empty(count, np.bool_), np.empty(count, np.bool_)
        endings = None
        index, observation = 0, None
        try:
            # Gymnasium checks each discrete action; Python integers pass in a quarter of the time of numpy's.
            given = actions.tolist() if actions.ndim == 1 else actions
            for index, (env, action) in enumerate(zip(self.envs, given, strict=True)):
                observation, rewards[index], ended, cut, info = env.step(action)
                terminated[index], truncated[index] = ended, cut
                if ended or cut:
                    endings = endings or Endings()
                    endings.indices.append(index)
                    endings.observations.append(np.asarray(observation, self.row_dtype))
                    endings.returns.append(info["episode"]["r"])
                    endings.lengths.append(info["episode"]["l"])
                    observation, _ = env.reset()
                if np.asarray(observation).shape != shape:  # assignment would broadcast it
                    raise ValueError(f"observation of shape {np.asarray(observation).shape}")
                observations[index] = observation
        except (ValueError, TypeError, IndexError) as error:
            raise self._unusable(index, observation, error) from error
        return observations, rewards, terminated, truncated, endings, None

    def _write(self, rows: Rows, index: int, observation: Any) -> None:
        try:
            if np.asarray(observation).shape != self._row_shape:
                raise ValueError(f"observation of shape {np.asarray(observation).shape}")
            rows[index] = observation
        except (ValueError, TypeError) as error:
            raise self._unusable(index, observation, error) from error

    def _unusable(self, index: int, observation: Any, error: Exception) -> EnvironmentFailure:
        """Name the environment whose observation does not fit its space."""
        name, found = self.envs[index].name, np.asarray(observation)
        if found.shape != self._row_shape or not np.can_cast(found.dtype, self._space.dtype or float, "same_kind"):
            return EnvironmentFailure(
                f"{name} returned an observation of shape {found.shape} and dtype {found.dtype} instead of "
                f"{self._space}"
            )
        return EnvironmentFailure(f"{name} returned a step that cannot be used: {error}")

    def snapshots(self, completed_steps: int) -> Snapshots:
        """Return how to come back to where `completed_steps` steps led."""
        return [env.snapshot(completed_steps) for env in self.envs]

    def restore(
        self, snapshots: Snapshots, observations: Rows, seeds: Sequence[int], completed_steps: int
    ) -> dict[int, tuple[str, Any]]:
        """Replay each snapshot; an environment that arrives somewhere else starts a new episode."""
        restarted = {}
        for index, (env, snapshot, seen) in enumerate(zip(self.envs, snapshots, observations, strict=True)):
            try:
                observation = env.restore(snapshot)
                if not np.array_equal(np.asarray(observation, self.row_dtype), seen):
                    raise RestoreError("its replayed episode led to another observation")
            except (RestoreError, EnvironmentFailure) as error:
                first = env.restart(seeds[index], completed_steps)
                restarted[index] = str(error), np.asarray(first, self.row_dtype)
        return restarted

    def close(self) -> None:
        """Release the environments."""
        for env in self.envs:
            env.close()
        self.envs = []
