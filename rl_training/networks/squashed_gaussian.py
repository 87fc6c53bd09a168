"""SAC's actor: a Gaussian squashed into (-1, 1) by tanh."""

import torch
from torch import Tensor, nn

from rl_training.config import SACConfig
from rl_training.networks.distributions import squashed_gaussian_sample
from rl_training.networks.encoder import observation_body
from rl_training.networks.linear import linear
from rl_training.networks.state_noise import state_log_std
from rl_training.spaces import ContinuousActions, ObservationSpec

LOG_STD_MIN, LOG_STD_MAX = -20.0, 2.0
# With state-dependent noise a mean far out, where tanh is flat, would never come back.
MEAN_LIMIT = 2.0


class SquashedGaussianActor(nn.Module):
    """Maps observations to the mean and log-deviation of the Gaussian before it is squashed."""

    def __init__(self, config: SACConfig, observation: ObservationSpec, actions: ContinuousActions) -> None:
        super().__init__()
        self.state_noise = config.state_dependent_noise
        outputs = actions.size if self.state_noise else 2 * actions.size
        body, features = observation_body(observation, config)
        self.network = body.append(linear(features, outputs))
        if self.state_noise:
            self.log_std = nn.Parameter(torch.full((features, actions.size), config.initial_log_std))

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and log-deviation, each [B, A]."""
        if self.state_noise:
            *hidden, head = self.network
            features = observations
            for layer in hidden:
                features = layer(features)
            mean = head(features).clamp(-MEAN_LIMIT, MEAN_LIMIT)
            # Not detached, unlike in PPO: else the layers may let the features, and with them the noise, fade to zero.
            return mean, state_log_std(features, self.log_std)
        mean, log_std = self.network(observations).chunk(2, dim=-1)
        return mean, log_std.clamp(LOG_STD_MIN, LOG_STD_MAX)

    def sample(self, observations: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return actions in (-1, 1) [B, A] and their log-densities [B], as a function of standard normal noise."""
        mean, log_std = self(observations)
        return squashed_gaussian_sample(mean, log_std, noise)
