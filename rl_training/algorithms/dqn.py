"""Deep Q-learning (Mnih et al., 2015) with double Q (van Hasselt et al., 2016): its loss, and the agent."""

import copy
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from rl_training.algorithms.compilation import CompiledUpdate
from rl_training.algorithms.noise import NoiseBlocks, uniform
from rl_training.algorithms.optimization import GRADIENT_NORM, Adam, FlatParameters, require_finite_gradient
from rl_training.config import DQNConfig, QLoss
from rl_training.data.replay_buffer import Transitions
from rl_training.networks.dueling import DuelingNetwork
from rl_training.networks.encoder import observation_body
from rl_training.networks.linear import linear
from rl_training.networks.numpy_mlp import acting_path, forward_function
from rl_training.seeding import derive_seed
from rl_training.spaces import DiscreteActions, ObservationSpec

TD_ERRORS = "td_errors"


def td_target(rewards: Tensor, terminated: Tensor, next_values: Tensor, gamma: float | Tensor) -> Tensor:
    """Target r + gamma V(s'), where a terminated state is worth nothing; a truncated one keeps its value.

    With n-step returns, `rewards` are the discounted sums and `gamma` [B] the discount of what follows each.
    """
    return rewards + gamma * (1.0 - terminated) * next_values


def greedy_next_values(target_q: Tensor, online_q: Tensor | None) -> Tensor:
    """Value [B] of the best next action, from action values [B, K].

    With `online_q` the online network chooses the action and the target network values it (double Q, eq. 4).
    """
    if online_q is None:
        return target_q.amax(-1)
    return target_q.gather(-1, online_q.argmax(-1, keepdim=True)).squeeze(-1)


def q_loss(predictions: Tensor, targets: Tensor, kind: QLoss, weights: Tensor | None = None) -> Tensor:
    """Mean penalty of the temporal-difference errors, each times its weight if there are weights."""
    penalty = F.smooth_l1_loss if kind is QLoss.huber else F.mse_loss
    if weights is None:
        return penalty(predictions, targets)
    return (weights * penalty(predictions, targets, reduction="none")).mean()


class DQNAgent:
    """Q-network, target network and optimizer."""

    def __init__(
        self,
        config: DQNConfig,
        observation: ObservationSpec,
        actions: DiscreteActions,
        *,
        num_envs: int = 1,
        seed: int = 0,
        device: torch.device | None = None,
        compile_update: bool = False,
    ) -> None:
        self.config, self.actions = config, actions
        self.device = device or torch.device("cpu")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(seed, "networks"))
            body, features = observation_body(observation, config)
            network = (
                DuelingNetwork(body, features, actions.count)
                if config.dueling
                else body.append(linear(features, actions.count))
            )
        self.q_network = network.to(self.device)
        self.target_network = copy.deepcopy(self.q_network).requires_grad_(False)
        self.optimizer = Adam(self.q_network, config.learning_rate)
        self._target_parameters = FlatParameters(self.target_network)
        self.compiled_update = (
            CompiledUpdate(
                lambda *tensors: self.learn(Transitions(*tensors)), [self.optimizer, self._target_parameters]
            )
            if compile_update
            else None
        )
        ranking = self.q_network.ranking if isinstance(self.q_network, DuelingNetwork) else self.q_network
        self.acting_path = acting_path(ranking, num_envs, self.device)
        self._ranks = forward_function(ranking, num_envs, self.device)
        self.td_errors: Tensor | None = None
        """Of the last batch, if transitions are drawn by them."""
        # Two numbers per environment: whether to explore, and which random action to take then.
        self.noise = NoiseBlocks(uniform, (2, num_envs), seed=derive_seed(seed, "exploration"))

    def act(self, observations: NDArray[np.float32]) -> NDArray[Any]:
        """Return the best action for each observation, as the environment takes it."""
        return self.env_actions(self._ranks(observations).argmax(-1))

    def explore(self, observations: NDArray[np.float32], vector_step: int, epsilon: float) -> NDArray[np.int64]:
        """Return the best action for each environment, or a random one with probability epsilon."""
        chance, choice = self.noise.at(vector_step)
        exploring = chance < epsilon
        explorers = np.count_nonzero(exploring)
        if not explorers:
            return self._ranks(observations).argmax(-1)
        random_actions = (choice * self.actions.count).astype(np.int64)
        if explorers == len(exploring):
            return random_actions
        return np.where(exploring, random_actions, self._ranks(observations).argmax(-1))

    def env_actions(self, actions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return actions as the environment takes them: shifted to its first number."""
        return actions + self.actions.start if self.actions.start else actions

    def update(self, batch: Transitions) -> dict[str, Tensor]:
        """Take one gradient step on a batch, compiled or not; returns detached metrics."""
        metrics = self.learn(batch) if self.compiled_update is None else self.compiled_update(*batch)
        require_finite_gradient(metrics)
        self.td_errors = metrics.pop(TD_ERRORS, None)
        return metrics

    def learn(self, batch: Transitions) -> dict[str, Tensor]:
        """Follow the gradient of a batch: the maths of `update`, as a function of tensors."""
        config = self.config
        with torch.no_grad():
            target_q = self.target_network(batch.next_observations)
            online_q = self.q_network(batch.next_observations) if config.double_q else None
            next_values = greedy_next_values(target_q, online_q)
            gamma = config.gamma if batch.discounts is None else batch.discounts
            targets = td_target(batch.rewards, batch.terminated, next_values, gamma)
        predictions = self.q_network(batch.observations).gather(-1, batch.actions.unsqueeze(-1)).squeeze(-1)
        loss = q_loss(predictions, targets, config.loss, batch.weights)
        gradient_norm = self.optimizer.minimize(loss, config.max_grad_norm)
        metrics = {
            "loss/value": loss.detach(),
            "policy/q_value": predictions.detach().mean(),
            GRADIENT_NORM: gradient_norm,
        }
        if config.prioritized:
            metrics[TD_ERRORS] = targets - predictions.detach()
        return metrics

    def update_target(self) -> None:
        """Move the target network towards the Q-network."""
        self._target_parameters.move_towards(self.optimizer.parameters, self.config.target_update_rate)

    def state_dict(self) -> dict[str, Any]:
        """Return all that changes while the agent learns."""
        return {
            "q_network": self.q_network.state_dict(),
            "target_network": self.target_network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self.q_network.load_state_dict(state["q_network"])
        self.target_network.load_state_dict(state["target_network"])
        self.optimizer.load_state_dict(state["optimizer"])
