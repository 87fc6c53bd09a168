"""Fully connected networks."""

from collections.abc import Sequence

from torch import Tensor, nn

from rl_training.config import Activation
from rl_training.networks.linear import linear

_ACTIVATIONS: dict[Activation, type[nn.Module]] = {Activation.tanh: nn.Tanh, Activation.relu: nn.ReLU}


class Layers(nn.Sequential):
    """A sequence whose layers are run directly: calling each as a module looks for hooks, for over 1 us a layer."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Run the layers one after the other."""
        for layer in self._modules.values():
            assert layer is not None
            inputs = layer.forward(inputs)
        return inputs


def mlp_body(
    input_size: int, hidden_sizes: Sequence[int], activation: Activation, *, layer_norm: bool = False
) -> nn.Sequential:
    """Hidden layers, each followed by its activation, normalised before it on request; without sizes, the identity."""
    layers: list[nn.Module] = []
    for size in hidden_sizes:
        norm = [nn.LayerNorm(size)] if layer_norm else []
        layers += [linear(input_size, size), *norm, _ACTIVATIONS[activation]()]
        input_size = size
    return Layers(*layers)


def mlp(
    input_size: int,
    hidden_sizes: Sequence[int],
    output_size: int,
    activation: Activation,
    *,
    layer_norm: bool = False,
) -> nn.Sequential:
    """Hidden layers and a linear output layer."""
    body = mlp_body(input_size, hidden_sizes, activation, layer_norm=layer_norm)
    return body.append(linear(body_output_size(input_size, hidden_sizes), output_size))


def body_output_size(input_size: int, hidden_sizes: Sequence[int]) -> int:
    """Return the number of features that `mlp_body` gives."""
    return hidden_sizes[-1] if hidden_sizes else input_size


def initialize_orthogonally(module: nn.Module, gain: float) -> None:
    """Give every linear and convolutional layer orthogonal weights of this gain (Saxe et al., 2014) and zero biases."""
    for layer in module.modules():
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            assert layer.bias is not None
            nn.init.orthogonal_(layer.weight, gain)
            nn.init.zeros_(layer.bias)
