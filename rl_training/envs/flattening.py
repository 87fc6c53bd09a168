"""Turns what environments give and take into flat rows, so that everything behind them handles one array.

Wrappers do it inside each environment: the vector environment, the recorder and the buffers then see one-dimensional
boxes alone. An environment whose spaces are flat already gets no wrapper.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from rl_training.errors import UserError
from rl_training.spaces import (
    ActionSpec,
    ContinuousActions,
    DiscreteActions,
    ImageShape,
    MultiDiscreteActions,
    ObservationSpec,
)

Row = NDArray[Any]


def describe_spaces(
    observation_space: gym.Space[Any], action_space: gym.Space[Any], env_id: str, frame_stack: int = 1
) -> tuple[ObservationSpec, ActionSpec]:
    """Return the spaces in plain numbers, or refuse those that no algorithm here can use."""
    return describe_observations(observation_space, env_id, frame_stack), describe_actions(action_space, env_id)


def describe_observations(space: gym.Space[Any], env_id: str, frame_stack: int = 1) -> ObservationSpec:
    """Return what a row holds: the sum of the vector leaves, and every image."""
    leaves = list(_leaves(space, env_id))
    size = sum(leaf.size for leaf in leaves if not leaf.image)
    images = tuple(leaf.image for leaf in leaves if leaf.image)
    if frame_stack > 1 and images and (size or len(images) > 1):
        raise UserError(
            f"env.frame_stack={frame_stack} stacks one image or one vector; {env_id} has {_one_line(space)}. "
            "Use env.frame_stack=1."
        )
    stacked = tuple((channels * frame_stack, height, width) for channels, height, width in images)
    return ObservationSpec(size * frame_stack, stacked, frame_stack)


def describe_actions(space: gym.Space[Any], env_id: str) -> ActionSpec:
    """Return the actions as agents choose them."""
    if isinstance(space, spaces.Discrete):
        return DiscreteActions(count=int(space.n), start=int(space.start))
    if isinstance(space, spaces.MultiDiscrete):
        return MultiDiscreteActions(tuple(space.nvec.reshape(-1).tolist()))
    if isinstance(space, spaces.MultiBinary):
        return MultiDiscreteActions((2,) * math.prod(space.shape))
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        return ContinuousActions(tuple(space.low.reshape(-1).tolist()), tuple(space.high.reshape(-1).tolist()))
    raise UserError(
        f"{env_id} has actions {_one_line(space)}; only Discrete, MultiDiscrete, MultiBinary and real Box are "
        "supported."
    )


def flat_env(env: gym.Env[Any, Any], env_id: str, frame_stack: int = 1) -> gym.Env[Any, Any]:
    """Give an environment flat observations and actions; one that has them stays as it is."""
    # A stack keeps what it is given, and an environment may write each observation into the same array.
    if frame_stack > 1 or not _is_flat_vector(env.observation_space):
        env = FlatObservations(env, env_id)
    if frame_stack > 1:
        stacked = gym.wrappers.FrameStackObservation(env, frame_stack, padding_type="reset")
        assert stacked.observation_space.shape is not None
        env = gym.wrappers.ReshapeObservation(stacked, (math.prod(stacked.observation_space.shape),))
    if isinstance(env.action_space, (spaces.MultiDiscrete, spaces.MultiBinary)) or (
        isinstance(env.action_space, spaces.Box) and len(env.action_space.shape) != 1
    ):
        env = FlatActions(env)
    return env


def observation_rows(space: gym.Space[Any], env_id: str, num_envs: int) -> Callable[[Any], Row]:
    """Return what turns a batch of observations, all at once, into new rows as `FlatObservations` lays them out."""
    if not isinstance(space, spaces.Box):
        raise UserError(
            f"{env_id} has observations {_one_line(space)}; environments that step all at once need one Box. "
            "Use env.vectorization=sync."
        )
    (leaf,) = _leaves(space, env_id)
    shape, dtype = (num_envs, *space.shape), np.uint8 if leaf.image else np.float32
    channels_last = leaf.image is not None and len(space.shape) == 3 and leaf.image[1:] == space.shape[:2]

    def rows(batch: Any) -> Row:
        found = np.asarray(batch)
        if found.shape != shape:
            raise ValueError(f"observations of shape {found.shape} instead of {shape}")
        return (found.transpose(0, 3, 1, 2) if channels_last else found).astype(dtype, order="C").reshape(num_envs, -1)

    return rows


def action_batches(space: gym.Space[Any], num_envs: int) -> Callable[[Row], Row]:
    """Return what turns the actions of all environments into the shape and type that they take all at once."""
    if isinstance(space, spaces.Discrete):
        return lambda actions: actions
    assert space.shape is not None
    shape, dtype = (num_envs, *space.shape), space.dtype
    start = space.start if isinstance(space, spaces.MultiDiscrete) else None

    def batch(actions: Row) -> Row:
        shaped = actions.reshape(shape).astype(dtype, copy=False)
        return shaped if start is None else shaped + start

    return batch


class FlatObservations(gym.ObservationWrapper[Row, Any, Any]):
    """Writes each observation into one row, laid out as `ObservationSpec` says."""

    def __init__(self, env: gym.Env[Any, Any], env_id: str) -> None:
        super().__init__(env)
        spec = describe_observations(env.observation_space, env_id)
        self._row_size, self._dtype, self._vector_size = spec.row_size, spec.dtype, spec.size
        leaves = list(_leaves(env.observation_space, env_id))
        self._vectors = [leaf for leaf in leaves if not leaf.image]
        self._images = [leaf for leaf in leaves if leaf.image]
        low, high = (0, 255) if self._images else (-np.inf, np.inf)
        self.observation_space = spaces.Box(low, high, (self._row_size,), self._dtype)

    def observation(self, observation: Any) -> Row:
        """Return the observation as a row."""
        row = np.empty(self._row_size, self._dtype)
        vector = row[: 4 * self._vector_size].view(np.float32) if self._images else row
        start = 0
        for leaf in self._vectors:
            vector[start : start + leaf.size] = leaf.numbers(observation)
            start += leaf.size
        start *= 4
        for leaf in self._images:
            row[start : start + leaf.size] = leaf.numbers(observation)
            start += leaf.size
        return row


class FlatActions(gym.ActionWrapper[Any, Row, Any]):
    """Takes actions as one row of numbers, counted from 0 where they are choices."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        space = env.action_space
        self._shape, self._dtype = space.shape, space.dtype
        self._start = space.start if isinstance(space, spaces.MultiDiscrete) else None
        if isinstance(space, spaces.MultiDiscrete):
            self.action_space = spaces.MultiDiscrete(space.nvec.reshape(-1))
        elif isinstance(space, spaces.MultiBinary):
            self.action_space = spaces.MultiBinary(math.prod(space.shape))
        elif isinstance(space, spaces.Box):
            low, high = (bound.reshape(-1).astype(np.float32) for bound in (space.low, space.high))
            self.action_space = spaces.Box(low, high, dtype=np.float32)

    def action(self, action: Row) -> Any:
        """Return the action in the environment's own shape and type."""
        shaped = np.asarray(action).reshape(self._shape).astype(self._dtype)
        return shaped if self._start is None else shaped + self._start


