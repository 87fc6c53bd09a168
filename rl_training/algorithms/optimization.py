"""Gradient steps and target networks, shared by all agents.

The parameters of a network lie side by side in one tensor, of which each parameter is a view. Adam, gradient clipping
and target updates are then a few operations on one vector instead of a few for each layer.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rl_training.errors import NonFiniteError

BETA_1, BETA_2 = 0.9, 0.999
GRADIENT_NORM = "loss/gradient_norm"


class FlatParameters:
    """The parameters of a module in one vector; the module goes on using them as views of it."""

    def __init__(self, module: nn.Module) -> None:
        self._owners = [
            (owner, name)
            for owner in module.modules()
            for name, value in owner._parameters.items()
            if value is not None
        ]
        self.tensors: list[Tensor] = [owner._parameters[name] for owner, name in self._owners]  # type: ignore[misc]
        self.vector = torch.cat([tensor.detach().reshape(-1) for tensor in self.tensors])
        for tensor, view in zip(self.tensors, self._views(self.vector), strict=True):
            tensor.data = view

    def _views(self, vector: Tensor) -> list[Tensor]:
        parts = torch.split(vector, [tensor.numel() for tensor in self.tensors])
        return [part.view(tensor.shape) for part, tensor in zip(parts, self.tensors, strict=True)]

    def move_towards(self, source: "FlatParameters", rate: float) -> None:
        """Polyak averaging: self += rate * (source - self); a rate of 1 copies."""
        self.vector.lerp_(source.vector, rate)

    def changing_tensors(self) -> list[Tensor]:
        """Return what an update reads and writes."""
        return [self.vector]

    @contextlib.contextmanager
    def replaced_by(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Let the module compute with another vector, so that an update can be traced without touching this one."""
        own_vector, own_tensors = self.vector, self.tensors
        (self.vector,) = tensors
        self.tensors = [
            view.detach().requires_grad_(own.requires_grad)
            for view, own in zip(self._views(self.vector), own_tensors, strict=True)
        ]
        self._bind(self.tensors)
        try:
            yield
        finally:
            self.vector, self.tensors = own_vector, own_tensors
            self._bind(own_tensors)

    def _bind(self, tensors: Sequence[Tensor]) -> None:
        for (owner, name), tensor in zip(self._owners, tensors, strict=True):
            owner._parameters[name] = tensor  # type: ignore[assignment]


class Adam:
    """Adam (Kingma and Ba, 2015) on the flattened parameters of a module."""

    def __init__(self, module: nn.Module, learning_rate: float, eps: float = 1e-8) -> None:
        self.learning_rate: float | Tensor = learning_rate
        self._eps = eps
        self.parameters = FlatParameters(module)
        self._first_moment = torch.zeros_like(self.parameters.vector)
        self._second_moment = torch.zeros_like(self.parameters.vector)
        self._steps = torch.zeros((), device=self.parameters.vector.device)

    def minimize(self, loss: Tensor, max_grad_norm: float | None = None) -> Tensor:
        """Move the parameters down the gradient of `loss`; returns the gradient's norm before clipping."""
        gradients = torch.autograd.grad(loss, self.parameters.tensors)
        gradient = torch.cat([part.reshape(-1) for part in gradients])
        norm = torch.linalg.vector_norm(gradient)
        if max_grad_norm is not None:
            gradient.mul_((max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
        self._steps += 1
        torch._fused_adam_(
            *([self.parameters.vector], [gradient], [self._first_moment], [self._second_moment], [], [self._steps]),
            lr=self.learning_rate,
            beta1=BETA_1,
            beta2=BETA_2,
            weight_decay=0.0,
            eps=self._eps,
            amsgrad=False,
            maximize=False,
        )
        return norm

    def changing_tensors(self) -> list[Tensor]:
        """Return what an update reads and writes."""
        return [self.parameters.vector, self._first_moment, self._second_moment, self._steps]

    @contextlib.contextmanager
    def replaced_by(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Compute with other tensors, so that an update can be traced without touching these."""
        own = self._first_moment, self._second_moment, self._steps, self.learning_rate
        vector, self._first_moment, self._second_moment, self._steps = tensors
        try:
            with self.parameters.replaced_by([vector]):
                yield
        finally:
            self._first_moment, self._second_moment, self._steps, self.learning_rate = own

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


def require_finite_gradient(metrics: Mapping[str, Tensor]) -> None:
    """Refuse to go on after a gradient step that was not finite.

    The value loss is asked too: a compiled gradient may turn NaN into a number, as that of the Huber loss does.
    On a GPU this would wait for the device at every step; there the metrics are checked when they are logged.
    """
    norm, loss = metrics[GRADIENT_NORM], metrics["loss/value"]
    if norm.device.type == "cpu" and not (math.isfinite(norm) and math.isfinite(loss)):
        raise NonFiniteError("The loss or its gradient is NaN or infinite.")
