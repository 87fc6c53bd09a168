"""The environments a trainer steps: rows of observations in, true next observations and finished episodes out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_training.config import TrainConfig
from rl_training.envs.factory import env_seed, make_vector_env, probe_spaces
from rl_training.numerics import require_finite
from rl_training.seeding import derive_seed


@dataclass(frozen=True, slots=True)
class Episode:
    """A finished training episode, in raw rewards."""

    episode_return: float
    length: int


@dataclass(slots=True)
class EnvStep:
    """One vector step; arrays have one row per environment, laid out as the `ObservationSpec` says."""

    observations: NDArray[Any]
    """What the policy sees next: where an episode ended, the first observation of the new one."""
    next_observations: NDArray[Any]
    """What this step led to: where an episode ended, its true last observation."""
    rewards: NDArray[np.float32]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    valid: NDArray[np.bool_] | None = None
    """Which rows are transitions; None says all.

    Environments with late resets always say it. There, `observations` where an episode ended are its last ones, which
    the policy looks at in vain: the next step ignores its action, leads to the first observation of the new episode,
    and is not valid.
    """
    episodes: Sequence[Episode] = ()


class TrainingEnvs:
    """`num_envs` environments behind one `step`."""

    def __init__(self, config: TrainConfig) -> None:
        self._envs = make_vector_env(config)
        self.num_envs = config.env.num_envs
        self.observation_spec, self.action_spec = probe_spaces(config.env)
        self.late_resets = self._envs.late_resets
        """Whether some rows of a step may be no transitions; see `EnvStep.valid`."""
        self._config = config
        shape = (self.num_envs, self.observation_spec.row_size)
        self.observations: NDArray[Any] = np.zeros(shape, self.observation_spec.dtype)
        """What the policy sees next."""
        self.vector_steps = 0
        self.restarted: list[int] = []
        """The environments that the last `load_state_dict` could not rebuild."""
        self.abandoned_observations: NDArray[Any] = self.observations[:0]
        """The last observations of those, in the episodes that they could not go on with."""
        self.inexact_reason: str | None = None
        """Why the last `load_state_dict` could not rebuild every environment, if it could not."""
        self._normalizing = config.env.normalize_observation or config.env.normalize_reward

    def reset(self) -> NDArray[Any]:
        """Start an episode in every environment, each with its own seed."""
        self.observations = self._envs.reset([env_seed(self._config, index) for index in range(self.num_envs)])
        require_finite("first observation", self.observations[None], -1, self.num_envs)
        return self.observations

    def step(self, actions: NDArray[Any]) -> EnvStep:
        """Step every environment; those that end their episode start a new one."""
        observations, rewards, terminated, truncated, endings, valid = self._envs.step(actions)
        step = EnvStep(observations, observations, rewards, terminated, truncated, valid)
        if endings is not None:
            if not self.late_resets:
                step.next_observations = observations.copy()
                step.next_observations[endings.indices] = endings.observations
            step.episodes = list(map(Episode, endings.returns, endings.lengths))
        if self._normalizing:  # a bad number would poison the statistics; else trainers look once per collect phase
            require_finite("observation", step.next_observations[None], self.vector_steps, self.num_envs)
            require_finite("reward", step.rewards[None], self.vector_steps, self.num_envs)
        self.observations = observations
        self.vector_steps += 1
        return step

    def state_dict(self) -> dict[str, Any]:
        """Return the current observations and how each environment came to its own.

        After a step that failed this is the state before it, for those environments too that had already stepped.
        """
        return {
            "vector_steps": self.vector_steps,
            "observations": self.observations.copy(),
            "environments": self._envs.snapshots(self.vector_steps),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Bring every environment back to where it was; one that cannot be rebuilt starts a new episode instead."""
        self.vector_steps = state["vector_steps"]
        self.observations = state["observations"].copy()
        purpose = f"env resumed at {self.vector_steps}"
        seeds = [derive_seed(self._config.seed, purpose, index) for index in range(self.num_envs)]
        restarted = self._envs.restore(state["environments"], self.observations, seeds, self.vector_steps)
        self.abandoned_observations = self.observations[list(restarted)]
        reasons: dict[str, list[int]] = {}
        for index, (reason, observation) in restarted.items():
            self.restarted.append(index)
            self.observations[index] = observation
            reasons.setdefault(reason, []).append(index)
        if reasons:
            self.inexact_reason = "; ".join(
                f"{_named(indices)}, because {reason}" for reason, indices in reasons.items()
            )

    def close(self) -> None:
        """Release the environments."""
        self._envs.close()


def _named(indices: Sequence[int]) -> str:
    if len(indices) == 1:
        return f"environment {indices[0]} started a new episode"
    return f"environments {', '.join(map(str, indices))} started new episodes"
