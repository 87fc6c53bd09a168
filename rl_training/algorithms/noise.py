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

    BLOCK_STEPS = 1024

    def __init__(self, draw: Draw, shape: tuple[int, ...], *, seed: int) -> None:
        self._draw, self._shape, self._seed = draw, shape, seed
        self._block_number = -1
        self._block = np.zeros((0, *shape), np.float32)

    def at(self, vector_step: int) -> NDArray[np.float32]:
        """Return the noise of this vector step, the same whenever it is asked for."""
        number, position = divmod(vector_step, self.BLOCK_STEPS)
        if number != self._block_number:
            generator = np.random.default_rng(derive_seed(self._seed, "noise block", number))
            self._block = self._draw(generator, (self.BLOCK_STEPS, *self._shape))
            self._block_number = number
        return self._block[position]
