"""Soft actor-critic with a learned temperature (Haarnoja et al., 2018): its losses, and the agent.

Actions live in (-1, 1) here; `env_actions` scales them to the environment's bounds for stepping.
"""

import copy
import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from rl_training.algorithms.compilation import Changing, CompiledUpdate
from rl_training.algorithms.noise import NoiseBlocks, StateNoise, normal, uniform
from rl_training.algorithms.optimization import GRADIENT_NORM, Adam, FlatParameters, require_finite_gradient
from rl_training.config import SACConfig
from rl_training.data.replay_buffer import Transitions
from rl_training.networks.numpy_mlp import acting_path, forward_function
from rl_training.networks.squashed_gaussian import LOG_STD_MAX, LOG_STD_MIN, MEAN_LIMIT, SquashedGaussianActor
from rl_training.networks.twin_critic import TwinCritic
from rl_training.seeding import derive_seed
from rl_training.spaces import ContinuousActions, ObservationSpec
from rl_training.transfer import to_device


def soft_td_target(
    rewards: Tensor, terminated: Tensor, next_q: Tensor, next_log_probs: Tensor, temperature: Tensor, gamma: float
) -> Tensor:
    """Soft Bellman target r + gamma (Q(s', a') - alpha log pi(a'|s')) (eqs. 2 and 3); nothing follows termination."""
    return rewards + gamma * (1.0 - terminated) * (next_q - temperature * next_log_probs)


def critic_loss(first_q: Tensor, second_q: Tensor, targets: Tensor) -> Tensor:
    """Sum of both critics' half mean squared errors (eq. 5)."""
    return 0.5 * (F.mse_loss(first_q, targets) + F.mse_loss(second_q, targets))


def actor_loss(log_probs: Tensor, q_values: Tensor, temperature: Tensor) -> Tensor:
    """Mean of alpha log pi(a|s) - Q(s, a) over reparametrised actions (eq. 7)."""
    return (temperature * log_probs - q_values).mean()


def temperature_loss(log_temperature: Tensor, log_probs: Tensor, target_entropy: float) -> Tensor:
    """Raise the temperature while the entropy -log pi is below its target (eq. 18, in the log of alpha)."""
    return -(log_temperature * (log_probs.detach() + target_entropy)).mean()


class Temperature(nn.Module):
    """The weight of the entropy, kept as its logarithm so that it stays positive."""

    def __init__(self, initial: float) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.tensor(math.log(initial)))


