"""Environment state without pickle: remember how the episode began and every action since, and play it again.

Copying or pickling an environment is silently wrong for MuJoCo and impossible for Box2D. Replaying rebuilds the state
of the simulator and of every wrapper below, and it checks itself: the last observation must come out the same.
"""

import copy
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.core import ActType, ObsType

from rl_training.envs.wrappers import innermost_learning_reward
from rl_training.errors import EnvironmentFailure

# A longer episode is not recorded to its end: neither memory nor the time of a resume may grow without bound.
MAX_RECORDED_STEPS = 100_000


class RestoreError(Exception):
    """The replayed environment did not arrive at the saved state."""


@dataclass
class EpisodeRecord:
    """How an episode began, its actions so far, and the sum of its rewards."""

    seed: int | None
    generator_before_reset: dict[str, Any] | None
    actions: list[Any] = field(default_factory=list)
    steps: int = 0
    rewards: float = 0.0


class EpisodeRecorder(gym.Wrapper[ObsType, ActType, ObsType, ActType]):
    """The outermost wrapper of a training environment: names it when it fails, and can bring it back.

    At the end of an episode the info has its return and length under "episode", as Gymnasium's statistics wrapper gives
    them; wrappers that change rewards for learning alone do not change this return. The episode before the current one
    is remembered as well, because a vector step that fails in one environment may already have ended an episode in
    another.
    """

    def __init__(self, env: gym.Env[ObsType, ActType], name: str) -> None:
        super().__init__(env)
        self.name = name
        self._learning_reward = innermost_learning_reward(env)
        self._episode = EpisodeRecord(None, None)
        self._previous_episode = self._episode
        self._total_steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[ObsType, dict[str, Any]]:
        """Reset, after noting what decides how the episode begins."""
        self._previous_episode = self._episode
        self._episode = EpisodeRecord(seed, None if seed is not None else self._generator_state())
        try:
            return self.env.reset(seed=seed, options=options)
        except Exception as error:
            raise self._failure("reset", error) from error

    def step(self, action: ActType) -> tuple[ObsType, Any, bool, bool, dict[str, Any]]:
        """Step, after noting the action."""
        episode = self._episode
        self._total_steps += 1
        episode.steps += 1
        if episode.steps > MAX_RECORDED_STEPS:
            episode.actions.clear()
        else:
            # A copy, because an environment may write into the action that it is given.
            episode.actions.append(action.copy() if isinstance(action, np.ndarray) else action)
        try:
            observation, reward, terminated, truncated, info = self.env.step(action)
        except Exception as error:
            raise self._failure("step", error) from error
        episode.rewards += float(reward)
        if terminated or truncated:
            learning = self._learning_reward
            episode_return = episode.rewards if learning is None else learning.raw_return
            info = {**info, "episode": {"r": episode_return, "l": episode.steps}}
            if (shape := np.asarray(observation).shape) != self.observation_space.shape:
                raise self._failure("step", ValueError(f"the last observation has shape {shape}"))
            # The vector environment resets at once, and an environment may reuse the array of its observations.
            observation = copy.copy(observation)
        return observation, reward, terminated, truncated, info

    @property
    def generator_before_reset(self) -> dict[str, Any] | None:
        """The generator from which the current episode began, if not from a seed."""
        return self._episode.generator_before_reset

    def _failure(self, call: str, error: Exception) -> EnvironmentFailure:
        return EnvironmentFailure(f"{self.name} failed in {call}: {type(error).__name__}: {error}")

    def _generator_state(self) -> dict[str, Any]:
        return dict(self.env.unwrapped.np_random.bit_generator.state)

    def snapshot(self, completed_steps: int) -> dict[str, Any]:
        """Return how to come back to where `completed_steps` steps led: now, or just before a step that failed."""
        episode, generator = self._episode, self._generator_state()
        steps, actions = episode.steps, episode.actions
        if self._total_steps > completed_steps:
            if steps == 0:
                episode = self._previous_episode
            steps, actions, generator = episode.steps - 1, episode.actions[: episode.steps - 1], {}
        return {
            "episode_return": episode.rewards if generator else None,
            "seed": episode.seed,
            "generator_before_reset": episode.generator_before_reset,
            "generator": generator,
            "steps": steps,
            "total_steps": completed_steps,
            "actions": np.asarray(actions),
        }

    def restore(self, snapshot: dict[str, Any]) -> ObsType:
        """Replay a snapshot and return the last observation; raises `RestoreError` when it cannot be the same state."""
        actions, generator_before_reset = snapshot["actions"], snapshot["generator_before_reset"]
        if len(actions) != snapshot["steps"]:
            raise RestoreError(f"its episode is longer than {MAX_RECORDED_STEPS:,} steps")
        if generator_before_reset is not None:
            if snapshot["generator"] and snapshot["generator"].keys() != self._generator_state().keys():
                raise RestoreError("it has another kind of random generator")
            self.env.unwrapped.np_random.bit_generator.state = generator_before_reset
        observation, _ = self.reset(seed=snapshot["seed"])
        # Training steps discrete environments with Python integers, whose arithmetic differs from that of numpy's.
        for action in actions.tolist() if actions.ndim == 1 else actions:
            observation, _, terminated, truncated, _ = self.step(action)
            if terminated or truncated:
                raise RestoreError("its replayed episode ended early")
        self._total_steps = snapshot["total_steps"]
        if snapshot["generator"] and not _same_state(self._generator_state(), snapshot["generator"]):
            raise RestoreError("its replayed episode used other random numbers")
        if snapshot["generator"] and self._episode.rewards != snapshot["episode_return"]:
            raise RestoreError("its replayed episode gave other rewards")
        return observation

    def restart(self, seed: int, total_steps: int) -> ObsType:
        """Start a new episode in place of one that could not be restored."""
        observation, _ = self.reset(seed=seed)
        self._total_steps = total_steps
        return observation


def _same_state(first: Any, second: Any) -> bool:
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(_same_state(first[key], second[key]) for key in first)
    return bool(np.array_equal(first, second))
