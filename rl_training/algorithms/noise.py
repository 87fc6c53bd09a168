"""Exploration noise, drawn in blocks: one random call per thousand steps instead of one per step."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from rl_training.seeding import derive_seed

Draw = Callable[[np.random.Generator, tuple[int, ...]], NDArray[np.float32]]


def normal(generator: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Standard normal noise."""
    return generator.standard_normal(shape, dtype=np.float32)


def uniform(generator: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Uniform noise in [0, 1)."""
    return generator.random(shape, dtype=np.float32)


def gumbel(generator: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Gumbel noise: the argmax of logits plus it is a sample of their softmax."""
    return generator.gumbel(size=shape).astype(np.float32)


class NoiseBlocks:
    """Noise by vector step, drawn in blocks that derive from (seed, block number) alone: there is no state to save."""

    def __init__(self, draw: Draw, shape: tuple[int, ...], *, seed: int, block_steps: int = 1024) -> None:
        self._draw, self._shape, self._seed, self._block_steps = draw, shape, seed, block_steps
        self._block_number = -1
        self._block = np.zeros((0, *shape), np.float32)

    def at(self, vector_step: int) -> NDArray[np.float32]:
        """Return the noise of this vector step, the same whenever it is asked for."""
        number, position = divmod(vector_step, self._block_steps)
        if number != self._block_number:
            generator = np.random.default_rng(derive_seed(self._seed, "noise block", number))
            self._block = self._draw(generator, (self._block_steps, *self._shape))
            self._block_number = number
        return self._block[position]


class StateNoise:
    """Noise that is linear in features of the state (see `networks.state_noise`), its weights kept for `hold` steps.

    The weights derive from the seed and the step alone, so there is no state to save.
    """

    def __init__(self, num_envs: int, features: int, actions: int, *, hold: int, seed: int) -> None:
        self._weights = NoiseBlocks(normal, (num_envs, features, actions), seed=seed, block_steps=16)
        self._hold = hold

    def at(self, vector_step: int, features: NDArray[np.float32], log_std: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the noise [N, A] of this vector step at features [N, F], for log-deviations [F, A] of the weights."""
        weights = np.exp(log_std) * self._weights.at(vector_step // self._hold)
        return np.einsum("nf,nfa->na", features, weights)
