"""Gradient steps and target networks, shared by all agents."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from rl_training.errors import NonFiniteError


def adam(parameters: Iterable[nn.Parameter], learning_rate: float, eps: float = 1e-8) -> torch.optim.Adam:
    """Return Adam with its update fused into one kernel, which takes a third of the time of the default loop."""
    parameters = list(parameters)
    fused = parameters[0].device.type in ("cpu", "cuda")
    return torch.optim.Adam(parameters, lr=learning_rate, eps=eps, fused=fused)


def gradient_step(loss: Tensor, optimizer: torch.optim.Adam, max_grad_norm: float | None = None) -> None:
    """Move the optimizer's parameters down the gradient of `loss`, and no others; a bad gradient moves nothing."""
    parameters: list[nn.Parameter] = optimizer.param_groups[0]["params"]
    gradients = torch.autograd.grad(loss, parameters)
    norm = nn.utils.get_total_norm(gradients)
    # On a GPU this would wait for the device at every step; there the metrics are checked when they are logged.
    if norm.device.type == "cpu" and not math.isfinite(norm):
        raise NonFiniteError("The loss or its gradient is NaN or infinite.")
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    if max_grad_norm is not None:
        nn.utils.clip_grads_with_norm_(parameters, max_grad_norm, norm)
    optimizer.step()


def set_learning_rate(optimizer: torch.optim.Adam, learning_rate: float) -> None:
    """Change the step size of the following gradient steps."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


@torch.no_grad()
def move_towards(target: nn.Module, source: nn.Module, rate: float) -> None:
    """Polyak averaging: target += rate * (source - target); a rate of 1 copies."""
    torch._foreach_lerp_(list(target.parameters()), list(source.parameters()), rate)
