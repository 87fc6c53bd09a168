"""Gymnasium's SyncVectorEnv in SAME_STEP mode, reduced to what training reads.

Its own `step` collects every info of every step, copies each observation twice and dispatches on the spaces: with one
CartPole that is more work than the environment's. Here observations go straight into the batch, and infos are collected
only where an episode ends. What is returned then is the same, and a test compares the two.
"""

from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from numpy.typing import NDArray


class SameStepVectorEnv(SyncVectorEnv):
    """Steps environments one after the other; one that ends its episode is reset in the same step."""

    def __init__(self, env_fns: Any) -> None:
        super().__init__(env_fns, copy=False, autoreset_mode=AutoresetMode.SAME_STEP)

    def step(
        self, actions: Any
    ) -> tuple[Any, NDArray[np.float32], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        """Step every environment; infos hold `final_obs` and `final_info` of the episodes that ended, and no others."""
        # New arrays, filled in place, are cheaper than copies of old ones.
        observations: Any = np.empty_like(self._observations)
        rewards = np.empty(self.num_envs, np.float32)
        terminated, truncated = np.empty(self.num_envs, np.bool_), np.empty(self.num_envs, np.bool_)
        shape = self.single_observation_space.shape
        infos: dict[str, Any] = {}
        for index, (env, action) in enumerate(zip(self.envs, actions, strict=True)):
            observation, rewards[index], ended, cut, info = env.step(action)
            terminated[index], truncated[index] = ended, cut
            if ended or cut:
                infos = self._add_info(infos, {"final_obs": observation, "final_info": info}, index)
                observation, _ = env.reset()
            self._env_obs[index] = observation
            if np.asarray(observation).shape != shape:  # assignment would broadcast it
                raise ValueError(f"observation of shape {np.asarray(observation).shape}")
            observations[index] = observation
        return observations, rewards, terminated, truncated, infos
