"""Log-probabilities and entropies as plain formulas; torch.distributions costs more than the networks they follow."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

_HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)


def categorical_log_prob_and_entropy(logits: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability of each chosen alternative, and entropy in nats; logits [B, K], actions [B]."""
    log_probs = F.log_softmax(logits, dim=-1)
    chosen = log_probs.gather(-1, actions.unsqueeze(-1)).squeeze(-1)
    return chosen, -(log_probs.exp() * log_probs).sum(-1)


def choices_log_prob_and_entropy(logits: Tensor, actions: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The same for independent choices at once: logits [B, sum of counts], actions [B] for one choice, else [B, K]."""
    if len(counts) == 1:
        return categorical_log_prob_and_entropy(logits, actions.reshape(len(logits)))
    parts = [
        categorical_log_prob_and_entropy(part, action)
        for part, action in zip(torch.split(logits, list(counts), dim=-1), actions.unbind(-1), strict=True)
    ]
    log_probs, entropies = zip(*parts, strict=True)
    return torch.stack(log_probs).sum(0), torch.stack(entropies).sum(0)


def gaussian_log_prob(mean: Tensor, log_std: Tensor, values: Tensor) -> Tensor:
    """Log-density of a diagonal Gaussian, summed over the last dimension."""
    standardized = (values - mean) * torch.exp(-log_std)
    return (-0.5 * standardized.square() - log_std - _HALF_LOG_TWO_PI).sum(-1)


def gaussian_entropy(log_std: Tensor) -> Tensor:
    """Entropy in nats of a diagonal Gaussian, summed over the last dimension."""
    return (log_std + _HALF_LOG_TWO_PI + 0.5).sum(-1)


def squashed_gaussian_sample(mean: Tensor, log_std: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Return tanh(mean + std * noise) and its exact log-density (Haarnoja et al., 2018, eq. 21).

    log(1 - tanh(u)^2) is written as 2 (log 2 - u - softplus(-2u)), which stays finite where tanh saturates.
    """
    unsquashed = mean + torch.exp(log_std) * noise
    log_density = (-0.5 * noise.square() - log_std - _HALF_LOG_TWO_PI).sum(-1)
    log_det = (2.0 * (math.log(2.0) - unsquashed - F.softplus(-2.0 * unsquashed))).sum(-1)
    return torch.tanh(unsquashed), log_density - log_det
