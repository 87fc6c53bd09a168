"""Exploration noise, drawn in blocks: one random call per thousand steps instead of one per step."""

from collections.abc import Callable
from typing import Any

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
    """A stream of noise arrays whose whole state is a counter, because block b derives from (seed, b) alone."""

    BLOCK_STEPS = 1024

    def __init__(self, draw: Draw, shape: tuple[int, ...], *, seed: int) -> None:
        self._draw, self._shape, self._seed = draw, shape, seed
        self._steps = 0
        self._block = self._draw_block(0)

    def next(self) -> NDArray[np.float32]:
        """Return the noise of one vector step."""
        position = self._steps % self.BLOCK_STEPS
        if position == 0 and self._steps:
            self._block = self._draw_block(self._steps // self.BLOCK_STEPS)
        self._steps += 1
        return self._block[position]

    def _draw_block(self, index: int) -> NDArray[np.float32]:
        generator = np.random.default_rng(derive_seed(self._seed, "noise block", index))
        return self._draw(generator, (self.BLOCK_STEPS, *self._shape))

    def state_dict(self) -> dict[str, Any]:
        """Return the counter."""
        return {"steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the saved position of the stream."""
        self._steps = state["steps"]
        self._block = self._draw_block(self._steps // self.BLOCK_STEPS)
