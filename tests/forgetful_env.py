"""An environment whose state survives its resets, so that replaying an episode cannot bring it back."""

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete


class Forgetful(gym.Env):
    """Counts its episodes and shows the count."""

    observation_space = Box(-np.inf, np.inf, (2,), np.float32)
    action_space = Discrete(2)
    episodes = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episodes += 1
        self.length = 0
        return np.array([self.episodes, 0], np.float32), {}

    def step(self, action):
        self.length += 1
        return np.array([self.episodes, self.length], np.float32), 1.0, False, self.length >= 30, {}


gym.register("forgetful/Walk-v0", entry_point=Forgetful)
