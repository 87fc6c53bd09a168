"""Environments that go wrong at a chosen step: importing this module registers them under faulty/."""

import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete

MADE: list["Faulty"] = []


class Faulty(gym.Env):
    """A random walk with short random episodes; in one environment, at one step of its life, something is wrong.

    `fault` is what: nan or inf in an observation or reward, an exception in step or reset, a wrong shape or dtype, or
    hang.
    `mended` names a file whose existence turns the fault off, as a user would mend the environment before resuming.
    """

    def __init__(self, fault: str = "", at: int = 10, env: int = 0, continuous: bool = False, mended: str = ""):
        self.observation_space = Box(-np.inf, np.inf, (3,), np.float32)
        self.action_space = Box(-1.0, 1.0, (1,), np.float32) if continuous else Discrete(2)
        self.fault, self.at, self.faulty_env, self.mended = fault, at, env, mended
        self.life = 0
        self.index = len(MADE)
        MADE.append(self)

    def _due(self, *faults: str) -> bool:
        if self.fault not in faults or self.index != self.faulty_env or self.life < self.at:
            return False
        return not (self.mended and Path(self.mended).exists())

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if self._due("raise in reset"):
            raise RuntimeError("the simulator did not start")
        self.walk = self.np_random.normal(size=3).astype(np.float32)
        self.length = 0
        return self.walk.copy(), {}

    def step(self, action):
        self.life += 1
        if self._due("raise in step"):
            raise RuntimeError("the simulator broke")
        while self._due("hang"):
            time.sleep(0.01)
        self.length += 1
        self.walk = self.walk + 0.1 * self.np_random.normal(size=3).astype(np.float32)
        self.walk[0] += 0.01 * float(np.asarray(action).sum())
        observation: Any = self.walk.copy()
        reward = 1.0
        if self._due("nan observation"):
            observation[1] = np.nan
        if self._due("inf observation"):
            observation[2] = np.inf
        if self._due("nan reward"):
            reward = float("nan")
        if self._due("wrong shape"):
            observation = np.zeros(4, np.float32)
        if self._due("wrong dtype"):
            observation = np.array(["a", "b", "c"])
        terminated = bool(self.np_random.random() < 0.1)
        return observation, reward, terminated, self.length >= 12, {}


gym.register("faulty/Walk-v0", entry_point=Faulty)
