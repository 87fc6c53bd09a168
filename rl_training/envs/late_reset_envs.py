"""Environments that one object steps all at once, and that reset in the step after an episode's end.

That step ignores the action and returns the first observation of the next episode: no transition, but a row of the
arrays all the same. `EnvStep.valid` marks it, so that it enters no target, no loss and no statistics. Gymnasium calls
this NEXT_STEP; its vectorised entry points, such as that of CartPole, and EnvPool know nothing else.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from types import FunctionType, ModuleType
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from rl_training.config import EnvConfig
from rl_training.envs.flattening import action_batches, describe_spaces, observation_rows
from rl_training.envs.snapshots import RestoreError
from rl_training.envs.vector_env import Endings, Rows, Snapshots, VectorStep
from rl_training.errors import EnvironmentFailure, UserError
from rl_training.spaces import ActionSpec, ObservationSpec

BareStep = tuple[Any, Any, Any, Any]


class LateResetEnvs:
    """Rows, episode statistics and the mask of transitions; what steps is left to others."""

    late_resets = True

    def __init__(self, config: EnvConfig, observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> None:
        self._id, self._num_envs = config.id, config.num_envs
        self._rows: Callable[[Any], Rows] = observation_rows(observation_space, config.id, config.num_envs)
        self._batch: Callable[[NDArray[Any]], NDArray[Any]] = action_batches(action_space, config.num_envs)
        self._begin(0)

    def _begin(self, steps: int) -> None:
        self._returns = np.zeros(self._num_envs)
        self._lengths = np.zeros(self._num_envs, np.int64)
        self._ended = np.zeros(self._num_envs, np.bool_)
        self._steps = steps

    def _reset_all(self, seeds: Sequence[int]) -> Any:
        raise NotImplementedError

    def _step_all(self, actions: NDArray[Any]) -> BareStep:
        raise NotImplementedError

    def _state(self) -> dict[str, Any]:
        """Return the state of what steps, or raise `RestoreError` with the reason why it has none to give."""
        raise NotImplementedError

    def _set_state(self, state: dict[str, Any]) -> None:
        raise NotImplementedError

    def reset(self, seeds: Sequence[int]) -> Rows:
        """Start an episode in every environment."""
        self._begin(0)
        return self._first_observations(seeds)

    def _first_observations(self, seeds: Sequence[int]) -> Rows:
        try:
            return self._rows(self._reset_all(seeds))
        except UserError:
            raise
        except Exception as error:
            raise EnvironmentFailure(f"{self._id} failed in reset: {type(error).__name__}: {error}") from error

    def step(self, actions: NDArray[Any]) -> VectorStep:
        """Step every environment; where the last step ended an episode, begin the next one instead."""
        self._steps += 1
        try:
            found, given, terminated, truncated = self._step_all(self._batch(actions))
            observations, rewards = self._rows(found), np.array(given, np.float32)
            terminated, truncated = np.array(terminated, np.bool_), np.array(truncated, np.bool_)
        except Exception as error:
            raise EnvironmentFailure(f"{self._id} failed in step: {type(error).__name__}: {error}") from error
        valid = ~self._ended
        self._ended = terminated | truncated
        self._returns += given
        self._lengths += 1
        endings = None
        if self._ended.any():
            where = np.flatnonzero(self._ended)
            endings = Endings(where, observations[where], self._returns[where].tolist(), self._lengths[where].tolist())
        begun = ~valid
        if begun.any():  # what the new episode has so far is its first observation
            self._returns[begun], self._lengths[begun] = 0.0, 0
        return observations, rewards, terminated, truncated, endings, valid

    def snapshots(self, completed_steps: int) -> Snapshots:
        """Return the state of all environments as one, or why there is none."""
        try:
            if self._steps > completed_steps:
                raise RestoreError("it failed in the middle of a step")
            state = self._state()
        except RestoreError as error:
            return [{"reason": str(error)}]
        own = {"returns": self._returns.copy(), "lengths": self._lengths.copy(), "ended": self._ended.copy()}
        return [{"state": state, **own}]

    def restore(
        self, snapshots: Snapshots, observations: Rows, seeds: Sequence[int], completed_steps: int
    ) -> dict[int, tuple[str, Any]]:
        """Take the state back; without one, every environment starts a new episode."""
        self._begin(completed_steps)
        first = self._first_observations(seeds)
        (snapshot,) = snapshots
        try:
            if "reason" in snapshot:
                raise RestoreError(snapshot["reason"])
            self._set_state(snapshot["state"])
        except RestoreError as error:
            if "state" in snapshot:  # half of it may have been set
                first = self._first_observations(seeds)
            return {index: (str(error), row) for index, row in enumerate(first)}
        self._returns, self._lengths = snapshot["returns"].copy(), snapshot["lengths"].copy()
        self._ended = snapshot["ended"].copy()
        return {}

    def close(self) -> None:
        """Release the environments."""


class GymnasiumVectorEnvs(LateResetEnvs):
    """An environment's own vectorised version, which Gymnasium calls its vector entry point."""

    def __init__(self, config: EnvConfig, observation: ObservationSpec, actions: ActionSpec) -> None:
        self._envs = _made(config)
        spaces = self._envs.single_observation_space, self._envs.single_action_space
        if describe_spaces(*spaces, config.id) != (observation, actions):
            self._envs.close()
            raise UserError(  # such as that of Atari, which preprocesses frames; evaluation would play another task
                f"The vectorised version of {config.id} has other spaces than the environment itself. "
                "Use env.vectorization=sync."
            )
        super().__init__(config, *spaces)

    def _reset_all(self, seeds: Sequence[int]) -> Any:
        observations, _ = self._envs.reset(seed=seeds[0])  # there is one generator for all
        return observations

    def _step_all(self, actions: NDArray[Any]) -> BareStep:
        return self._envs.step(actions)[:4]

    def _state(self) -> dict[str, Any]:
        return copied_attributes(self._envs)

    def _set_state(self, state: dict[str, Any]) -> None:
        set_attributes(self._envs, state)

    def close(self) -> None:
        """Release the environments."""
        self._envs.close()


