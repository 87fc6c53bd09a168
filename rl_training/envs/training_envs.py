"""The environments a trainer steps: float32 observations in, true next observations and finished episodes out."""

import logging
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from rl_training.config import TrainConfig
from rl_training.envs.factory import describe_spaces, env_seed, make_vector_env
from rl_training.envs.snapshots import RestoreError
from rl_training.seeding import derive_seed

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Episode:
    """A finished training episode, in raw rewards."""

    episode_return: float
    length: int


@dataclass(slots=True)
class EnvStep:
    """One vector step; arrays have one row per environment."""

    observations: NDArray[np.float32]
    """What the policy sees next: where an episode ended, the first observation of the new one."""
    next_observations: NDArray[np.float32]
    """What this step led to: where an episode ended, its true last observation."""
    rewards: NDArray[np.float32]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    episodes: list[Episode] = field(default_factory=list)


class TrainingEnvs:
    """`num_envs` environments behind one `step`."""

    def __init__(self, config: TrainConfig) -> None:
        self._envs = make_vector_env(config)
        self.num_envs = config.env.num_envs
        observation_space = self._envs.single_observation_space
        self.observation_spec, self.action_spec = describe_spaces(
            observation_space, self._envs.single_action_space, config.env.id
        )
        self._encode = ObservationEncoder(observation_space)
        self._config = config
        self.observations: NDArray[np.float32] = np.zeros((self.num_envs, self.observation_spec.size), np.float32)
        """What the policy sees next."""
        self.inexact_reason: str | None = None
        """Why the last `load_state_dict` could not rebuild every environment, if it could not."""

    def reset(self) -> NDArray[np.float32]:
        """Start an episode in every environment, each with its own seed."""
        observations, _ = self._envs.reset(seed=[env_seed(self._config, index) for index in range(self.num_envs)])
        self.observations = self._encode(observations)
        return self.observations

    def step(self, actions: NDArray[Any]) -> EnvStep:
        """Step every environment; those that end their episode start a new one at once."""
        raw_observations, rewards, terminated, truncated, infos = self._envs.step(actions)
        observations = self.observations = self._encode(raw_observations)
        step = EnvStep(observations, observations, rewards.astype(np.float32), terminated, truncated)
        if "final_obs" in infos:
            self._read_episode_ends(step, infos)
        return step

    def _read_episode_ends(self, step: EnvStep, infos: dict[str, Any]) -> None:
        ended = infos["_final_obs"]
        step.next_observations = step.observations.copy()
        step.next_observations[ended] = self._encode(np.stack(infos["final_obs"][ended]))
        statistics = infos["final_info"]["episode"]
        step.episodes = [
            Episode(float(statistics["r"][index]), int(statistics["l"][index])) for index in np.flatnonzero(ended)
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return the current observations and how each environment came to its own."""
        return {"observations": self.observations.copy(), "environments": list(self._envs.call("snapshot"))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Bring every environment back to where it was; one that cannot be rebuilt starts a new episode instead."""
        self.observations = state["observations"].copy()
        for index, (env, snapshot) in enumerate(zip(self._envs.envs, state["environments"], strict=True)):
            try:
                observation = self._encode(np.expand_dims(env.get_wrapper_attr("restore")(snapshot), 0))[0]
                if not np.array_equal(observation, self.observations[index]):
                    raise RestoreError("the replayed episode led to another observation")
            except RestoreError as error:
                self.inexact_reason = f"environment {index} was reset because {error}"
                log.warning("resume is not exact: %s", self.inexact_reason)
                seed = derive_seed(self._config.seed, f"env after {snapshot['steps']} steps", index)
                self.observations[index] = self._encode(np.expand_dims(env.reset(seed=seed)[0], 0))[0]

    def close(self) -> None:
        """Release the environments."""
        self._envs.close()


class ObservationEncoder:
    """Turns a batch of raw observations into fresh float32 vectors [N, D]; Discrete ones become one-hot."""

    def __init__(self, space: gym.Space[Any]) -> None:
        self._start = int(space.start) if isinstance(space, gym.spaces.Discrete) else None
        self._one_hot = np.eye(int(space.n), dtype=np.float32) if isinstance(space, gym.spaces.Discrete) else None

    def __call__(self, observations: Any) -> NDArray[np.float32]:
        """Encode; always a copy, because the environment reuses its arrays."""
        if self._one_hot is not None:
            return self._one_hot[np.asarray(observations) - self._start]
        return np.array(observations, dtype=np.float32)
