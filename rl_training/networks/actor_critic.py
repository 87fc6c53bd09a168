"""PPO's network: a policy head and a value head, on separate or shared hidden layers."""

import math

import torch
from torch import Tensor, nn

from rl_training.config import PPOConfig
from rl_training.networks.distributions import (
    choices_log_prob_and_entropy,
    gaussian_entropy,
    gaussian_log_prob,
)
from rl_training.networks.encoder import observation_body
from rl_training.networks.mlp import initialize_orthogonally
from rl_training.networks.state_noise import state_log_std
from rl_training.spaces import ActionSpec, ContinuousActions, ObservationSpec, choice_counts


class ActorCritic(nn.Module):
    """Maps observations to the parameters of the action distribution and to a value.

    Discrete choices get logits; continuous ones the mean of a Gaussian whose deviation does not depend on the state,
    or does so through state-dependent noise.
    """

    def __init__(self, config: PPOConfig, observation: ObservationSpec, actions: ActionSpec) -> None:
        super().__init__()
        self.choices = choice_counts(actions)
        """How many alternatives each discrete choice has; empty for continuous actions."""
        self.discrete = bool(self.choices)
        outputs = actions.size if isinstance(actions, ContinuousActions) else sum(self.choices)
        self.state_noise = config.state_dependent_noise and not self.discrete
        critic_sizes = config.hidden_sizes if config.critic_hidden_sizes is None else config.critic_hidden_sizes

        self.actor_body, features = observation_body(observation, config)
        self.critic_body, critic_features = (
            (self.actor_body, features)
            if config.share_network
            else observation_body(observation, config, critic_sizes, config.critic_activation)
        )
        self.actor_head = nn.Linear(features, outputs)
        self.critic_head = nn.Linear(critic_features, 1)
        if not self.discrete:
            shape = (features, outputs) if self.state_noise else (outputs,)
            self.log_std = nn.Parameter(torch.full(shape, config.initial_log_std))

        if config.orthogonal_init:
            initialize_orthogonally(self.actor_body, gain=math.sqrt(2))
            initialize_orthogonally(self.critic_body, gain=math.sqrt(2))
            # A small last layer makes the first policy almost uniform (Andrychowicz et al., 2021).
            initialize_orthogonally(self.actor_head, gain=0.01)
            initialize_orthogonally(self.critic_head, gain=1.0)

    @property
    def actor(self) -> nn.Sequential:
        """The layers from observations to action parameters."""
        return nn.Sequential(*self.actor_body, self.actor_head)

    def values(self, observations: Tensor) -> Tensor:
        """State values [B]."""
        return self.critic_head(self.critic_body(observations)).squeeze(-1)

    def log_probs_and_entropy(self, observations: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability [B] of each action and entropy [B] of the policy at each observation."""
        features = self.actor_body(observations)
        parameters = self.actor_head(features)
        if self.discrete:
            return choices_log_prob_and_entropy(parameters, actions, self.choices)
        if self.state_noise:
            log_std = state_log_std(features.detach(), self.log_std)
        else:
            log_std = self.log_std.expand_as(parameters)
        return gaussian_log_prob(parameters, log_std, actions), gaussian_entropy(log_std)
