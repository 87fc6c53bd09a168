"""What PPO collects between updates: `num_steps` vector steps of `num_envs` environments."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_training.numerics import all_finite, non_finite, require_finite
from rl_training.spaces import ActionSpec, ObservationSpec, action_layout
from rl_training.transfer import to_device


class RolloutBatch(NamedTuple):
    """A minibatch of transitions; every field has the same first dimension."""

    observations: Tensor
    actions: Tensor
    log_probs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor
    valid: Tensor | None = None
    """Which rows are transitions; None says all."""


def generalized_advantages(
    rewards: Tensor, values: Tensor, next_values: Tensor, dones: Tensor, gamma: float, gae_lambda: float
) -> Tensor:
    """Generalised advantage estimation (Schulman et al., 2016, eq. 16), all arguments [T, N].

    `next_values[t]` is the value of the state that step t led to: zero if the episode terminated there, the value of
    the true last observation if it was truncated. `dones[t]` says that the episode ended at step t, either way.
    """
    deltas = (rewards + gamma * next_values - values).numpy()
    carry = (gamma * gae_lambda * (1.0 - dones)).numpy()
    advantages = np.empty_like(deltas)
    following = np.zeros_like(deltas[0])
    # In place and row by row: half the time of plain expressions, which make an array each.
    for delta, kept, advantage in zip(deltas[::-1], carry[::-1], advantages[::-1], strict=True):
        np.multiply(kept, following, out=advantage)
        np.add(advantage, delta, out=advantage)
        following = advantage
    return torch.from_numpy(advantages)


class RolloutBuffer:
    """Tensors [T, N, ...], written one vector step at a time and read as shuffled minibatches.

    The policy does not change while a rollout is collected, so log-probabilities and values are not stored step by
    step: the agent computes them in one pass when the rollout is full. Collection lives in CPU memory, where a numpy
    view of each tensor makes writing a row cheap; `iter_minibatches` moves the rollout to `device` once.
    """

    def __init__(
        self,
        num_steps: int,
        num_envs: int,
        observation: ObservationSpec,
        actions: ActionSpec,
        *,
        seed: int,
        device: torch.device | None = None,
        masked: bool = False,
    ) -> None:
        """Allocate; `masked` if some rows may be no transitions."""
        self.num_steps, self.num_envs = num_steps, num_envs
        self._observation = observation
        self.device = device or torch.device("cpu")
        steps = (num_steps, num_envs)
        self.obs = torch.from_numpy(np.zeros((*steps, observation.row_size), observation.dtype))
        action_shape, action_dtype = action_layout(actions)
        self.actions = torch.from_numpy(np.zeros((*steps, *action_shape), action_dtype))
        self.rewards = torch.zeros(steps)
        self.dones = torch.zeros(steps)
        self.values = torch.zeros(steps)
        self.logprobs = torch.zeros(steps)
        self.advantages = torch.zeros(steps)
        self.returns = torch.zeros(steps)
        self.valid = torch.ones(steps, dtype=torch.bool) if masked else None
        # True last observations of truncated episodes, by (step, env): rare, so kept apart instead of in every row.
        self.final_observations: dict[tuple[int, int], NDArray[Any]] = {}
        self.position = 0
        self._shuffle = torch.Generator().manual_seed(seed)
        self._collected = (*_COLLECTED, "valid") if masked else _COLLECTED
        self._rows = {name: getattr(self, name).numpy() for name in self._collected}

    @property
    def full(self) -> bool:
        """Whether every step has been collected."""
        return self.position == self.num_steps

    def reset(self) -> None:
        """Start a new rollout in the same memory."""
        self.position = 0
        self.final_observations.clear()

    def add(
        self,
        observations: NDArray[Any],
        actions: NDArray[Any],
        rewards: NDArray[np.float32],
        terminated: NDArray[np.bool_],
        truncated: NDArray[np.bool_],
        next_observations: NDArray[Any],
        valid: NDArray[np.bool_] | None = None,
    ) -> None:
        """Store one vector step; `next_observations` holds the true last observation where an episode ended."""
        t, rows = self.position, self._rows
        rows["obs"][t] = observations
        rows["actions"][t] = actions
        rows["rewards"][t] = rewards
        rows["dones"][t] = terminated | truncated
        if valid is not None:
            rows["valid"][t] = valid
        if truncated.any():
            for env in np.flatnonzero(truncated & ~terminated):
                self.final_observations[t, int(env)] = next_observations[env]
        self.position += 1

    def end_episodes(self, envs: Sequence[int], last_observations: NDArray[Any]) -> None:
        """Cut the episodes of these environments after the newest step: they began anew."""
        if self.position:
            for env, observation in zip(envs, last_observations, strict=True):
                if not self._rows["dones"][self.position - 1, env]:
                    self._rows["dones"][self.position - 1, env] = 1.0
                    self.final_observations[self.position - 1, env] = observation

    def check_finite(self, since: int) -> None:
        """Refuse NaN and infinity in what was collected since env step `since`, where this rollout began."""
        first_vector_step = since // self.num_envs
        vectors = self._observation.vectors(self._rows["obs"][: self.position])
        require_finite("observation", vectors, first_vector_step - 1, self.num_envs)
        require_finite("reward", self._rows["rewards"][: self.position], first_vector_step, self.num_envs)
        for (step, env), observation in self.final_observations.items():
            if not all_finite(self._observation.vectors(observation)):
                raise non_finite("last observation", env, first_vector_step + step, self.num_envs)

    def truncated_observations(self) -> Tensor:
        """Return the true last observations [K, D] of the truncated episodes, in the order they were stored."""
        if not self.final_observations:
            return self.obs.new_zeros(0, self.obs.shape[-1])
        return torch.from_numpy(np.stack(list(self.final_observations.values())))

    def compute_returns_and_advantages(
        self, last_values: Tensor, gamma: float, gae_lambda: float, truncated_values: Tensor | None = None
    ) -> None:
        """Fill `advantages` and `returns` from `rewards`, `values` and the values after the rollout.

        A row that is no transition follows the end of an episode, so nothing is carried across it; what is computed
        for the row itself means nothing.
        `last_values` [N] belong to the observations that follow the last step; `truncated_values` [K] to
        `truncated_observations()`. Without the latter, a truncated episode counts as if its end were worth nothing.
        """
        next_values = torch.cat([self.values[1:], last_values.reshape(1, -1).to(self.values)])
        next_values = next_values * (1.0 - self.dones)
        if truncated_values is not None and len(truncated_values):
            steps, envs = zip(*self.final_observations, strict=True)
            next_values[list(steps), list(envs)] = truncated_values.to(next_values)
        self.advantages = generalized_advantages(self.rewards, self.values, next_values, self.dones, gamma, gae_lambda)
        self.returns = self.advantages + self.values

    def valued(self) -> tuple[Tensor, Tensor]:
        """Return the values and returns of all transitions."""
        return (
            (self.values, self.returns) if self.valid is None else (self.values[self.valid], self.returns[self.valid])
        )

    def iter_minibatches(self, minibatch_size: int) -> Iterator[RolloutBatch]:
        """Yield every transition exactly once, in random order over the flattened step and env dimensions."""
        columns = [self.obs, self.actions, self.logprobs, self.values, self.advantages, self.returns]
        if self.valid is not None:
            columns.append(self.valid)
        flat = [to_device(tensor.flatten(0, 1), self.device) for tensor in columns]
        order = torch.randperm(self.num_steps * self.num_envs, generator=self._shuffle)
        order = to_device(order, self.device)
        # Shuffle the whole rollout once; minibatches are then slices of it and cost nothing to make.
        shuffled = [tensor.index_select(0, order) for tensor in flat]
        for start in range(0, len(order), minibatch_size):
            yield RolloutBatch(*(tensor[start : start + minibatch_size] for tensor in shuffled))

    def state_dict(self) -> dict[str, Any]:
        """Return the steps collected so far and the shuffling generator."""
        return {
            "position": self.position,
            "collected": {name: getattr(self, name)[: self.position].clone() for name in self._collected},
            "final_observations": [
                [step, env, observation.copy()] for (step, env), observation in self.final_observations.items()
            ],
            "shuffle": self._shuffle.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self.reset()
        self.position = state["position"]
        for name in self._collected:
            getattr(self, name)[: self.position] = state["collected"][name]
        self.final_observations = {(step, env): observation for step, env, observation in state["final_observations"]}
        self._shuffle.set_state(state["shuffle"])


_COLLECTED = ("obs", "actions", "rewards", "dones")
