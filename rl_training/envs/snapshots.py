"""Environment state without pickle: remember how the episode began and every action since, and play it again.

Copying or pickling an environment is silently wrong for MuJoCo and impossible for Box2D. Replaying rebuilds the state
of the simulator and of every wrapper below, and it checks itself: the last observation must come out the same.
"""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.core import ActType, ObsType

# A longer episode is not recorded to its end: neither memory nor the time of a resume may grow without bound.
MAX_RECORDED_STEPS = 100_000


class RestoreError(Exception):
    """The replayed environment did not arrive at the saved observation."""


class EpisodeRecorder(gym.Wrapper[ObsType, ActType, ObsType, ActType]):
    """The outermost wrapper of a training environment; `snapshot` and `restore` are its point."""

    def __init__(self, env: gym.Env[ObsType, ActType]) -> None:
        super().__init__(env)
        self._reset_seed: int | None = None
        self._generator_before_reset: dict[str, Any] | None = None
        self._actions: list[ActType] = []
        self._steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[ObsType, dict[str, Any]]:
        """Reset, after noting what decides how the episode begins."""
        self._reset_seed = seed
        self._generator_before_reset = None if seed is not None else self._generator_state()
        self._actions.clear()
        self._steps = 0
        return self.env.reset(seed=seed, options=options)

    def step(self, action: ActType) -> tuple[ObsType, Any, bool, bool, dict[str, Any]]:
        """Step, after noting the action."""
        self._steps += 1
        if self._steps <= MAX_RECORDED_STEPS:
            self._actions.append(action)
        return self.env.step(action)

    def _generator_state(self) -> dict[str, Any]:
        return dict(self.env.unwrapped.np_random.bit_generator.state)

    def snapshot(self) -> dict[str, Any]:
        """Return how to come back here."""
        return {
            "seed": self._reset_seed,
            "generator_before_reset": self._generator_before_reset,
            "generator": self._generator_state(),
            "steps": self._steps,
            "actions": np.asarray(self._actions),
        }

    def restore(self, snapshot: dict[str, Any]) -> ObsType:
        """Replay a snapshot and return the last observation; raises `RestoreError` when it cannot be the same state."""
        actions = snapshot["actions"]
        if len(actions) != snapshot["steps"]:
            raise RestoreError(f"the episode is longer than {MAX_RECORDED_STEPS:,} steps")
        if snapshot["seed"] is None:
            self.env.unwrapped.np_random.bit_generator.state = snapshot["generator_before_reset"]
        observation, _ = self.reset(seed=snapshot["seed"])
        # Later snapshots must name the generator as it was in the original run, not a seed-less guess.
        self._generator_before_reset = snapshot["generator_before_reset"]
        for action in actions:
            observation, _, terminated, truncated, _ = self.step(action)
            if terminated or truncated:
                raise RestoreError("the replayed episode ended early")
        if not _same_state(self._generator_state(), snapshot["generator"]):
            raise RestoreError("the replayed episode used other random numbers")
        return observation


def _same_state(first: Any, second: Any) -> bool:
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(_same_state(first[key], second[key]) for key in first)
    return bool(np.array_equal(first, second))
