"""The public Python API: train from a script or a notebook, without Hydra.

import rl_training
result = rl_training.fit("sac", "Pendulum-v1", total_timesteps=20_000, seed=1)
print(result.metrics["eval/return_mean"], result.run_dir)
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_training.config import AlgoConfig, DQNConfig, EnvConfig, PPOConfig, SACConfig, TrainConfig
from rl_training.config.conversion import algo_variant, plain, shipped_env, tuned_preset, typed_config
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


def make_config(
    algo: str | AlgoConfig,
    env: str | EnvConfig,
    *,
    preset: bool = True,
    hyperparameters: Mapping[str, Any] | None = None,
    env_settings: Mapping[str, Any] | None = None,
    **settings: Any,
) -> TrainConfig:
    """Build a config from an algorithm (name or settings) and an environment (name, Gymnasium id or settings).

    The name of an algorithm is that of a file in conf/algo: "sac", or a variant such as "sac_efficient".

    Named pairs that have a tuned preset start from it, as on the command line; `preset=False` starts from the
    defaults. `hyperparameters` (fields of the algorithm's config), `env_settings` (fields of `EnvConfig`) and
    `settings` (fields of `TrainConfig`: total_timesteps=…, seed=…, eval={"episodes": 50}) win over the preset.
    Errors name settings as the command line does: algo.gamma is the hyperparameter gamma.
    """
    variant = algo_variant(algo) if isinstance(algo, str) else {}
    spec = registry.get(algo.partition("_")[0] if isinstance(algo, str) else algo.name)
    named_env = (shipped_env(env) or {"id": env}) if isinstance(env, str) else plain(env)
    data: dict[str, Any] = {"algo": variant if isinstance(algo, str) else plain(algo), "env": named_env}
    if preset and isinstance(algo, str) and isinstance(env, str):
        _merge(data, tuned_preset(algo, named_env.get("name", "")))
    _merge(data, {"algo": plain(dict(hyperparameters or {})), "env": plain(dict(env_settings or {}))})
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
    **settings: Any,
) -> TrainResult:
    """Train an algorithm on an environment and return its result; `settings` are those of `make_config`."""
    config = make_config(algo, env, **settings)
    directory = None if run_dir is None else Path(run_dir)
    return DefaultExperimentManager().setup(config, callbacks, run_dir=directory).train()
