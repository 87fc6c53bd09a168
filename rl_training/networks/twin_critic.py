"""SAC's critics: two action-value networks, whose minimum resists overestimation (Fujimoto et al., 2018)."""

import torch
from torch import Tensor, nn

from rl_training.config import SACConfig
from rl_training.networks.encoder import encoder
from rl_training.networks.mlp import mlp
from rl_training.spaces import ContinuousActions, ObservationSpec


class TwinCritic(nn.Module):
    """Two networks that each map (observation, action) to a value; they share the features of images."""

    def __init__(self, config: SACConfig, observation: ObservationSpec, actions: ContinuousActions) -> None:
        super().__init__()
        self.encoder, features = encoder(observation, config)
        inputs = features + actions.size
        self.first, self.second = (
            mlp(inputs, config.hidden_sizes, 1, config.activation, layer_norm=config.critic_layer_norm)
            for _ in range(2)
        )

    def forward(self, observations: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Return both values, each [B]."""
        inputs = torch.cat([self.encoder(observations), actions], dim=-1)
        return self.first(inputs).squeeze(-1), self.second(inputs).squeeze(-1)
