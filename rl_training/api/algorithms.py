"""The public Python API: train from a script or a notebook, without Hydra.

import rl_training
result = rl_training.fit("sac", "Pendulum-v1", total_timesteps=20_000, seed=1)
print(result.metrics["eval/return_mean"], result.run_dir)
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_training.config import AlgoConfig, DQNConfig, EnvConfig, PPOConfig, SACConfig, TrainConfig
from rl_training.config.conversion import plain, shipped_env, tuned_preset, typed_config
from rl_training.experiment import registry
from rl_training.experiment.default_manager import DefaultExperimentManager
from rl_training.runtime.callbacks import Callback
from rl_training.runtime.dqn_trainer import train_dqn
from rl_training.runtime.ppo_trainer import train_ppo
from rl_training.runtime.sac_trainer import train_sac
from rl_training.runtime.trainer import EvalResult, TrainerState, TrainResult
from rl_training.runtime.workflows import evaluate_checkpoint, resume_training

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

PPO, DQN, SAC = PPOConfig, DQNConfig, SACConfig


def make_config(algo: str | AlgoConfig, env: str | EnvConfig, *, preset: bool = True, **settings: Any) -> TrainConfig:
    """Build a config from an algorithm (name or settings) and an environment (name, Gymnasium id or settings).

    Named pairs that have a tuned preset start from it, as on the command line; `preset=False` starts from the
    defaults. `settings` are fields of `TrainConfig` and win: total_timesteps=…, seed=…, eval={"episodes": 50}.
    """
    spec = registry.get(algo if isinstance(algo, str) else algo.name)
    env_settings = (shipped_env(env) or {"id": env}) if isinstance(env, str) else plain(env)
    data: dict[str, Any] = {"algo": {}, "env": env_settings}
    if preset and isinstance(algo, str) and isinstance(env, str):
        _merge(data, tuned_preset(spec.name, env_settings.get("name", "")))
    if not isinstance(algo, str):
        data["algo"] = plain(algo)
    _merge(data, plain(settings))
    return typed_config(data, spec.config_class)


def _merge(base: dict[str, Any], changes: dict[str, Any]) -> None:
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            _merge(base[key], value)
        else:
            base[key] = value


def fit(
    algo: str | AlgoConfig,
    env: str | EnvConfig,
    *,
    callbacks: Sequence[Callback] = (),
    run_dir: Path | str | None = None,
    preset: bool = True,
    **settings: Any,
) -> TrainResult:
    """Train an algorithm on an environment and return its result; see `make_config` for the arguments."""
    config = make_config(algo, env, preset=preset, **settings)
    directory = None if run_dir is None else Path(run_dir)
    return DefaultExperimentManager().setup(config, callbacks, run_dir=directory).train()
