"""Gradient steps and target networks, shared by all agents.

The parameters of a network lie side by side in one tensor, of which each parameter is a view. Adam, gradient clipping
and target updates are then a few operations on one vector instead of a few for each layer.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from rl_training.errors import NonFiniteError

BETA_1, BETA_2 = 0.9, 0.999


def flatten_parameters(module: nn.Module) -> Tensor:
    """Move the parameters of a module into one tensor and return it; the module goes on using them as views."""
    parameters = list(module.parameters())
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
    offset = 0
    for parameter in parameters:
        parameter.data = flat[offset : offset + parameter.numel()].view_as(parameter)
        offset += parameter.numel()
    return flat


class Adam:
    """Adam (Kingma and Ba, 2015) on the flattened parameters of a module."""

    def __init__(self, module: nn.Module, learning_rate: float, eps: float = 1e-8) -> None:
        self.learning_rate, self._eps = learning_rate, eps
        self.flat = flatten_parameters(module)
        self._parameters = list(module.parameters())
        self._first_moment = torch.zeros_like(self.flat)
        self._second_moment = torch.zeros_like(self.flat)
        self._steps = torch.zeros((), device=self.flat.device)

    def minimize(self, loss: Tensor, max_grad_norm: float | None = None) -> None:
        """Move the parameters down the gradient of `loss`; a gradient that is not finite moves nothing."""
        gradients = torch.autograd.grad(loss, self._parameters)
        gradient = torch.cat([part.reshape(-1) for part in gradients])
        norm = torch.linalg.vector_norm(gradient)
        # On a GPU this would wait for the device at every step; there the metrics are checked when they are logged.
        if norm.device.type == "cpu" and not math.isfinite(norm):
            raise NonFiniteError("The loss or its gradient is NaN or infinite.")
        if max_grad_norm is not None:
            gradient.mul_((max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
        self._steps += 1
        torch._fused_adam_(
            *([self.flat], [gradient], [self._first_moment], [self._second_moment], [], [self._steps]),
            lr=self.learning_rate,
            beta1=BETA_1,
            beta2=BETA_2,
            weight_decay=0.0,
            eps=self._eps,
            amsgrad=False,
            maximize=False,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the moments and the number of steps; the parameters belong to the module."""
        return {
            "first_moment": self._first_moment,
            "second_moment": self._second_moment,
            "steps": self._steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self._first_moment.copy_(state["first_moment"])
        self._second_moment.copy_(state["second_moment"])
        self._steps.copy_(state["steps"])


def move_towards(target: Tensor, source: Tensor, rate: float) -> None:
    """Polyak averaging of flat parameters: target += rate * (source - target); a rate of 1 copies."""
    target.lerp_(source, rate)
