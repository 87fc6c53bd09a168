"""Gymnasium's SyncVectorEnv in SAME_STEP mode, reduced to what training reads.

Its own `step` collects every info of every step, copies each observation twice and dispatches on the spaces: with one
CartPole that is more work than the environment's. Here observations go straight into the batch, and infos are collected
only where an episode ends. A test compares the two.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of an episode: which environment, its true last observation, and the info of its last step."""

    index: int
    observation: Any
    info: dict[str, Any]


class SameStepVectorEnv(SyncVectorEnv):
    """Steps environments one after the other; one that ends its episode is reset in the same step."""

    def __init__(self, env_fns: Any) -> None:
        super().__init__(env_fns, copy=False, autoreset_mode=AutoresetMode.SAME_STEP)
        self.row_dtype = np.uint8 if self.single_observation_space.dtype == np.uint8 else np.float32

    def step(  # type: ignore[override]  # rewards are float32 here
        self, actions: Any
    ) -> tuple[Any, NDArray[np.float32], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        """Step every environment; the infos have nothing but, under "endings", the episodes that ended."""
        # New arrays, filled in place, are cheaper than copies of old ones.
        shape = self.single_observation_space.shape
        observations: Any = np.empty((self.num_envs, *(shape or ())), self.row_dtype)
        rewards = np.empty(self.num_envs, np.float32)
        terminated, truncated = np.empty(self.num_envs, np.bool_), np.empty(self.num_envs, np.bool_)
        infos: dict[str, Any] = {}
        for index, (env, action) in enumerate(zip(self.envs, actions, strict=True)):
            observation, rewards[index], ended, cut, info = env.step(action)
            terminated[index], truncated[index] = ended, cut
            if ended or cut:
                infos.setdefault("endings", []).append(Ending(index, observation, info))
                observation, _ = env.reset()
            self._env_obs[index] = observation
            if np.asarray(observation).shape != shape:  # assignment would broadcast it
                raise ValueError(f"observation of shape {np.asarray(observation).shape}")
            observations[index] = observation
        return observations, rewards, terminated, truncated, infos
