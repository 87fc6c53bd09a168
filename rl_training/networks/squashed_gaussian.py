"""SAC's actor: a Gaussian squashed into (-1, 1) by tanh."""

from torch import Tensor, nn

from rl_training.config import SACConfig
from rl_training.networks.distributions import squashed_gaussian_sample
from rl_training.networks.mlp import mlp
from rl_training.spaces import ContinuousActions, ObservationSpec

LOG_STD_MIN, LOG_STD_MAX = -20.0, 2.0


class SquashedGaussianActor(nn.Module):
    """Maps observations to the mean and log-deviation of the Gaussian before it is squashed."""

    def __init__(self, config: SACConfig, observation: ObservationSpec, actions: ContinuousActions) -> None:
        super().__init__()
        self.network = mlp(observation.size, config.hidden_sizes, 2 * actions.size, config.activation)

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and log-deviation, each [B, A]."""
        mean, log_std = self.network(observations).chunk(2, dim=-1)
        return mean, log_std.clamp(LOG_STD_MIN, LOG_STD_MAX)

    def sample(self, observations: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return actions in (-1, 1) [B, A] and their log-densities [B], as a function of standard normal noise."""
        mean, log_std = self(observations)
        return squashed_gaussian_sample(mean, log_std, noise)