class _Leaf:
    """A part of an observation: how to find it, how many numbers it has, and its shape if it is an image."""

    def __init__(
        self, find: Callable[[Any], Any], encode: Callable[[Any], Row], size: int, image: ImageShape | None = None
    ) -> None:
        self._find, self._encode, self.size, self.image = find, encode, size, image

    def numbers(self, observation: Any) -> Row:
        """Return this part's numbers in one dimension."""
        return self._encode(self._find(observation))


def _leaves(space: gym.Space[Any], env_id: str, find: Callable[[Any], Any] = lambda whole: whole) -> Iterator[_Leaf]:
    """Yield the parts of a space, those of a Dict in its key order."""
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        parts = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        for key, part in parts:
            yield from _leaves(part, env_id, functools.partial(_part, find, key))
    elif isinstance(space, spaces.Discrete):
        yield _Leaf(find, _one_hot([int(space.n)], [int(space.start)]), int(space.n))
    elif isinstance(space, spaces.MultiDiscrete):
        counts, starts = space.nvec.reshape(-1).tolist(), space.start.reshape(-1).tolist()
        yield _Leaf(find, _one_hot(counts, starts), sum(counts))
    elif isinstance(space, spaces.Box) and _is_image(space):
        *_, height, width = shape = space.shape
        channels = shape[0] if len(shape) == 3 else 1
        if channels_last := len(shape) == 3 and shape[-1] < min(shape[:2]):
            height, width, channels = shape
        yield _Leaf(find, _pixels(shape, channels_last), math.prod(shape), (channels, height, width))
    elif isinstance(space, (spaces.Box, spaces.MultiBinary)):
        yield _Leaf(find, _flattened(space.shape), math.prod(space.shape))
    else:
        raise UserError(
            f"{env_id} has observations {_one_line(space)}; only Box, Discrete, MultiDiscrete, MultiBinary, and Dict "
            "and Tuple of them are supported."
        )


def _part(find: Callable[[Any], Any], key: Any, whole: Any) -> Any:
    return find(whole)[key]


def _is_flat_vector(space: gym.Space[Any]) -> bool:
    """Rows of bytes mean pixels from here on, so a vector of bytes is one to be converted."""
    return isinstance(space, spaces.Box) and len(space.shape) == 1 and space.dtype != np.uint8


def _is_image(space: spaces.Box) -> bool:
    """Bytes in two or three dimensions are pixels; numbers of another type are a vector, however they are shaped."""
    return space.dtype == np.uint8 and len(space.shape) in (2, 3)


def _one_hot(counts: list[int], starts: list[int]) -> Callable[[Any], Row]:
    first = np.concatenate([[0], np.cumsum(counts)[:-1]]) - np.array(starts)

    def encode(value: Any) -> Row:
        row = np.zeros(sum(counts), np.float32)
        row[np.asarray(value).reshape(len(counts)) + first] = 1.0
        return row

    return encode


def _pixels(shape: tuple[int, ...], channels_last: bool) -> Callable[[Any], Row]:
    def encode(value: Any) -> Row:
        image = np.asarray(value).reshape(shape)
        if image.dtype.kind == "f":  # numbers from 0 to 1 would all become 0
            raise ValueError(f"its image has dtype {image.dtype} instead of uint8")
        return (image.transpose(2, 0, 1) if channels_last else image).reshape(-1)

    return encode


def _flattened(shape: tuple[int, ...]) -> Callable[[Any], Row]:
    return lambda value: np.asarray(value).reshape(shape).reshape(-1)


def _one_line(value: object) -> str:
    return " ".join(str(value).split())
