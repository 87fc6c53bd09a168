"""The environments a trainer steps: rows of observations in, true next observations and finished episodes out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_training.config import TrainConfig
from rl_training.envs.factory import env_seed, make_vector_env, probe_spaces
from rl_training.envs.snapshots import RestoreError
from rl_training.envs.sync_vector_env import Ending
from rl_training.errors import EnvironmentFailure
from rl_training.numerics import require_finite
from rl_training.seeding import derive_seed
from rl_training.spaces import DiscreteActions


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
    episodes: Sequence[Episode] = ()


class TrainingEnvs:
    """`num_envs` environments behind one `step`."""

    def __init__(self, config: TrainConfig) -> None:
        self._envs = make_vector_env(config)
        self.num_envs = config.env.num_envs
        self.observation_spec, self.action_spec = probe_spaces(config.env)
        self._config = config
        shape = (self.num_envs, self.observation_spec.row_size)
        self.observations: NDArray[Any] = np.zeros(shape, self.observation_spec.dtype)
        """What the policy sees next."""
        self._discrete = isinstance(self.action_spec, DiscreteActions)
        self.vector_steps = 0
        self.restarted: list[int] = []
        """The environments that the last `load_state_dict` could not rebuild."""
        self.inexact_reason: str | None = None
        """Why the last `load_state_dict` could not rebuild every environment, if it could not."""
        self._normalizing = config.env.normalize_observation or config.env.normalize_reward

    def reset(self) -> NDArray[Any]:
        """Start an episode in every environment, each with its own seed."""
        observations, _ = self._envs.reset(seed=[env_seed(self._config, index) for index in range(self.num_envs)])
        self.observations = observations.astype(self.observations.dtype)
        require_finite("first observation", self.observations[None], -1, self.num_envs)
        return self.observations

    def step(self, actions: NDArray[Any]) -> EnvStep:
        """Step every environment; those that end their episode start a new one at once."""
        try:
            # Gymnasium checks each discrete action; Python integers pass in a quarter of the time of numpy's.
            observations, rewards, terminated, truncated, infos = self._envs.step(
                actions.tolist() if self._discrete else actions
            )
            step = EnvStep(observations, observations, rewards, terminated, truncated)
            if infos:
                self._read_episode_ends(step, infos["endings"])
        except (ValueError, TypeError, IndexError) as error:
            raise self._bad_observation(error) from error
        if self._normalizing:  # a bad number would poison the statistics; else trainers look once per collect phase
            require_finite("observation", step.next_observations[None], self.vector_steps, self.num_envs)
            require_finite("reward", step.rewards[None], self.vector_steps, self.num_envs)
        self.observations = observations
        self.vector_steps += 1
        return step

    def _bad_observation(self, error: Exception) -> EnvironmentFailure:
        """Name the environment whose observation does not fit its space, now that stacking them has failed."""
        space = self._envs.single_observation_space
        for index, observation in enumerate(map(np.asarray, self._envs._env_obs)):
            if observation.shape != space.shape or not np.can_cast(
                observation.dtype, space.dtype or float, "same_kind"
            ):
                found = f"an observation of shape {observation.shape} and dtype {observation.dtype}"
                return EnvironmentFailure(
                    f"{self._config.env.id} (environment {index}) returned {found} instead of {space}"
                )
        return EnvironmentFailure(f"{self._config.env.id} returned a step that cannot be used: {error}")

    def _read_episode_ends(self, step: EnvStep, endings: Sequence[Ending]) -> None:
        step.next_observations = step.observations.copy()
        for ending in endings:
            step.next_observations[ending.index] = ending.observation
        statistics = [ending.info["episode"] for ending in endings]
        step.episodes = [Episode(float(episode["r"]), int(episode["l"])) for episode in statistics]

    def state_dict(self) -> dict[str, Any]:
        """Return the current observations and how each environment came to its own.

        After a step that failed this is the state before it, for those environments too that had already stepped.
        """
        return {
            "vector_steps": self.vector_steps,
            "observations": self.observations.copy(),
            "environments": list(self._envs.call("snapshot", self.vector_steps)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Bring every environment back to where it was; one that cannot be rebuilt starts a new episode instead."""
        self.vector_steps = state["vector_steps"]
        self.observations = state["observations"].copy()
        for index, (env, snapshot) in enumerate(zip(self._envs.envs, state["environments"], strict=True)):
            try:
                observation = env.get_wrapper_attr("restore")(snapshot)
                if not np.array_equal(np.asarray(observation, self.observations.dtype), self.observations[index]):
                    raise RestoreError("its replayed episode led to another observation")
            except (RestoreError, EnvironmentFailure) as error:
                self.restarted.append(index)
                self.inexact_reason = f"environment {index} started a new episode, because {error}"
                seed = derive_seed(self._config.seed, f"env resumed at {self.vector_steps}", index)
                self.observations[index] = env.get_wrapper_attr("restart")(seed, self.vector_steps)

    def close(self) -> None:
        """Release the environments."""
        self._envs.close()
