"""EnvPool: many environments stepped by threads in C++, with the semantics of all others.

EnvPool's environments reset late (see `late_reset_envs`) and are seeded when they are made, each with its own seed. It
cannot hand over the state of its simulators, so a resumed run starts new episodes and says so. Training, probing and
evaluation use the same simulator.
"""

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from rl_training.config import EnvConfig
from rl_training.envs.late_reset_envs import BareStep, LateResetEnvs
from rl_training.envs.snapshots import RestoreError
from rl_training.errors import UserError, did_you_mean
from rl_training.runtime.system import usable_cores

_LARGEST_SEED = 2**31 - 1
# What Atari environments call the number of frames in an observation.
_FRAMES = "stack_num"


class EnvPoolEnvs(LateResetEnvs):
    """`num_envs` environments of one pool, which has `env.workers` threads."""

    def __init__(self, config: EnvConfig) -> None:
        self._config = config
        single = SingleEnvPool(config, frames=config.frame_stack)
        super().__init__(config, single.observation_space, single.action_space)
        single.close()
        self._pool: Any = None

    def _reset_all(self, seeds: Sequence[int]) -> Any:
        threads = min(self._config.workers or usable_cores(), self._num_envs)
        self._pool = make_pool(self._config, seeds, frames=self._config.frame_stack, num_threads=threads)
        observations, _ = self._pool.reset()
        return observations

    def _step_all(self, actions: NDArray[Any]) -> BareStep:
        return self._pool.step(actions)[:4]

    def _state(self) -> dict[str, Any]:
        raise RestoreError("EnvPool cannot hand over the state of its environments")

    def close(self) -> None:
        """Release the environments."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None


class SingleEnvPool(gym.Env[Any, Any]):
    """A pool of one as an ordinary environment, for evaluations and for looking at its spaces."""

    def __init__(self, config: EnvConfig, frames: int = 1) -> None:
        self._config, self._frames = config, frames
        self._pool = make_pool(config, [0], frames=frames)
        self.observation_space, self.action_space = self._pool.observation_space, self._pool.action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode; a seed makes a new pool, since EnvPool takes seeds at no other time."""
        super().reset(seed=seed)
        if seed is not None:
            self._pool.close()
            self._pool = make_pool(self._config, [seed], frames=self._frames)
        observations, _ = self._pool.reset()
        return observations[0], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step the one environment."""
        batch = np.asarray([action], self.action_space.dtype)
        observations, rewards, terminated, truncated, _ = self._pool.step(batch)
        return observations[0], float(rewards[0]), bool(terminated[0]), bool(truncated[0]), {}

    def close(self) -> None:
        """Release the pool."""
        self._pool.close()


def make_pool(config: EnvConfig, seeds: Sequence[int], *, frames: int = 1, num_threads: int = 1) -> Any:
    """Make a pool with one environment for each seed, or say in one line why that cannot be."""
    with _without_warnings():
        try:
            import envpool
        except ImportError:
            raise UserError(
                "env.vectorization=envpool needs EnvPool: pip install 'rl_training[envpool]' (Python 3.11 or later)"
            ) from None
        name = config.id.removeprefix("ALE/")  # EnvPool has the games under their own names
        known = envpool.list_all_envs()
        if name not in known:
            raise UserError(
                f"EnvPool has no {config.id}.{did_you_mean(name, known)} Use env.vectorization=sync, or async if it is "
                "slow."
            )
        settings = dict(config.env_kwargs)
        if settings.get("episodic_life"):
            raise UserError(
                "env.env_kwargs.episodic_life=true does not go with env.vectorization=envpool: stacks of frames would "
                "run from one life into the next. Leave it out."
            )
        if _FRAMES in envpool.make_spec(name).config._fields:
            settings[_FRAMES] = frames
        elif frames > 1:
            raise UserError(
                f"env.frame_stack={frames} does not go with env.vectorization=envpool and {config.id}. "
                "Use env.vectorization=sync or async."
            )
        # EnvPool's seeds have 31 bits.
        limited = [seed & _LARGEST_SEED for seed in seeds]
        try:
            pool = envpool.make(
                name, env_type="gymnasium", num_envs=len(seeds), seed=limited, num_threads=num_threads, **settings
            )
            _ = pool.observation_space, pool.action_space  # made, with warnings, when first looked at
            return pool
        except Exception as error:
            reason = " ".join(str(error).split())
            raise UserError(f"Cannot make env.id={config.id}: {type(error).__name__}: {reason}") from error


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """EnvPool's spaces and imports warn about matters that no user can change."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
