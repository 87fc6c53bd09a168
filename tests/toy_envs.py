"""Small environments whose answer is known: importing this module registers them under toy/."""

from collections.abc import Sequence
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Text, Tuple
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space


class Identity(gym.Env):
    """Name the state: reward 1 for the action with the state's number; the next state is random."""

    STATES = 6  # enough that an untrained policy names them all with probability 6^-6

    def __init__(self, observation_start: int = 0, action_start: int = 0):
        self.observation_space = Discrete(self.STATES, start=observation_start)
        self.action_space = Discrete(self.STATES, start=action_start)

    def _next(self) -> Any:
        self._state = int(self.np_random.integers(self.STATES))
        return self._state + int(self.observation_space.start)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._next(), {}

    def step(self, action):
        reward = float(action - self.action_space.start == self._state)
        return self._next(), reward, False, False, {}


class ContinuousIdentity(gym.Env):
    """Hit the number you see: reward minus the squared distance; the number is anywhere in the action's range."""

    def __init__(self, low: float = -1.0, high: float = 1.0):
        self.observation_space = self.action_space = Box(low, high, (1,), np.float32)

    def _next(self) -> Any:
        low, high = self.observation_space.low, self.observation_space.high
        self._state = self.np_random.uniform(low, high).astype(np.float32)
        return self._state

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._next(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        reward = -float(np.square(action - self._state).sum())
        return self._next(), reward, False, False, {}


class ConstantReward(gym.Env):
    """Reward 1 for anything, one state, and an end after `length` steps: either "truncated" or "terminated".

    If the end is only a time limit, the state is worth 1 / (1 - gamma). If it is a true end, a learner that cannot see
    the time finds V = 1 + gamma (1 - 1/length) V on average over the steps.
    """

    def __init__(self, ends: str = "truncated", length: int = 5, continuous: bool = False):
        self.observation_space = Box(0.0, 1.0, (1,), np.float32)
        self.action_space = Box(-1.0, 1.0, (1,), np.float32) if continuous else Discrete(2)
        self._ends, self._length = ends, length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._steps = 0
        return np.ones(1, np.float32), {}

    def step(self, action):
        self._steps += 1
        ended = self._steps == self._length
        terminated, truncated = ended and self._ends == "terminated", ended and self._ends == "truncated"
        return np.ones(1, np.float32), 1.0, terminated, truncated, {}


class Counter(gym.Env):
    """Observes (episode, step), both from 0, so that every transition is recognisable; the reward is the new step.

    The episode's number outlives `reset`: state that no seed and no actions of the episode can bring back.
    """

    def __init__(self, ends: str = "truncated", length: int = 3, continuous: bool = False):
        self.observation_space = Box(0.0, np.inf, (2,), np.float32)
        self.action_space = Box(-1.0, 1.0, (1,), np.float32) if continuous else Discrete(2)
        self._ends, self._length = ends, length
        self._episode = -1

    def _observe(self) -> Any:
        return np.array([self._episode, self._steps], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._episode += 1
        self._steps = 0
        return self._observe(), {}

    def step(self, action):
        self._steps += 1
        ended = self._steps == self._length
        terminated = ended and self._ends in ("terminated", "both")
        truncated = ended and self._ends in ("truncated", "both")
        return self._observe(), float(self._steps), terminated, truncated, {}


class ReusedArrays(Counter):
    """A Counter that, like many a hand-written environment, writes every observation into one array of its own."""

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self._array = np.zeros(2, np.float32)

    def _observe(self) -> Any:
        self._array[:] = self._episode, self._steps
        return self._array


class InPlaceActions(gym.Env):
    """Moves by the square of the action, and computes the square in the array that it was given."""

    def __init__(self):
        self.observation_space = Box(-np.inf, np.inf, (1,), np.float32)
        self.action_space = Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._position = np.zeros(1, np.float32)
        return self._position.copy(), {}

    def step(self, action):
        action *= action
        self._position += action
        return self._position.copy(), 0.0, False, False, {}


class Failing(gym.Env):
    """Observes random numbers, ends after 3 steps, and fails when it is asked to."""

    ACTIONS = ("behave", "raise", "bad shape")

    def __init__(self):
        self.observation_space = Box(-np.inf, np.inf, (2,), np.float64)
        self.action_space = Discrete(len(self.ACTIONS))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._steps = 0
        return self.np_random.normal(size=2), {}

    def step(self, action):
        self._steps += 1
        observation = self.np_random.normal(size=2)
        if self.ACTIONS[action] == "raise":
            raise ValueError("asked to fail")
        if self.ACTIONS[action] == "bad shape":
            observation = np.zeros(3)
        return observation, 1.0, self._steps == 3, False, {}


class Climb(gym.Env):
    """Climbs by half a step or a whole one: terminated at height 3, truncated after 4 steps, no randomness.

    Each episode starts a little higher than the one before, up to the eighth. The reward is the height.
    """

    def __init__(self, oddity: str = ""):
        self.observation_space = Box(0.0, np.inf, (2,), np.float32)
        self.action_space = Discrete(2)
        self._episode = -1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._episode += 1
        self._height, self._steps = 0.125 * (self._episode % 8), 0
        return np.array([self._height, self._steps], np.float32), {}

    def step(self, action):
        self._height += 0.5 + 0.5 * int(action)
        self._steps += 1
        observation = np.array([self._height, self._steps], np.float32)
        return observation, self._height, self._height >= 3.0, self._steps >= 4, {}


class VectorClimb(gym.vector.VectorEnv):
    """The same as `Climb`, all at once, and in NEXT_STEP mode. `oddity` is what a resume cannot deal with."""

    metadata: ClassVar[dict[str, Any]] = {"autoreset_mode": AutoresetMode.NEXT_STEP}

    def __init__(self, num_envs: int = 1, oddity: str = ""):
        self.num_envs = num_envs
        size = 3 if oddity == "other spaces" else 2
        self.single_observation_space = Box(0.0, np.inf, (size,), np.float32)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.single_action_space = Discrete(2)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.oddity = oddity
        self.episode = np.full(num_envs, -1)
        self.state = np.zeros((2, num_envs))
        self.ended = np.zeros(num_envs, np.bool_)
        if oddity == "object":
            self.simulator = object()
        if oddity == "shared memory":
            self.heights = self.state[0]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode += 1
        self.state[:] = 0.125 * (self.episode % 8), np.zeros(self.num_envs)
        self.ended[:] = False
        return self.state.T.astype(np.float32), {}

    def step(self, actions):
        if self.oddity == "raise" and self.state[1].max() == 3:
            raise RuntimeError("the simulator broke")
        begin = self.ended.copy()
        self.episode += begin
        self.state[0] = np.where(begin, 0.125 * (self.episode % 8), self.state[0] + 0.5 + 0.5 * actions)
        self.state[1] = np.where(begin, 0.0, self.state[1] + 1.0)
        terminated, truncated = self.state[0] >= 3.0, self.state[1] >= 4
        self.ended[:] = terminated | truncated
        return self.state.T.astype(np.float32), np.where(begin, 0.0, self.state[0]), terminated, truncated, {}


class NeedsPackage(gym.Env):
    """Cannot be made: it needs a package that is not there."""

    def __init__(self):
        raise gym.error.DependencyNotInstalled('no_such_engine is not installed, run `pip install "no_such_engine"`')


class TextObservations(gym.Env):
    """Has observations that no algorithm here can use."""

    def __init__(self):
        self.observation_space = Text(5)
        self.action_space = Discrete(2)


_NUMBER = Box(-1.0, 1.0, (1,), np.float32)


class Naming(gym.Env):
    """Name the state, two random bits, which are shown and answered in the ways of many spaces.

    Reward 1 if both bits are right. A Box is answered with 0.5 or -0.5 for each bit, and costs the squared distance.
    """

    OBSERVATIONS: ClassVar[dict[str, gym.Space]] = {
        "matrix": Box(0.0, 5.0, (2, 2), np.float64),
        "bytes": Box(0, 255, (2,), np.uint8),
        "discrete": Discrete(4, start=3),
        "multi discrete": MultiDiscrete([2, 2], start=[1, 5]),
        "multi binary": MultiBinary(2),
        "dict": Dict(high=_NUMBER, low=Dict(inner=MultiBinary(1))),
        "tuple": Tuple([Discrete(2), _NUMBER]),
        "image": Box(0, 255, (7, 7, 1), np.uint8),
        "image and vector": Dict(image=Box(0, 255, (7, 7), np.uint8), vector=_NUMBER),
    }
    ACTIONS: ClassVar[dict[str, gym.Space]] = {
        "discrete": Discrete(4, start=-1),
        "multi discrete": MultiDiscrete([[2], [2]], start=[[3], [-1]]),
        "multi binary": MultiBinary([1, 2]),
        "box": Box(-1.0, 1.0, (2, 1), np.float64),
    }

    def __init__(self, shown: str = "discrete", answered: str = "discrete"):
        self.observation_space, self.action_space = self.OBSERVATIONS[shown], self.ACTIONS[answered]
        self._shown, self._answered = shown, answered

    def _observe(self) -> Any:
        self._bits = self.np_random.integers(2, size=2)
        high, low = self._bits.tolist()
        signs = (2 * self._bits - 1).astype(np.float32)
        matrix = np.zeros((2, 2))
        matrix[high, low] = 5.0
        image = np.zeros((7, 7, 1), np.uint8)
        image[4 * high : 4 * high + 3, 4 * low : 4 * low + 3] = 255
        stripe = np.zeros((7, 7), np.uint8)
        stripe[:, 4 * high : 4 * high + 3] = 255
        ways = {
            "matrix": matrix,
            "bytes": self._bits.astype(np.uint8),
            "discrete": 3 + 2 * high + low,
            "multi discrete": self._bits + np.array([1, 5]),
            "multi binary": self._bits.astype(np.int8),
            "dict": {"high": signs[:1], "low": {"inner": self._bits[1:].astype(np.int8)}},
            "tuple": (high, signs[1:]),
            "image": image,
            "image and vector": {"image": stripe, "vector": signs[1:]},
        }
        return ways[self._shown]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._observe(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        high, low = self._bits.tolist()
        if self._answered == "box":
            reward = 1.0 - float(np.square(action.reshape(-1) - (self._bits - 0.5)).sum())
        elif self._answered == "discrete":
            reward = float(action == 2 * high + low - 1)
        else:
            first = np.array([3, -1]) if self._answered == "multi discrete" else 0
            reward = float((action.reshape(-1) - first == self._bits).all())
        return self._observe(), reward, False, False, {}


class Motion(gym.Env):
    """Say whether the stripe moves left or right, which no single picture tells: reward 1 if right.

    If it is fatal, a wrong answer in the first column ends the episode.
    """

    def __init__(self, as_vector: bool = False, fatal: bool = False):
        self._as_vector, self._fatal = as_vector, fatal
        self.observation_space = Box(0.0, 1.0, (7,), np.float32) if as_vector else Box(0, 255, (7, 7), np.uint8)
        self.action_space = Discrete(2)

    def _observe(self) -> Any:
        if self._as_vector:
            return np.eye(7, dtype=np.float32)[self._column]
        picture = np.zeros((7, 7), np.uint8)
        picture[:, self._column] = 255
        return picture

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._right, self._column = int(self.np_random.integers(2)), int(self.np_random.integers(7))
        return self._observe(), {}

    def step(self, action):
        reward = float(action == self._right)
        terminated = self._fatal and not reward and self._column == 0
        self._column = (self._column + (1 if self._right else -1)) % 7
        return self._observe(), reward, terminated, False, {}


class Shown(gym.Env):
    """Shows what it is told to, one after the other and the last one for ever, and keeps the actions that it gets."""

    def __init__(self, observation_space: gym.Space, action_space: gym.Space, observations: Sequence[Any] = ()):
        self.observation_space, self.action_space = observation_space, action_space
        self._observations = list(observations)
        self.actions: list[Any] = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._steps = 0
        return self._observations[0], {}

    def step(self, action):
        self.actions.append(action)
        self._steps += 1
        return self._observations[min(self._steps, len(self._observations) - 1)], 0.0, False, False, {}


gym.register("toy/Naming-v0", Naming, max_episode_steps=10)
gym.register("toy/Motion-v0", Motion, max_episode_steps=10)
gym.register("toy/Identity-v0", Identity, max_episode_steps=10)
gym.register("toy/ContinuousIdentity-v0", ContinuousIdentity, max_episode_steps=10)
gym.register("toy/ConstantReward-v0", ConstantReward)
gym.register("toy/Counter-v0", Counter)
gym.register("toy/ReusedArrays-v0", ReusedArrays)
gym.register("toy/InPlaceActions-v0", InPlaceActions, max_episode_steps=50)
gym.register("toy/Failing-v0", Failing)
gym.register("toy/Climb-v0", Climb, vector_entry_point=VectorClimb)
gym.register("toy/NeedsPackage-v0", NeedsPackage)
gym.register("toy/TextObservations-v0", TextObservations)
