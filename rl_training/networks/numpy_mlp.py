"""Acting without torch: for a handful of observations the calls cost more than the arithmetic.

On one core a 64x64 network answers in 5 us here and in 22 us as torch modules; 256x256 in 10 against 37. From 8
observations at 256x256 on, torch's matrix products win (54 against 37 us), so wide networks with many environments
use it.
"""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

Forward = Callable[[NDArray[np.float32]], NDArray[np.float32]]
WIDE, MANY = 128, 8


def acting_path(modules: Iterable[nn.Module], batch_size: int, device: torch.device) -> str:
    """Choose "numpy" or "torch" from the network, the batch size and the device alone, never from a timing."""
    layers = list(modules)
    plain = all(isinstance(layer, (nn.Linear, nn.Tanh, nn.ReLU)) for layer in layers)
    widths = [layer.out_features for layer in layers[:-1] if isinstance(layer, nn.Linear)]
    large = batch_size >= MANY and max(widths, default=0) >= WIDE
    return "numpy" if plain and device.type == "cpu" and not large else "torch"


def forward_function(network: nn.Sequential, batch_size: int, device: torch.device) -> Forward:
    """Return a function from observations [B, D] to the network's outputs, in the cheapest way for this batch size.

    The numpy way works on views of the torch parameters, so it always has the newest ones.
    """
    if acting_path(network, batch_size, device) == "numpy":
        return _numpy_forward(network)

    @torch.inference_mode()
    def forward(observations: NDArray[np.float32]) -> NDArray[np.float32]:
        return network(torch.from_numpy(observations).to(device)).cpu().numpy()

    return forward


def _numpy_forward(network: nn.Sequential) -> Forward:
    prepared: dict[int, list[_Layer]] = {}

    def forward(values: NDArray[np.float32]) -> NDArray[np.float32]:
        rows = len(values)
        layers = prepared.get(rows)
        if layers is None:
            layers = prepared[rows] = _prepare(network, rows)
        for weight, bias, activate, out in layers:
            values = np.dot(values, weight, out)
            values += bias
            if activate is not None:
                activate(values)
        return values

    return forward


# Weight, bias, activation in place, and memory for the result; the last layer's result is new each time.
_Layer = tuple[NDArray[np.float32], NDArray[np.float32], Callable[[Any], Any] | None, NDArray[np.float32] | None]


def _prepare(network: nn.Sequential, rows: int) -> list[_Layer]:
    """Give everything the shape of a batch of `rows`: numpy takes three times as long where it has to broadcast."""
    layers: list[_Layer] = []
    modules = list(network)
    for index, module in enumerate(modules):
        if not isinstance(module, nn.Linear):
            continue
        weight, bias = module.weight.detach().numpy().T, module.bias.detach().numpy()
        last = index == len(modules) - 1
        activation = None if last else _activation(modules[index + 1], (rows, len(bias)))
        out = None if last else np.empty((rows, len(bias)), np.float32)
        layers.append((weight, bias.reshape(1, -1) if rows == 1 else bias, activation, out))
    return layers


def _activation(module: nn.Module, shape: tuple[int, int]) -> Callable[[Any], Any]:
    if isinstance(module, nn.Tanh):
        return lambda values: np.tanh(values, out=values)
    zeros = np.zeros(shape, np.float32)
    return lambda values: np.maximum(values, zeros, out=values)