class SACAgent:
    """Actor, twin critics with targets, temperature, and their optimizers."""

    def __init__(
        self,
        config: SACConfig,
        observation: ObservationSpec,
        actions: ContinuousActions,
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
            self.actor = SquashedGaussianActor(config, observation, actions).to(self.device)
            self.critics = TwinCritic(config, observation, actions).to(self.device)
        self.target_critics = copy.deepcopy(self.critics).requires_grad_(False)
        self.temperature = Temperature(config.temperature).to(self.device)
        self.target_entropy = -float(actions.size) if config.target_entropy is None else config.target_entropy

        self.actor_optimizer = Adam(self.actor, config.learning_rate)
        self.critic_optimizer = Adam(self.critics, config.learning_rate)
        self.temperature_optimizer = Adam(self.temperature, config.learning_rate)
        self._target_parameters = FlatParameters(self.target_critics)
        optimizers: list[Changing] = [self.actor_optimizer, self.critic_optimizer, self.temperature_optimizer]
        self.compiled_update = (
            CompiledUpdate(
                lambda *tensors: self.learn(Transitions(*tensors[:-2]), *tensors[-2:]),
                [*optimizers, self._target_parameters],
            )
            if compile_update
            else None
        )
        self.acting_path = acting_path(self.actor.network, num_envs, self.device)
        self._actor_outputs = forward_function(self.actor.network, num_envs, self.device)

        self._low, self._high = np.array(actions.low, np.float32), np.array(actions.high, np.float32)
        self._center, self._half_range = (self._low + self._high) / 2, (self._high - self._low) / 2
        self.noise = NoiseBlocks(normal, (num_envs, actions.size), seed=derive_seed(seed, "exploration"))
        self.warmup_noise = NoiseBlocks(uniform, (num_envs, actions.size), seed=derive_seed(seed, "warm-up"))
        if self.actor.state_noise:
            *body, head = self.actor.network
            self._features = forward_function(nn.Sequential(*body), num_envs, self.device)
            self._means = forward_function(nn.Sequential(head), num_envs, self.device)
            self._log_std = self.actor.log_std.detach()
            self.state_noise = StateNoise(
                *(num_envs, *self._log_std.shape), hold=config.noise_hold, seed=derive_seed(seed, "exploration")
            )
        self._update_noise = torch.Generator().manual_seed(derive_seed(seed, "update noise"))

    def act(self, observations: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the squashed mean action for each observation, as the environment takes it."""
        outputs = self._actor_outputs(observations)
        size = self.actions.size
        mean = outputs.clip(-MEAN_LIMIT, MEAN_LIMIT) if self.actor.state_noise else outputs[:, :size]
        return self.env_actions(np.tanh(mean))

    def explore(self, observations: NDArray[np.float32], vector_step: int) -> NDArray[np.float32]:
        """Sample an action in (-1, 1) of the current policy for each environment; the step decides the noise."""
        if self.actor.state_noise:
            features = self._features(observations)
            mean = self._means(features).clip(-MEAN_LIMIT, MEAN_LIMIT)
            return np.tanh(mean + self.state_noise.at(vector_step, features, self._log_std.cpu().numpy()))
        outputs = self._actor_outputs(observations)
        mean, log_std = outputs[:, : self.actions.size], outputs[:, self.actions.size :]
        return np.tanh(mean + np.exp(log_std.clip(LOG_STD_MIN, LOG_STD_MAX)) * self.noise.at(vector_step))

    def random_actions(self, vector_step: int) -> NDArray[np.float32]:
        """Draw uniform actions in [-1, 1), for the steps before learning starts."""
        return np.float32(2.0) * self.warmup_noise.at(vector_step) - np.float32(1.0)

    def env_actions(self, actions: NDArray[np.float32]) -> NDArray[np.float32]:
        """Scale actions from [-1, 1] to the environment's bounds."""
        return np.clip(self._center + self._half_range * actions, self._low, self._high)

    def update(self, batch: Transitions, *, improve_policy: bool = True) -> dict[str, Tensor]:
        """Take one gradient step on the critics and, if asked for, on actor and temperature; returns metrics."""
        noise = to_device(torch.randn((2, *batch.actions.shape), generator=self._update_noise), self.device)
        inputs = (batch, noise[0], noise[1] if improve_policy else None)
        metrics = self.learn(*inputs) if self.compiled_update is None else self.compiled_update(*batch, *inputs[1:])
        require_finite_gradient(metrics)
        return metrics

    def learn(self, batch: Transitions, next_noise: Tensor, policy_noise: Tensor | None) -> dict[str, Tensor]:
        """Follow the gradients of a batch, then move the targets: the maths of `update`, as a function of tensors.

        Without noise for the policy only the critics learn.
        """
        config = self.config
        temperature = self.temperature.log.detach().exp()

        with torch.no_grad():
            next_actions, next_log_probs = self.actor.sample(batch.next_observations, next_noise)
            next_q = torch.minimum(*self.target_critics(batch.next_observations, next_actions))
            targets = soft_td_target(batch.rewards, batch.terminated, next_q, next_log_probs, temperature, config.gamma)
        first_q, second_q = self.critics(batch.observations, batch.actions)
        loss_critic = critic_loss(first_q, second_q, targets)
        critic_norm = self.critic_optimizer.minimize(loss_critic, config.max_grad_norm)
        metrics = {
            "loss/value": loss_critic.detach(),
            "policy/q_value": first_q.detach().mean(),
            "policy/temperature": temperature,
            GRADIENT_NORM: critic_norm,
        }

        if policy_noise is not None:
            actions, log_probs = self.actor.sample(batch.observations, policy_noise)
            q_values = torch.minimum(*self.critics(batch.observations, actions))
            loss_actor = actor_loss(log_probs, q_values, temperature)
            actor_norm = self.actor_optimizer.minimize(loss_actor, config.max_grad_norm)
            if config.learn_temperature:
                loss_temperature = temperature_loss(self.temperature.log, log_probs, self.target_entropy)
                self.temperature_optimizer.minimize(loss_temperature)
            metrics |= {
                "loss/policy": loss_actor.detach(),
                "policy/entropy": -log_probs.detach().mean(),
                GRADIENT_NORM: torch.hypot(critic_norm, actor_norm),
            }

        self._target_parameters.move_towards(self.critic_optimizer.parameters, config.target_update_rate)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return all that changes while the agent learns."""
        return {
            "actor": self.actor.state_dict(),
            "critics": self.critics.state_dict(),
            "target_critics": self.target_critics.state_dict(),
            "temperature": self.temperature.state_dict(),
            "actor_optimizer": self.actor_optimizer.state_dict(),
            "critic_optimizer": self.critic_optimizer.state_dict(),
            "temperature_optimizer": self.temperature_optimizer.state_dict(),
            "update_noise": self._update_noise.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self.actor.load_state_dict(state["actor"])
        self.critics.load_state_dict(state["critics"])
        self.target_critics.load_state_dict(state["target_critics"])
        self.temperature.load_state_dict(state["temperature"])
        self.actor_optimizer.load_state_dict(state["actor_optimizer"])
        self.critic_optimizer.load_state_dict(state["critic_optimizer"])
        self.temperature_optimizer.load_state_dict(state["temperature_optimizer"])
        self._update_noise.set_state(state["update_noise"])
