"""Typed configuration. Importing it loads neither Hydra nor torch; `config.store` registers it with Hydra."""

from rl_training.config.algorithms import (
    Activation,
    AlgoConfig,
    Cnn,
    DQNConfig,
    OffPolicyConfig,
    PPOConfig,
    QLoss,
    SACConfig,
    Schedule,
)
from rl_training.config.schema import (
    CheckpointConfig,
    DeviceConfig,
    DeviceKind,
    EnvConfig,
    EvalConfig,
    LoggingConfig,
    TrainConfig,
    Vectorization,
)

__all__ = [
    "Activation",
    "AlgoConfig",
    "CheckpointConfig",
    "Cnn",
    "DQNConfig",
    "DeviceConfig",
    "DeviceKind",
    "EnvConfig",
    "EvalConfig",
    "LoggingConfig",
    "OffPolicyConfig",
    "PPOConfig",
    "QLoss",
    "SACConfig",
    "Schedule",
    "TrainConfig",
    "Vectorization",
]
