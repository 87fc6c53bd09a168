"""Proximal policy optimisation (Schulman et al., 2017): its losses, and the agent that minimises them."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rl_training.algorithms.compilation import CompiledUpdate
from rl_training.algorithms.noise import NoiseBlocks, StateNoise, gumbel, normal
from rl_training.algorithms.optimization import GRADIENT_NORM, Adam, require_finite_gradient
from rl_training.config import PPOConfig
from rl_training.data.rollout_buffer import RolloutBatch
from rl_training.networks.actor_critic import ActorCritic
from rl_training.networks.numpy_mlp import acting_path, forward_function
from rl_training.seeding import derive_seed
from rl_training.spaces import ActionSpec, ContinuousActions, DiscreteActions, ObservationSpec
from rl_training.transfer import to_device


def mean_of(values: Tensor, valid: Tensor | None) -> Tensor:
    """Mean over the transitions among the rows; None says that all are."""
    if valid is None:
        return values.mean()
    return torch.where(valid, values, 0.0).sum() / valid.sum().clamp(min=1)


def clipped_policy_loss(
    log_ratio: Tensor, advantages: Tensor, clip_range: float | Tensor, valid: Tensor | None = None
) -> Tensor:
    """Negative clipped surrogate objective (eq. 7); `log_ratio` is log pi_new(a|s) - log pi_old(a|s)."""
    ratio = log_ratio.exp()
    clipped = torch.clamp(ratio, 1.0 - clip_range, 1.0 + clip_range)  # type: ignore[arg-type]
    return -mean_of(torch.minimum(ratio * advantages, clipped * advantages), valid)


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, clip_range: float | None, valid: Tensor | None = None
) -> Tensor:
    """Mean squared error; with a clip range, that of the worse of the clipped and the free prediction."""
    squared_error = (values - returns).square()
    if clip_range is not None:
        clipped = old_values + (values - old_values).clamp(-clip_range, clip_range)
        squared_error = torch.maximum(squared_error, (clipped - returns).square())
    return mean_of(squared_error, valid)


def approximate_kl(log_ratio: Tensor, valid: Tensor | None = None) -> Tensor:
    """Low-variance estimate of KL(old || new) from samples of the old policy: E[(r - 1) - log r]."""
    return mean_of(log_ratio.exp() - 1.0 - log_ratio, valid)


def standardized(advantages: Tensor, valid: Tensor | None = None) -> Tensor:
    """Advantages with mean 0 and deviation 1; a single one becomes 0."""
    if valid is None:
        return (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)
    centred = advantages - mean_of(advantages, valid)
    return centred / (mean_of(centred.square(), valid).sqrt() + 1e-8)


def explained_variance(values: Tensor, returns: Tensor) -> Tensor:
    """Share of the variance of the returns that the values predict: 1 is perfect, 0 no better than a constant."""
    return 1.0 - (returns - values).var(correction=0) / (returns.var(correction=0) + 1e-8)


def _rows_at_once(observations: Tensor) -> int:
    """All of a rollout of vectors; of images no more than fit into memory as numbers."""
    return 1024 if observations.dtype == torch.uint8 else max(1, len(observations))


class PPOAgent:
    """Actor, critic and optimizer."""

    def __init__(
        self,
        config: PPOConfig,
        observation: ObservationSpec,
        actions: ActionSpec,
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
            self.network = ActorCritic(config, observation, actions).to(self.device)
        self.optimizer = Adam(self.network, config.learning_rate, eps=1e-5)
        self.acting_path = acting_path(self.network.actor, num_envs, self.device)
        self._action_parameters = forward_function(self.network.actor, num_envs, self.device)
        self.compiled_update = (
            CompiledUpdate(lambda *tensors: self.learn(RolloutBatch(*tensors[:-2]), *tensors[-2:]), [self.optimizer])
            if compile_update
            else None
        )
        noise_seed = derive_seed(seed, "exploration")
        if isinstance(actions, ContinuousActions):
            self.noise = NoiseBlocks(normal, (num_envs, actions.size), seed=noise_seed)
            self._log_std = self.network.log_std.detach()
            self._low, self._high = np.array(actions.low, np.float32), np.array(actions.high, np.float32)
        else:
            self.noise = NoiseBlocks(gumbel, (num_envs, sum(self.network.choices)), seed=noise_seed)
        if self.network.state_noise:
            self._features = forward_function(self.network.actor_body, num_envs, self.device)
            self._means = forward_function(nn.Sequential(self.network.actor_head), num_envs, self.device)
            self.state_noise = StateNoise(*(num_envs, *self._log_std.shape), hold=config.noise_hold, seed=noise_seed)

    def act(self, observations: NDArray[np.float32]) -> NDArray[Any]:
        """Return the most likely action for each observation, as the environment takes it."""
        parameters = self._action_parameters(observations)
        return self.env_actions(self._chosen(parameters) if self.network.discrete else parameters)

    def explore(self, observations: NDArray[np.float32], vector_step: int) -> NDArray[Any]:
        """Sample an action of the current policy for each environment; the step decides the noise."""
        if self.network.discrete:
            return self._chosen(self._action_parameters(observations) + self.noise.at(vector_step))
        log_std = self._log_std.cpu().numpy()
        if self.network.state_noise:
            features = self._features(observations)
            return self._means(features) + self.state_noise.at(vector_step, features, log_std)
        return self._action_parameters(observations) + np.exp(log_std) * self.noise.at(vector_step)

    def _chosen(self, scores: NDArray[np.float32]) -> NDArray[np.int64]:
        """Return the alternative with the highest score, of each choice if there are several."""
        if isinstance(self.actions, DiscreteActions):
            return scores.argmax(-1)
        ends = np.cumsum(self.network.choices)[:-1]
        return np.stack([part.argmax(-1) for part in np.split(scores, ends, axis=-1)], axis=-1)

    def env_actions(self, actions: NDArray[Any]) -> NDArray[Any]:
        """Return actions as the environment takes them: shifted to its first number, or cut at its bounds."""
        if isinstance(self.actions, DiscreteActions):
            return actions + self.actions.start if self.actions.start else actions
        return np.clip(actions, self._low, self._high) if isinstance(self.actions, ContinuousActions) else actions

    @torch.no_grad()
    def values(self, observations: Tensor) -> Tensor:
        """Return state values [B] on the CPU."""
        pieces = torch.split(observations, _rows_at_once(observations))
        return torch.cat([self.network.values(to_device(piece, self.device)) for piece in pieces]).cpu()

    @torch.no_grad()
    def log_probs(self, observations: Tensor, actions: Tensor) -> Tensor:
        """Return the log-probability [B] of each action, on the CPU."""
        rows = _rows_at_once(observations)
        pieces = [
            self.network.log_probs_and_entropy(to_device(seen, self.device), to_device(done, self.device))[0]
            for seen, done in zip(torch.split(observations, rows), torch.split(actions, rows), strict=True)
        ]
        return torch.cat(pieces).cpu()

    def update(self, batch: RolloutBatch, *, clip_range: float, learning_rate: float) -> dict[str, Tensor]:
        """Take one gradient step on a minibatch, compiled or not; returns detached metrics."""
        if self.compiled_update is None or self.compiled_update.path == "eager":
            metrics = self.learn(batch, clip_range, learning_rate)
        else:
            scheduled = to_device(torch.tensor([clip_range, learning_rate]), self.device)
            metrics = self.compiled_update(*batch, *scheduled)
        require_finite_gradient(metrics)
        return metrics

    def learn(
        self, batch: RolloutBatch, clip_range: float | Tensor, learning_rate: float | Tensor
    ) -> dict[str, Tensor]:
        """Follow the gradient of a minibatch: the maths of `update`, as a function of tensors."""
        config = self.config
        self.optimizer.learning_rate = learning_rate
        valid = batch.valid
        advantages = standardized(batch.advantages, valid) if config.normalize_advantage else batch.advantages

        log_probs, entropy = self.network.log_probs_and_entropy(batch.observations, batch.actions)
        log_ratio = log_probs - batch.log_probs
        if valid is not None:  # before it is exponentiated: what overflows cannot be masked out of a gradient
            log_ratio = torch.where(valid, log_ratio, 0.0)
        policy_loss = clipped_policy_loss(log_ratio, advantages, clip_range, valid)
        critic_loss = value_loss(
            self.network.values(batch.observations), batch.values, batch.returns, config.value_clip_range, valid
        )
        mean_entropy = mean_of(entropy, valid)
        loss = policy_loss + config.value_coef * critic_loss
        if config.entropy_coef:  # a bonus of weight zero would cost a backward pass all the same
            loss = loss - config.entropy_coef * mean_entropy
        gradient_norm = self.optimizer.minimize(loss, config.max_grad_norm)

        with torch.no_grad():
            return {
                "loss/policy": policy_loss.detach(),
                "loss/value": critic_loss.detach(),
                "policy/entropy": mean_entropy.detach(),
                "policy/kl": approximate_kl(log_ratio, valid),
                "policy/clip_fraction": mean_of(((log_ratio.exp() - 1.0).abs() > clip_range).float(), valid),
                GRADIENT_NORM: gradient_norm,
            }

    def state_dict(self) -> dict[str, Any]:
        """Return all that changes while the agent learns."""
        return {
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