def check_vectorised(config: EnvConfig) -> None:
    """Refuse an environment that has no vectorised version, or settings that it cannot follow."""
    spec = gym.registry.get(config.id)
    if spec is None or spec.vector_entry_point is None:
        raise UserError(
            f"{config.id} has no vectorised version in Gymnasium. Use env.vectorization=sync, or async if it is slow."
        )
    if config.frame_stack > 1:
        raise UserError(
            f"env.frame_stack={config.frame_stack} does not go with env.vectorization=vector. "
            "Use env.vectorization=sync or async."
        )


def _made(config: EnvConfig) -> gym.vector.VectorEnv[Any, Any, Any]:
    check_vectorised(config)
    try:
        envs = gym.make_vec(config.id, config.num_envs, vectorization_mode="vector_entry_point", **config.env_kwargs)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise UserError(f"Cannot make env.id={config.id}: {type(error).__name__}: {reason}") from error
    mode = envs.metadata.get("autoreset_mode")
    if mode is not AutoresetMode.NEXT_STEP:
        envs.close()
        raise UserError(
            f"The vectorised version of {config.id} has autoreset mode {mode}, not NEXT_STEP. "
            "Use env.vectorization=sync."
        )
    return envs


# State of an environment whose attributes are numbers, arrays and generators


def copied_attributes(env: Any) -> dict[str, Any]:
    """Return a copy of all that an environment and its wrappers remember, if it is nothing but numbers and generators.

    Arrays that share memory are refused, since copies of them would not.
    """
    state: dict[str, dict[str, Any]] = {"arrays": {}, "scalars": {}, "generators": {}, "plain": {}}
    for name, value in _attributes(env):
        if isinstance(value, np.ndarray) and value.dtype != object:
            state["arrays"][name] = value
        elif isinstance(value, np.generic):
            state["scalars"][name] = np.asarray(value)
        elif isinstance(value, np.random.Generator):
            state["generators"][name] = dict(value.bit_generator.state)
        elif _is_plain(value):
            state["plain"][name] = copy.deepcopy(value)
        else:
            attribute = name.partition(".")[2]
            raise RestoreError(f"its attribute {attribute} of type {type(value).__name__} cannot be saved")
    arrays = state["arrays"]
    for first in arrays:
        for second in arrays:
            if first < second and np.may_share_memory(arrays[first], arrays[second]):
                names = " and ".join(name.partition(".")[2] for name in (first, second))
                raise RestoreError(f"its attributes {names} share memory")
    state["arrays"] = {name: array.copy() for name, array in arrays.items()}
    return state


def set_attributes(env: Any, state: dict[str, Any]) -> None:
    """Take back what `copied_attributes` gave; after a reset, so that its attributes are there."""
    chain = list(_chain(env))
    names = {name for part in state.values() for name in part}
    if names != {name for name, _ in _attributes(env)}:
        raise RestoreError("it has other attributes than before")

    def put(name: str, value: Any) -> None:
        depth, _, attribute = name.partition(".")
        setattr(chain[int(depth)], attribute, value)

    for name, generator in state["generators"].items():
        depth, _, attribute = name.partition(".")
        present = getattr(chain[int(depth)], attribute)
        if present is None or present.bit_generator.state["bit_generator"] != generator["bit_generator"]:
            raise RestoreError("it has another kind of random generator")
        present.bit_generator.state = generator
    for name, array in state["arrays"].items():
        put(name, array.copy())
    for name, scalar in state["scalars"].items():
        put(name, scalar[()])
    for name, value in state["plain"].items():
        put(name, copy.deepcopy(value))


def _chain(env: Any) -> Iterator[Any]:
    """Yield the wrappers, outermost first, and the environment itself."""
    yield env
    if isinstance(env, gym.vector.VectorWrapper):
        yield from _chain(env.env)


_CONSTANT = (gym.Space, EnvSpec, Enum, type, FunctionType, ModuleType, np.dtype)


def _attributes(env: Any) -> Iterator[tuple[str, Any]]:
    for depth, part in enumerate(_chain(env)):
        for name, value in vars(part).items():
            wrapped = name == "env" and isinstance(part, gym.vector.VectorWrapper)
            if not wrapped and not isinstance(value, _CONSTANT):
                yield f"{depth}.{name}", value


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))
