"""From a row of an observation to features: nothing to do for a vector; convolutions for images."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rl_training.config import Activation, AlgoConfig, Cnn
from rl_training.errors import UserError
from rl_training.networks.mlp import Layers, body_output_size, mlp_body
from rl_training.spaces import ImageShape, ObservationSpec

# Output channels, kernel size and stride of each layer. Nature: Mnih et al., 2015.
_CONVOLUTIONS: dict[Cnn, Sequence[tuple[int, int, int]]] = {
    Cnn.nature: ((32, 8, 4), (64, 4, 2), (64, 3, 1)),
    Cnn.small: ((16, 3, 2), (32, 3, 2)),
}
_SMALLEST_FOR_SMALL = 7


class Encoder(nn.Module):
    """Splits rows of bytes into their vector and their images, and joins the vector with the features of each image."""

    def __init__(self, observation: ObservationSpec, cnn: Cnn) -> None:
        super().__init__()
        self._vector_size, self._images = observation.size, observation.images
        self.cnns = nn.ModuleList(_convolutions(image, cnn) for image in observation.images)
        with torch.no_grad():
            self.output_size = self(torch.zeros(1, observation.row_size, dtype=torch.uint8)).shape[-1]

    def forward(self, rows: Tensor) -> Tensor:
        """Return features [B, F] of rows [B, bytes]; pixels become numbers from 0 to 1 only here."""
        features = []
        start = 4 * self._vector_size
        if start:
            # A copy, whose bytes begin where a number may begin: those of a row of an odd size may not.
            vectors = rows[:, :start].clone(memory_format=torch.contiguous_format)
            features.append(vectors.view(torch.float32))
        for image, cnn in zip(self._images, self.cnns, strict=True):
            size = image[0] * image[1] * image[2]
            pixels = rows[:, start : start + size].view(-1, *image)
            # Channels last: a third less time in the convolutions on a CPU.
            numbers = pixels.to(torch.float32, memory_format=torch.channels_last) / 255.0
            features.append(cnn.forward(numbers))
            start += size
        return torch.cat(features, dim=-1) if len(features) > 1 else features[0]


def encoder(observation: ObservationSpec, config: AlgoConfig) -> tuple[nn.Sequential, int]:
    """Return the layers in front of a fully connected network, none for vectors, and its number of inputs."""
    if not observation.images:
        return Layers(), observation.size
    layer = Encoder(observation, config.cnn)
    return Layers(layer), layer.output_size


def observation_body(
    observation: ObservationSpec,
    config: AlgoConfig,
    hidden_sizes: Sequence[int] | None = None,
    activation: Activation | None = None,
) -> tuple[nn.Sequential, int]:
    """Return the layers from an observation to the last hidden layer, those of the config by default, and its size."""
    sizes = config.hidden_sizes if hidden_sizes is None else hidden_sizes
    layers, inputs = encoder(observation, config)
    return layers.extend(mlp_body(inputs, sizes, activation or config.activation)), body_output_size(inputs, sizes)


def _convolutions(image: ImageShape, cnn: Cnn) -> nn.Sequential:
    channels, height, width = image
    layers: list[nn.Module] = []
    for outputs, kernel, stride in _CONVOLUTIONS[cnn]:
        height, width = ((size - kernel) // stride + 1 for size in (height, width))
        if height < 1 or width < 1:
            fits_small = min(image[1:]) >= _SMALLEST_FOR_SMALL
            advice = "Try algo.cnn=small." if fits_small else "Observations of a dtype other than uint8 are vectors."
            raise UserError(f"Images of {image[1]} x {image[2]} pixels are too small for algo.cnn={cnn.name}. {advice}")
        layers += [nn.Conv2d(channels, outputs, kernel, stride), nn.ReLU()]
        channels = outputs
    return Layers(*layers, nn.Flatten())
