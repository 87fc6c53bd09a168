"""Running normalisation of observations and rewards; its statistics are part of the checkpoint."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_training.config import EnvConfig

_EPSILON = 1e-8


class RunningMoments:
    """Mean and variance of a stream of batches (Chan et al., 1979), in float64."""

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        self.mean = np.zeros(shape)
        self.variance = np.ones(shape)
        self.count = 0

    def update(self, batch: NDArray[Any]) -> None:
        """Take in a batch [N, *shape]."""
        batch_mean, batch_variance, batch_count = batch.mean(0), batch.var(0), len(batch)
        total = self.count + batch_count
        delta = batch_mean - self.mean
        self.mean = self.mean + delta * (batch_count / total)
        self.variance = (
            self.variance * (self.count / total)
            + batch_variance * (batch_count / total)
            + delta**2 * (self.count * batch_count / total**2)
        )
        self.count = total

    def state_dict(self) -> dict[str, Any]:
        """Return the statistics."""
        return {"mean": np.asarray(self.mean).copy(), "variance": np.asarray(self.variance).copy(), "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self.mean, self.variance, self.count = state["mean"], state["variance"], state["count"]


class Normalizer:
    """Scales observations to mean 0 and deviation 1, and rewards by the deviation of the discounted return.

    `update` moves the statistics and is called by trainers only, so evaluation sees them frozen. What is switched off
    passes through untouched.
    """

    def __init__(self, config: EnvConfig, observation_size: int, gamma: float) -> None:
        self.config = config
        self._gamma = gamma
        self._observations = RunningMoments((observation_size,))
        self._returns = RunningMoments()
        self._discounted_returns = np.zeros(config.num_envs)

    def update(
        self,
        observations: NDArray[np.float32],
        rewards: NDArray[np.float32] | None = None,
        *ended: NDArray[np.bool_],
        valid: NDArray[np.bool_] | None = None,
    ) -> None:
        """Take in the raw observations [N, D] of a vector step and, except at the first reset, its rewards and ends.

        With late resets (see `EnvStep.valid`) an observation counts if an action will follow it, a reward if it belongs
        to a transition: the same ones as where environments reset at once.
        """
        if valid is not None:
            self._update_masked(observations, rewards, np.logical_or(*ended), valid)
            return
        if self.config.normalize_observation:
            self._observations.update(observations.astype(np.float64))
        if self.config.normalize_reward and rewards is not None:
            self._discounted_returns = self._discounted_returns * self._gamma + rewards
            self._returns.update(self._discounted_returns)
            for environments in ended:
                self._discounted_returns[environments] = 0.0

    def _update_masked(
        self,
        observations: NDArray[np.float32],
        rewards: NDArray[np.float32] | None,
        ended: NDArray[np.bool_],
        valid: NDArray[np.bool_],
    ) -> None:
        if self.config.normalize_observation and not ended.all():
            self._observations.update(observations[~ended].astype(np.float64))
        if self.config.normalize_reward and rewards is not None:
            # Where the step is no transition, the discounted return is 0: it was set so when the episode ended.
            self._discounted_returns = np.where(valid, self._discounted_returns * self._gamma + rewards, 0.0)
            if valid.any():
                self._returns.update(self._discounted_returns[valid])
            self._discounted_returns[ended] = 0.0

    def end_episodes(self, envs: Sequence[int]) -> None:
        """Let the returns of these environments begin anew."""
        self._discounted_returns[list(envs)] = 0.0

    def observations(self, raw: NDArray[Any]) -> NDArray[Any]:
        """Scale and clip observations."""
        if not self.config.normalize_observation:
            return raw
        scaled = (raw - self._observations.mean) / np.sqrt(self._observations.variance + _EPSILON)
        limit = self.config.clip_observation
        return np.clip(scaled, -limit, limit).astype(np.float32)

    def rewards(self, raw: NDArray[np.float32]) -> NDArray[np.float32]:
        """Scale and clip rewards; their mean is left alone, because shifting it would change the task."""
        if not self.config.normalize_reward:
            return raw
        scaled = raw / np.sqrt(self._returns.variance + _EPSILON)
        limit = self.config.clip_reward
        return np.clip(scaled, -limit, limit).astype(np.float32)

    def state_dict(self) -> dict[str, Any]:
        """Return the statistics."""
        return {
            "observations": self._observations.state_dict(),
            "returns": self._returns.state_dict(),
            "discounted_returns": self._discounted_returns.copy(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self._observations.load_state_dict(state["observations"])
        self._returns.load_state_dict(state["returns"])
        self._discounted_returns = state["discounted_returns"]
