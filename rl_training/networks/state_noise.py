"""State-dependent exploration noise (gSDE; Raffin et al., 2022): noise that is a function of the state.

The noise of an action is theta . features, where the features are the actor's last hidden layer and theta is drawn from
N(0, exp(log_std)^2) and then kept for some steps. The same state gives the same noise for as long, so the agent moves
smoothly instead of trembling; seen at one moment, the noise is Gaussian with a deviation that depends on the state.
"""

import torch
from torch import Tensor


def state_log_std(features: Tensor, log_std: Tensor) -> Tensor:
    """Return the log-deviation [B, A] of the noise at features [B, F], for log-deviations [F, A] of its weights."""
    variance = features.square() @ torch.exp(2.0 * log_std)
    return 0.5 * torch.log(variance + 1e-6)
