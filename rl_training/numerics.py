"""A cheap test for NaN and infinity, and a message that says where they are."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_training.errors import NonFiniteError


def all_finite(*arrays: NDArray[Any]) -> bool:
    """Whether no element is NaN or infinite; a dot product settles the usual case in half a microsecond an array."""
    total = 0.0
    with np.errstate(over="ignore"):  # very large numbers overflow here and are looked at one by one
        for array in arrays:
            if array.dtype == np.uint8:
                continue
            flat = array.ravel()
            total += float(flat.dot(flat))
    return math.isfinite(total) or all(bool(np.isfinite(array).all()) for array in arrays)


def require_finite(name: str, array: NDArray[Any], first_vector_step: int, num_envs: int) -> None:
    """Refuse NaN and infinity in `array` [T, N, ...], whose first row came from vector step `first_vector_step`."""
    if all_finite(array):
        return
    good = np.isfinite(array).reshape(*array.shape[:2], -1).all(-1)
    step, env = np.argwhere(~good)[0]
    raise non_finite(name, int(env), first_vector_step + int(step), num_envs)


def non_finite(name: str, env: int, vector_step: int, num_envs: int) -> NonFiniteError:
    """Return the error for a bad number; vector steps count from 0, the message speaks of env steps as metrics do."""
    step = (vector_step + 1) * num_envs
    return NonFiniteError(f"The {name} of environment {env} is NaN or infinite at step {step:,}.")
