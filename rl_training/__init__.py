"""Reinforcement-learning experiments: typed, composed with Hydra, resumable.

The public names are those of `rl_training.api.algorithms`; they are imported when first used, because the command line
answers --help without loading torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_training.api.algorithms import (
        DQN,
        PPO,
        SAC,
        Callback,
        EnvConfig,
        EvalResult,
        TrainConfig,
        TrainerState,
        TrainResult,
        evaluate_checkpoint,
        fit,
        make_config,
        resume_training,
        train_dqn,
        train_ppo,
        train_sac,
    )

__version__ = "0.1.0"

__all__ = [
    "DQN",
    "PPO",
    "SAC",
    "Callback",
    "EnvConfig",
    "EvalResult",
    "TrainConfig",
    "TrainResult",
    "TrainerState",
    "evaluate_checkpoint",
    "fit",
    "make_config",
    "resume_training",
    "train_dqn",
    "train_ppo",
    "train_sac",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from rl_training.api import algorithms

        return getattr(algorithms, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
