"""Action values in two streams (Wang et al., 2016): how good the state is, and how much better each action."""

from torch import Tensor, nn

from rl_training.networks.linear import linear


class DuelingNetwork(nn.Module):
    """Q(s, a) = V(s) + A(s, a) - mean of A(s, .) (eq. 9), with both streams on the same hidden layers."""

    def __init__(self, body: nn.Sequential, features: int, actions: int) -> None:
        """Put both heads on hidden layers that give so many features."""
        super().__init__()
        self.body = body
        self.value_head = linear(features, 1)
        self.advantage_head = linear(features, actions)

    def forward(self, observations: Tensor) -> Tensor:
        """Return action values [B, K]."""
        features = self.body(observations)
        advantages = self.advantage_head(features)
        return self.value_head(features) + advantages - advantages.mean(-1, keepdim=True)

    @property
    def ranking(self) -> nn.Sequential:
        """The layers whose outputs rank the actions as their values do: the state's value is the same for all."""
        return nn.Sequential(*self.body, self.advantage_head)
